"""Machines come and go under a live run: it goes on from the last save, every row once, with the right shares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import ray
from ray.train import RunConfig, ScalingConfig
from train_harness import (
    BATCH,
    ROWS,
    SECONDS_PER_ROW,
    assert_nothing_left,
    control_actor,
    counting_loop,
    journal_of,
    wait_for,
)

from rex_ray import RexConfig, RexTrainer
from rex_ray.control.commands import RequestCheckpoint
from rex_ray.control.events import GroupStarted, IncidentReported
from rex_ray.control.notes import Decided
from rex_ray.control.replay import replay
from rex_ray.core.types import LearntShape
from rex_ray.train.local_cluster import LocalCluster
from rex_ray.train.profile_files import read_profiles, write_profiles

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

_STORY_LIMIT_S = 800.0


def test_a_job_that_learnt_from_another_begins_right_saves_when_asked_and_leaves_its_own_profiles(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    learnt = tmp_path / "earlier.json"
    # Half as fast as they are: of another job, the kinds' ratio counts.
    times = {device: tuple(2 * seconds * rows for rows in (8, 24)) for device, seconds in SECONDS_PER_ROW.items()}
    write_profiles(
        learnt,
        [LearntShape(device=d, num_rows=(8.0, 24.0), own_s=own_s, weights=(10.0, 10.0)) for d, own_s in times.items()],
    )
    trainer = RexTrainer(
        counting_loop,
        train_loop_config={"num_epochs": 16},
        rex_config=RexConfig(global_batch_size=BATCH, checkpoint_interval_s=1e6, learn_from=str(learnt)),
        scaling_config=ScalingConfig(num_workers=2, label_selector=cluster.label_selectors),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
        dataset_size=ROWS,
    )
    assert not trainer.request_save("nobody is there")
    asked: list[bool] = []

    def ask() -> None:
        wait_for(lambda: _last_step() >= 2, 600, "the first steps")
        asked.append(trainer.request_save("by hand"))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert trainer.fit().metrics == {"fewest": 16.0, "most": 16.0}
    thread.join(30)
    assert asked == [True]

    journal = journal_of(trainer.journal_dir)
    (group,) = (event for event in journal.events if isinstance(event, GroupStarted))
    first = next(note for note in journal.notes if isinstance(note, Decided) and note.kind == "first")
    assert first.proposal is not None
    shares = dict(zip((w.device for w in group.problem.workers), first.proposal.local_batch_sizes, strict=True))
    assert shares["T4"] == pytest.approx(BATCH / 3, abs=1)
    assert [command.reason for command in journal.commands if isinstance(command, RequestCheckpoint)] == ["by hand"]
    (saved,) = (event for event in journal.events if isinstance(event, IncidentReported) and event.kind == "save")
    assert saved.message.endswith("by hand")
    assert 0 < saved.step < 16 * ROWS // BATCH
    assert replay(journal).is_identical
    assert {shape.device for shape in read_profiles(trainer.run_dir)} == {"T4", "V100"}
    assert_nothing_left()


def _last_step() -> int:
    control = control_actor()
    return -1 if control is None else int(ray.get(control.status.remote(), timeout=30).last_step)


def test_f1_f4_f5_a_worker_killed_a_node_added_one_drained_and_one_lost_and_every_row_once(tmp_path: Path) -> None:
    """In a process of its own: its cluster is another one, whose nodes come and go."""
    found = tmp_path / "found.json"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.recovery", "--quick", "--json", str(found)],
        cwd=root,
        env={**os.environ, "RAY_TMPDIR": "", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=_STORY_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    told = json.loads(found.read_text(encoding="utf-8"))
    figures = told["figures"]
    assert (figures["lost_rows"], figures["doubled_rows"], figures["left_behind"]) == (0.0, 0.0, 0.0)
    assert figures["metric_error"] < 1e-12, "the final metric of the undisturbed run"
    killed, added, drained, removed = told["tables"]["recovery"]
    assert [row["workers"] for row in (killed, added, drained, removed)] == ["2 to 2", "2 to 3", "3 to 2", "2 to 1"]
    (end,) = told["tables"]["ends"]
    assert end["saves_asked_for"] >= 1, "ahead of the drained node"
    # T4 and V100 take 2 to 1 for a row: 24 rows over them are 8 and 16, over T4 and two V100 5, 10 and 9.
    shares = [sorted(group.split()) for group in end["first_shares"].split("; ")]
    assert ["T4:8", "V100:16"] in shares[1:]
    grown = next(group for group in shares if len(group) == 3)
    assert int(grown[0].removeprefix("T4:")) <= 6, "planned at once, the new worker by what is known of its kind"
