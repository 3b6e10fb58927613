"""Machines come and go under a live run: it goes on from the last save, every row once, with the right shares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ray.train import FailureConfig, RunConfig, ScalingConfig
from train_harness import assert_nothing_left, journal_of, wait_for

from experiments._recovery_loop import BATCH, NUM_ROWS, SECONDS_PER_ROW, counted_loop, logged_steps, undisturbed
from rex_ray import RexConfig, RexTrainer
from rex_ray.control.commands import RequestCheckpoint
from rex_ray.control.events import GroupStarted, IncidentReported, WorkerLost
from rex_ray.control.journal import Journal
from rex_ray.control.notes import Decided
from rex_ray.control.replay import replay
from rex_ray.core.types import LearntShape
from rex_ray.hosting.profile_files import read_profiles, write_profiles
from rex_ray.train.local_cluster import LocalCluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

_STORY_LIMIT_S = 540.0


def test_f1_a_job_that_learnt_from_another_begins_right_saves_when_asked_and_goes_on_from_that_very_save(
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
        counted_loop,
        train_loop_config={"folder": str(tmp_path)},
        rex_config=RexConfig(
            global_batch_size=BATCH,
            max_global_batch_size=BATCH,  # a row counts one only at this batch
            checkpoint_interval_s=1e6,
            snapshot_interval_s=0,
            learn_from=str(learnt),
        ),
        scaling_config=ScalingConfig(num_workers=2, label_selector=cluster.label_selectors),
        run_config=RunConfig(
            name="run", storage_path=str(tmp_path / "storage"), failure_config=FailureConfig(max_failures=1)
        ),
        dataset_size=NUM_ROWS,
    )
    assert not trainer.request_save("nobody is there")
    befallen: list[str] = []

    def befall() -> None:
        """Have it save, then kill rank 1 in the midst of a backward pass, then have it end."""
        try:
            wait_for(lambda: len(logged_steps(tmp_path)) > 3, 120, "the first steps")
            assert trainer.request_save("by hand")
            wait_for(lambda: saves_of(journal_of(trainer.journal_dir)), 60, "the save")
            old = logged_steps(tmp_path)[-1].generation
            (tmp_path / "kill").touch()
            wait_for(lambda: logged_steps(tmp_path)[-1].generation != old, 120, "the next group")
            befallen.append("all of it")
        finally:
            (tmp_path / "stop").touch()

    thread = threading.Thread(target=befall, daemon=True)
    thread.start()
    metrics = trainer.fit().metrics
    thread.join(30)
    assert befallen, "something did not happen"
    expected = undisturbed(int(metrics["epochs"]))
    assert metrics == pytest.approx(expected, rel=1e-12), "the final metric of the undisturbed run, every row once"

    journal = journal_of(trainer.journal_dir)
    first, second = (event for event in journal.events if isinstance(event, GroupStarted))
    begun = next(note for note in journal.notes if isinstance(note, Decided) and note.kind == "first")
    assert begun.proposal is not None
    shares = dict(zip((w.device for w in first.problem.workers), begun.proposal.local_batch_sizes, strict=True))
    assert shares["T4"] == pytest.approx(BATCH / 3, abs=1)
    assert [command.reason for command in journal.commands if isinstance(command, RequestCheckpoint)] == ["by hand"]
    (saved,) = saves_of(journal)
    assert saved.message.endswith("by hand")
    assert 0 < saved.step == second.step, "mid-epoch, to the sample"
    assert second.allocation is not None
    # Whom Ray Train hears of first: the killed one, or the other, which lost its peer in a collective.
    assert any(isinstance(event, WorkerLost) for event in journal.events)
    assert replay(journal).is_identical
    assert {shape.device for shape in read_profiles(trainer.run_dir)} == {"T4", "V100"}
    assert_nothing_left()


def saves_of(journal: Journal) -> list[IncidentReported]:
    return [event for event in journal.events if isinstance(event, IncidentReported) and event.kind == "save"]


@pytest.mark.long
def test_f4_f5_a_node_is_added_one_drained_and_one_lost_and_every_row_counts_once(tmp_path: Path) -> None:
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
    assert [row["workers"] for row in told["tables"]["recovery"]] == ["2 to 3", "3 to 2", "2 to 1"]
    (end,) = told["tables"]["ends"]
    assert end["saves_asked_for"] >= 1, "ahead of the drained node"
    # T4 and V100 take 2 to 1 for a row: 24 rows over them are 8 and 16, over T4 and two V100 5, 10 and 9.
    shares = [sorted(group.split()) for group in end["first_shares"].split("; ")]
    assert ["T4:8", "V100:16"] in shares[1:]
    grown = next(group for group in shares if len(group) == 3)
    assert int(grown[0].removeprefix("T4:")) <= 6, "planned at once, the new worker by what is known of its kind"
