"""A search beside a real run on a real Ray cluster: its process comes, and goes with the run or with its asker."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest
import ray
from ray.train import RunConfig, ScalingConfig
from row_counter import BATCH, ROWS
from train_harness import assert_nothing_left, control_actor, counting_loop, journal_of, queue_actor, steps_of, wait_for

from experiments._leftovers import search_helpers
from rex_ray import RexConfig, RexTrainer
from rex_ray.control.events import RunEnded, SearchFailed, SearchFinished
from rex_ray.control.notes import Decided
from rex_ray.control.replay import replay
from rex_ray.train.local_cluster import LocalCluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]


def test_d6_f2_control_actor_queue_and_search_helper_are_killed_at_once_and_training_never_notices(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    seen: list[list[str]] = []

    def kill_all_of_control() -> None:
        seen.append(wait_for(search_helpers, 90, "a search"))
        ray.kill(control_actor(), no_restart=False)
        ray.kill(queue_actor(), no_restart=False)
        with contextlib.suppress(ProcessLookupError):  # its asker's end may have ended it already
            os.kill(int(seen[0][0].split()[-1]), signal.SIGKILL)
        wait_for(lambda: not {*seen[0]} & {*search_helpers()}, 20, "the end of the killed actor's helper")
        seen.append([])

    watcher = threading.Thread(target=kill_all_of_control, daemon=True)
    watcher.start()
    num_epochs = 24
    trainer = RexTrainer(
        counting_loop,
        train_loop_config={"num_epochs": num_epochs},
        rex_config=RexConfig(
            policy="rex",
            policy_options={"growth": "off", "trigger": "off"},
            global_batch_size=BATCH,
            join_timeout_s=20.0,
        ),
        scaling_config=ScalingConfig(num_workers=2, label_selector=cluster.label_selectors),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
        dataset_size=ROWS,
    )
    # Every row once per epoch, and so what an undisturbed run ends with.
    assert trainer.fit().metrics == {"fewest": num_epochs, "most": num_epochs}
    watcher.join(30)
    assert len(seen) == 2
    assert_nothing_left()
    journal = journal_of(tmp_path / "run" / "rex_ray" / "journal")
    assert len(journal.headers) == 2
    assert any(isinstance(note, Decided) and note.kind == "search" for note in journal.notes)
    first_end = next(event for event in journal.events if isinstance(event, SearchFinished | SearchFailed))
    assert isinstance(first_end, SearchFailed)
    # Whichever of the two the kernel ends first: the actor that asked, or, a moment before, its helper.
    assert first_end.reason in (
        "the helper was lost with the control actor",
        "the search helper ended (exit status -9)",
    )
    status = trainer.control_status
    assert status is not None
    assert (status.num_restarts, status.fault) == (1, None)
    assert len(steps_of(journal)) >= (num_epochs - 10) * ROWS // BATCH
    # The queue is there again, too: the last steps were observed.
    assert steps_of(journal)[-1].step == num_epochs * ROWS // BATCH - 1
    assert journal.events[-1] == RunEnded(reason="finished")
    assert replay(journal).is_identical
