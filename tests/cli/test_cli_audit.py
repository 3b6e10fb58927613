"""``rex-ray audit``: a run's own false-alarm rate, from its journal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rex_ray.cli import main
from rex_ray.cli.simulated_journal import write_journal
from rex_ray.control.journal import Header
from rex_ray.control.replay import controller_for
from rex_ray.scenario import Episode, NoiseModel
from rex_ray.sim import mixed_cluster, simulate

EPISODES = tuple(
    Episode(rank=rank, start_step=start, num_steps=60, factor=1.6) for rank, start in ((0, 150), (3, 330), (1, 520))
)


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["audit", *arguments])
    out, err = capsys.readouterr()
    code = stopped.value.code
    return code if isinstance(code, int) else 0, out, err


def record(folder: Path, policy: str, *, episodes: tuple[Episode, ...] = (), num_steps: int = 700, **options) -> Path:
    world = mixed_cluster(
        ("T4", "T4", "V100", "V100"),
        "resnet50",
        global_batch_size=256,
        noise=NoiseModel(sd=0.02),
        episodes=episodes,
        steps_per_epoch=10_000,
    )
    header = Header(seed=0, mode="auto", policy=policy, policy_options=options)
    run = folder / f"{policy}-{len(episodes)}"
    write_journal(run, header, simulate(controller_for(header), world, num_steps=num_steps).events)
    return run


@pytest.fixture(scope="module")
def slowed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("audit"), "rex", episodes=EPISODES)


def test_a_run_with_slowdowns_has_far_more_alarms_than_its_permutations(capsys, slowed_run):
    code, out, _ = run_cli(capsys, str(slowed_run), "--json", "--copies", "19")
    assert code == 0
    found = json.loads(out)
    assert found["measured"]["num_alarms"] >= 2 * len(EPISODES)
    assert found["permuted"]["num_alarms"] / 19 < 0.2 * found["measured"]["num_alarms"]
    assert found["is_more_than_noise"]
    assert found["p_value"] == pytest.approx(0.05)
    assert found["resplits_in_the_run"] >= len(EPISODES)
    assert found["permuted"]["alarms_per_10k_low"] <= found["permuted"]["alarms_per_10k"]
    assert len(found["alarms_per_copy"]) == 19
    assert found["trigger"].startswith("the run's own")


def test_a_quiet_run_has_none_in_either_and_is_judged_without_a_trigger_of_its_own(capsys, tmp_path):
    run = record(tmp_path, "bsp", num_steps=400)
    code, out, _ = run_cli(capsys, str(run), "--copies", "9")
    assert code == 0
    assert "Quiet: no alarm in the order that was measured, and none in any copy." in out
    assert "that of rex with its defaults: the run had none" in out
    found = json.loads(run_cli(capsys, str(run), "--copies", "9", "--json")[1])
    assert found["measured"]["num_alarms"] == found["permuted"]["num_alarms"] == 0
    assert found["permuted"]["alarms_per_10k_high"] < found["measured"]["alarms_per_10k_high"]
    assert not found["is_more_than_noise"]


def test_the_runs_own_options_count(capsys, tmp_path):
    run = record(tmp_path, "rex", episodes=EPISODES, num_steps=500, trigger_min_factor=3.5, trigger_fast_factor=0.0)
    found = json.loads(run_cli(capsys, str(run), "--copies", "3", "--json")[1])
    assert found["measured"]["num_alarms"] == 0  # nothing here is 3.5 times as slow


def test_alarms_that_the_copies_raise_as_well_are_said_to_be_no_more(capsys, tmp_path):
    bursts = tuple(Episode(rank=k % 4, start_step=60 + 40 * k, num_steps=10, factor=2.0) for k in range(14))
    run = record(tmp_path, "bsp", episodes=bursts)
    code, out, _ = run_cli(capsys, str(run), "--copies", "9")
    assert code == 0
    assert re.search(r"(no|not clearly) more than its copies do or noise alone", out)
    assert "nothing here says that these alarms were about changes of speed that last" in out


def test_the_same_seed_gives_the_same_audit(capsys, slowed_run):
    one, same, other = (
        run_cli(capsys, str(slowed_run), "--copies", "3", "--json", "--seed", seed)[1] for seed in ("1", "1", "2")
    )
    assert one == same
    assert json.loads(other)["seed"] == 2


def test_a_run_that_is_too_short_is_said_to_be(capsys, recorded_run):
    code, out, err = run_cli(capsys, str(recorded_run))
    assert code == 2
    assert out == ""
    assert "is too short to audit" in err
    assert "audit a longer run" in err


def test_blocks_too_long_for_the_run_are_refused_with_what_would_do(capsys, slowed_run):
    code, _, err = run_cli(capsys, str(slowed_run), "--block", "500")
    assert code == 2
    assert "--block 500 leaves fewer than 4 blocks" in err


def test_a_folder_without_a_journal_is_one_line(capsys, tmp_path):
    code, out, err = run_cli(capsys, str(tmp_path))
    assert code == 2
    assert out == ""
    assert "holds no journal" in err
