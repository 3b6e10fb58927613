"""``rex-ray plan --prices``: every smaller mix with time and cost, what to rent, and what is not known."""

from __future__ import annotations

import json

import pytest

from rex_ray.cli import main
from rex_ray.scenario import parse_cluster
from rex_ray.sim.limits import cluster_limits

PLAN = ("-c", "2xT4,2xV100", "-w", "resnet50", "-b", "256")


def run_plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    out, err = capsys.readouterr()
    code = stopped.value.code
    return code if isinstance(code, int) else 0, out, err


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    code, out, _ = run_plan(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(out)


def test_every_mix_takes_what_its_limits_say_and_costs_hours_times_prices(capsys):
    found = planned(capsys, *PLAN, "--price", "T4=0.5", "--price", "V100=2")
    assert found["usd_per_hour"] == {"T4": 0.5, "V100": 2.0}
    price = {"T4": 0.5, "V100": 2.0}
    for mix in found["mixes"]:
        devices = parse_cluster(mix["cluster"])
        limits = cluster_limits(devices, "resnet50", reference_batch_size=256)
        assert mix["time_s"] == pytest.approx(limits.oracle_s)
        assert (mix["smallest_batch"], mix["largest_batch"]) == limits.oracle_batches
        assert mix["usd"] == pytest.approx(limits.oracle_s / 3600 * sum(price[device] for device in devices))
    # Eight mixes there are; a lone T4 does not hold 256 rows, so those are left out that cannot run at all.
    assert {mix["cluster"] for mix in found["mixes"]} >= {"2xT4,2xV100", "2xV100", "1xT4,1xV100"}
    assert "1xT4" not in {mix["cluster"] for mix in found["mixes"]}


def test_the_best_trades_are_those_that_nothing_beats(capsys):
    mixes = planned(capsys, *PLAN, "--prices")["mixes"]
    assert [mix["time_s"] for mix in mixes] == sorted(mix["time_s"] for mix in mixes)
    for mix in mixes:
        beaten = any(
            other["time_s"] <= mix["time_s"] and other["usd"] <= mix["usd"] and other is not mix for other in mixes
        )
        assert mix["is_pareto"] == (not beaten)


def test_a_device_that_is_free_is_always_worth_renting(capsys):
    found = planned(capsys, *PLAN, "--price", "T4=0", "--price", "V100=100")
    cheapest = min(found["mixes"], key=lambda mix: mix["usd"])
    assert cheapest["cluster"] == "2xT4"
    assert any(line.startswith("cheapest: 2xT4 costs 0.00 USD") for line in found["advice"])


def test_less_is_advised_where_less_is_as_good(capsys):
    # An old card beside fast ones adds an all-reduce and hardly a row.
    found = planned(capsys, "-c", "1xGTX750,1xA100", "-w", "resnet18", "-b", "128", "--prices")
    assert any("1xA100" in line for line in found["advice"])
    assert found["without_price"] == ["GTX750", "A100"]


def test_a_missing_price_is_said_and_no_cost_is_made_up(capsys):
    code, out, _ = run_plan(capsys, "-c", "2xT4,1xA100", "-w", "resnet18", "-b", "256", "--prices")
    assert code == 0
    assert "no price is known of A100: give for example --price A100=1.50" in out
    found = planned(capsys, "-c", "2xT4,1xA100", "-w", "resnet18", "-b", "256", "--prices")
    for mix in found["mixes"]:
        assert (mix["usd"] is None) == ("A100" in mix["cluster"])


def test_the_way_to_the_target_is_told_without_prices(capsys):
    found = planned(capsys, *PLAN)
    way, limits = found["to_target"], cluster_limits(parse_cluster("2xT4,2xV100"), "resnet50", reference_batch_size=256)
    assert way["best_s"] == pytest.approx(limits.oracle_s)
    assert way["best_fixed"]["time_s"] == pytest.approx(limits.best_fixed_balanced.time_s)
    assert way["best_s"] <= way["best_fixed"]["time_s"] <= way["this_batch_s"]
    batches = [look["global_batch_size"] for look in way["best_batches"]]
    assert batches == sorted(batches)  # this noise scale rises
    assert "mixes" not in found
    code, out, _ = run_plan(capsys, *PLAN)
    assert code == 0
    assert "at the best batch of every moment" in out
    assert str(batches[-1]) in out


def test_the_mixes_are_shown_with_the_whole_and_each_kind_alone(capsys):
    code, out, _ = run_plan(capsys, *PLAN, "--prices")
    assert code == 0
    for said in ("2xT4,2xV100", "2xV100", "2xT4", "USD per hour: T4 0.526", "best trade"):
        assert said in out


def test_very_many_mixes_are_thinned_and_keep_the_whole(capsys):
    found = planned(capsys, "-c", "24xT4,24xV100", "-w", "resnet18", "-b", "256", "--prices")
    assert 20 < len(found["mixes"]) <= 200
    assert max(mix["num_workers"] for mix in found["mixes"]) == 48


def test_a_workload_without_noise_scales_has_a_split_and_no_time(capsys):
    code, out, _ = run_plan(capsys, "-c", "2xK80,1xP100", "-w", "lstm", "-b", "96", "--network", "none", "--prices")
    assert code == 0
    assert "no source measured the noise scale of lstm" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--price", "T4"], "--price 'T4' is not DEVICE=USD per hour; write for example --price T4=0.5"),
        (["--price", "T4=cheap"], "is not DEVICE=USD per hour"),
        (["--price", "T4=-1"], "is not DEVICE=USD per hour"),
        (["--price", "V10=2"], "no such device (did you mean 'V100'?)"),
        (["--price", "T4=1", "--price", "T4=2"], "--price T4 is given twice, as 1 and as 2"),
        (["--limits", "--prices"], "leave out --prices, --price and --profile"),
    ],
)
def test_prices_that_cannot_be_are_one_clear_line(capsys, arguments, said):
    code, out, err = run_plan(capsys, *PLAN, *arguments)
    assert code == 2
    assert out == ""
    assert said in err
