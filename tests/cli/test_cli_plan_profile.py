"""``rex-ray plan --profile RUN``: step times that a run of the user's own has measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rex_ray.cli import main
from rex_ray.cli.simulated_journal import write_journal
from rex_ray.control.journal import Header
from rex_ray.control.replay import controller_for
from rex_ray.scenario import Episode, NoiseModel, load_profile
from rex_ray.sim import mixed_cluster, simulate

DEVICES = ("T4", "T4", "V100", "V100")


def record(folder: Path, policy: str, **options) -> Path:
    # The last slowdown outlasts the run: what is slow at its end is one worker, not its kind.
    world = mixed_cluster(
        DEVICES,
        "resnet50",
        global_batch_size=256,
        noise=NoiseModel(sd=0.01),
        episodes=(Episode(rank=0, start_step=300, num_steps=None, factor=1.7),),
        steps_per_epoch=10_000,
    )
    header = Header(seed=0, mode="auto", policy=policy, policy_options=options)
    write_journal(folder / policy, header, simulate(controller_for(header), world, num_steps=450).events)
    return folder / policy


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("profiles")
    return {policy: record(folder, policy) for policy in ("rex", "bsp")}


def run_plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "-w", "resnet50", *arguments])
    out, err = capsys.readouterr()
    code = stopped.value.code
    return code if isinstance(code, int) else 0, out, err


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    code, out, _ = run_plan(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(out)


def test_measured_curves_give_the_split_that_the_true_ones_give(capsys, runs):
    own = planned(capsys, "-c", "2xT4,2xV100", "-b", "256", "--profile", str(runs["rex"]))
    public = planned(capsys, "-c", "2xT4,2xV100", "-b", "256", "--network", "none")
    assert own["run"] == "rex"
    assert own["balanced"]["step_s"] == pytest.approx(public["balanced"]["step_s"], rel=0.05)
    for mine, true in zip(own["balanced"]["local_batch_sizes"], public["balanced"]["local_batch_sizes"], strict=True):
        assert mine == pytest.approx(true, abs=8)
    assert own["balanced"]["extrapolated"] == []


def test_a_worker_that_is_slow_at_the_end_does_not_slow_its_kind(capsys, runs):
    own = planned(capsys, "-c", "1xT4", "-b", "64", "--profile", str(runs["rex"]))
    true_s = float(load_profile("T4", "resnet50").own_time_s(64))
    assert own["balanced"]["step_s"] == pytest.approx(true_s, rel=0.15)  # and 1.7 times as long for the slow one


def test_what_is_beyond_the_measured_sizes_is_said_to_be_extrapolated(capsys, runs):
    own = planned(capsys, "-c", "2xT4,2xV100", "-b", "256", "--profile", str(runs["bsp"]))
    assert own["measured"]["T4"]["fewest_rows"] == own["measured"]["T4"]["most_rows"] == 64
    assert own["balanced"]["extrapolated"] == ["T4", "V100"]
    assert own["equal"]["extrapolated"] == []
    assert own["measured"]["T4"]["reach_rows"] == 128
    code, out, _ = run_plan(capsys, "-c", "2xT4,2xV100", "-b", "256", "--profile", str(runs["bsp"]))
    assert code == 0
    assert "(T4, V100 extrapolated)" in out
    assert "T4: the curve that bsp learnt, measured at 64 rows, extrapolated beyond, and not planned above 128" in out


def test_a_kind_that_the_run_lacks_is_public_and_said_to_be(capsys, runs):
    own = planned(capsys, "-c", "2xT4,2xA100", "-b", "256", "--profile", str(runs["rex"]))
    assert any(line.startswith("A100: not in rex, so public times") for line in own["notices"])
    assert set(own["measured"]) == {"T4"}


def test_the_reduction_is_the_runs_own_unless_a_network_is_named(capsys, runs):
    arguments = ("-c", "2xT4,2xV100", "-b", "256", "--profile", str(runs["rex"]))
    own = planned(capsys, *arguments)
    assert own["network"] == "measured"
    assert own["sync_s"] == pytest.approx(0.0, abs=1e-5)  # that world's reduction took no time
    named = planned(capsys, *arguments, "--network", "T4")
    assert named["sync_s"] > 0.05


def test_a_kind_without_a_public_profile_can_be_planned_with_once_it_was_measured(capsys, recorded_run, tmp_path):
    renamed = tmp_path / "run" / "rex_ray" / "journal"
    renamed.mkdir(parents=True)
    for path in (recorded_run / "rex_ray" / "journal").iterdir():
        data = path.read_bytes()
        if path.suffix == ".jsonl":
            data = re.sub(rb',"crc":\d+}', b"}", data.replace(b'"T4"', b'"Z9"'))
        (renamed / path.name).write_bytes(data)
    code, _, err = run_plan(capsys, "-c", "2xZ9", "-b", "24")
    assert code == 2
    assert "unknown device 'Z9'" in err
    own = planned(capsys, "-c", "2xZ9", "-b", "24", "--profile", str(tmp_path / "run"))
    assert own["balanced"]["local_batch_sizes"] == [12, 12]
    assert "Z9" in own["measured"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-c", "2xT5", "--profile", "RUN"], "unknown device 'T5' (known: 2080Ti, A100"),
        (["-c", "2xT4", "-b", "99999", "--profile", "RUN"], "99999 rows does not fit 2xT4"),
        (["-c", "2xA100", "--profile", "RUN"], "rex measured T4, V100, none of which is in the cluster 2xA100"),
        (["-c", "2xT4", "--profile", "NOTHING"], "holds no journal"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_line(capsys, runs, tmp_path, arguments, said):
    places = {"RUN": str(runs["rex"]), "NOTHING": str(tmp_path)}
    code, out, err = run_plan(capsys, *(places.get(word, word) for word in arguments))
    assert code == 2
    assert out == ""
    assert said in err
