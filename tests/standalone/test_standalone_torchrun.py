"""Real ranks, started by the real torchrun: shares that follow their speeds, and rows that outlive their failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rex_ray.control.events import GroupStarted, MetricReported, RunEnded, StepObserved
from rex_ray.control.notes import Applied
from rex_ray.control.reading import read_journal
from rex_ray.control.replay import replay
from rex_ray.hosting.journal_files import read_files
from rex_ray.hosting.profile_files import read_profiles

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("counting_script.py")
ROOT = Path(__file__).parents[2]
STEPS_PER_EPOCH = 10


def torchrun(
    output: Path, *arguments: str, num_ranks: int = 2, max_restarts: int = 0, script: Path = SCRIPT
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "REX_RAY_DEVICE": "T4,V100",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return subprocess.run(
        [*launcher, f"--max-restarts={max_restarts}", str(script), f"--output={output}", *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def told(output: Path) -> dict[str, Any]:
    return json.loads((output / "told.json").read_text())


def journal_in(folder: Path) -> Any:
    return read_journal(read_files(folder))


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_shares_follow_speeds_and_training_outlives_its_control_server(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--num-epochs=12", "--kill-server-in-epoch=6")
    assert done.returncode == 0, done.stderr
    found = told(tmp_path)
    assert found["fewest"] == found["most"] == 12, "every row once per epoch"
    assert found["shares"][0] < 16 < found["shares"][1], "the slow rank has fewer rows"
    assert sum(found["shares"]) == 32

    first, second = found["servers"]
    assert first != second, "the server that was killed was started again"
    assert found["server_at_end"] == [second]
    assert not is_alive(first), "nothing is left behind"
    assert not is_alive(second), "nothing is left behind"
    assert "started again" in done.stderr

    journal = journal_in(tmp_path / "rex_ray" / "journal")
    assert len(journal.headers) == 2, "the second server went on with the first one's journal"
    assert isinstance(journal.events[-1], RunEnded)
    assert len([note for note in journal.notes if isinstance(note, Applied)]) >= 2
    steps = [event.step for event in journal.events if isinstance(event, StepObserved)]
    assert steps == sorted(set(steps))
    assert not replay(journal).differences
    assert {shape.device for shape in read_profiles(tmp_path)} == {"T4", "V100"}


@pytest.mark.long
def test_a_killed_rank_costs_no_row_and_other_ranks_go_on_from_what_it_saved(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--num-epochs=4", "--kill-rank-1-at-step=25", max_restarts=1)
    assert done.returncode == 0, done.stderr
    found = told(tmp_path)
    assert found["life"] == 1, "torchrun started the ranks again"
    assert found["first_step"] == 2 * STEPS_PER_EPOCH, "from the newest save"
    assert found["fewest"] == found["most"] == 4, "every row once per epoch"
    journal = journal_in(tmp_path / "rex_ray" / "journal")
    groups = [event for event in journal.events if isinstance(event, GroupStarted)]
    assert [group.step for group in groups] == [0, 2 * STEPS_PER_EPOCH], "one run, one journal"
    assert len([event for event in journal.events if isinstance(event, MetricReported)]) == 4
    assert not replay(journal).differences
    assert len(list(tmp_path.glob("checkpoint_*"))) == 2

    alone = torchrun(tmp_path, "--num-epochs=5", num_ranks=1)
    assert alone.returncode == 0, alone.stderr
    found = told(tmp_path)
    assert (found["first_step"], found["last_step"]) == (4 * STEPS_PER_EPOCH, 5 * STEPS_PER_EPOCH)
    assert found["fewest"] == found["most"] == 5
    assert found["shares"] == [32]
    assert journal_in(tmp_path / "rex_ray" / "journal-1").headers == journal.headers, "another launch, another journal"


def test_ranks_with_different_configurations_are_told_so_before_they_train(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--num-epochs=1", "--odd-seed-on-rank-1")
    assert done.returncode != 0
    assert "ConfigError: rank 1 has seed=1 where rank 0 has seed=0" in done.stderr
    assert not (tmp_path / "rex_ray").exists()


def test_the_example_trains_and_can_be_reported(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--num-epochs=3", script=ROOT / "examples" / "torchrun_digits.py")
    assert done.returncode == 0, done.stderr
    assert "shares (" in done.stdout
    journal = journal_in(tmp_path / "rex_ray" / "journal")
    metrics = [event.metrics["accuracy"] for event in journal.events if isinstance(event, MetricReported)]
    assert len(metrics) == 3
    assert metrics[-1] > 0.6
