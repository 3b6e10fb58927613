"""RexTrainer on a real Ray cluster: it trains, journals, survives what may die, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from train_harness import (
    BATCH,
    ROWS,
    assert_nothing_left,
    control_actor,
    counting_loop,
    journal_of,
    queue_actor,
    steps_of,
    switches_of,
    wait_for,
)

from rex_ray import ConfigError, RexConfig, RexTrainer
from rex_ray.control.events import GroupStarted, MetricReported, RunEnded, WorkerLost
from rex_ray.control.replay import replay
from rex_ray.core.types import Allocation
from rex_ray.train import trainer as trainer_module
from rex_ray.train.control_actor import ControlActor
from rex_ray.train.local_cluster import LocalCluster
from rex_ray.train.placement import label_selectors

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


def trainer_in(
    storage: Path, cluster: LocalCluster, *, num_epochs: int = 6, max_failures: int = 0, **loop_config: Any
) -> RexTrainer:
    return RexTrainer(
        counting_loop,
        train_loop_config={"num_epochs": num_epochs, **loop_config},
        # A save with every report.
        rex_config=RexConfig(policy="rex", global_batch_size=BATCH, checkpoint_interval_s=0.0, join_timeout_s=20.0),
        scaling_config=ScalingConfig(num_workers=2, label_selector=cluster.label_selectors),
        run_config=RunConfig(
            name="run", storage_path=str(storage), failure_config=FailureConfig(max_failures=max_failures)
        ),
        dataset_size=ROWS,
    )


@pytest.fixture
def make_trainer(cluster: LocalCluster, tmp_path: Path) -> Callable[..., RexTrainer]:
    return partial(trainer_in, tmp_path, cluster)


@pytest.fixture
def in_background() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Run something beside ``fit``; what goes wrong in it fails the test."""
    threads: list[threading.Thread] = []
    errors: list[BaseException] = []

    def start(act: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                act()
            except BaseException as error:
                errors.append(error)

        threads.append(threading.Thread(target=guarded, daemon=True))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(30)
    assert not errors, errors


def first_steps_seen() -> bool:
    control = control_actor()
    return control is not None and bool(ray.get(control.status.remote(), timeout=10).last_step >= 2)


@pytest.fixture(scope="module")
def finished(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[RexTrainer, Path]:
    """A run that ended well, and where it stored."""
    storage = tmp_path_factory.mktemp("finished")
    trainer = trainer_in(storage, cluster)
    assert trainer.fit().metrics == {"fewest": 6.0, "most": 6.0}
    assert_nothing_left()
    return trainer, storage


def test_a_run_is_journalled_whole(finished: tuple[RexTrainer, Path]) -> None:
    trainer, _ = finished
    status = trainer.control_status
    assert status is not None
    assert (status.phase, status.fault, status.num_restarts, status.dropped) == ("Ended", None, 0, {})

    journal = journal_of(trainer.run_dir / "journal")
    (started,) = (event for event in journal.events if isinstance(event, GroupStarted))
    assert started.problem.dataset_size == ROWS
    assert [step.step for step in steps_of(journal)] == list(range(6 * ROWS // BATCH))
    reported = [event for event in journal.events if isinstance(event, MetricReported)]
    assert [event.metrics["fewest"] for event in reported] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert journal.events[-1] == RunEnded(reason="finished")
    report = replay(journal)
    assert report.is_identical, report.differences


def test_the_slow_kind_of_device_is_read_off_its_node_and_gets_fewer_rows(finished: tuple[RexTrainer, Path]) -> None:
    journal = journal_of(finished[0].run_dir / "journal")
    (started,) = (event for event in journal.events if isinstance(event, GroupStarted))
    devices = [worker.device for worker in started.problem.workers]
    assert sorted(devices) == ["T4", "V100"]
    assert switches_of(journal)[-1].local_batch_sizes[devices.index("T4")] < BATCH / 2


def test_the_same_name_goes_on_from_the_last_save_and_keeps_the_old_journal(
    finished: tuple[RexTrainer, Path], cluster: LocalCluster, tmp_path: Path
) -> None:
    shutil.copytree(finished[1], tmp_path, dirs_exist_ok=True)
    trainer = trainer_in(tmp_path, cluster, num_epochs=7)
    assert trainer.fit().metrics == {"fewest": 7.0, "most": 7.0}
    steps = [step.step for step in steps_of(journal_of(trainer.journal_dir))]
    assert steps == list(range(6 * ROWS // BATCH, 7 * ROWS // BATCH))
    assert steps_of(journal_of(trainer.run_dir / "journal-1"))[-1].step == 6 * ROWS // BATCH - 1


def test_a_broken_queue_means_no_observations_and_training_ends_well(
    make_trainer: Callable[..., RexTrainer], in_background: Callable[..., None]
) -> None:
    in_background(lambda: ray.kill(wait_for(queue_actor, 60, "the queue"), no_restart=True))
    trainer = make_trainer()
    assert trainer.fit().metrics == {"fewest": 6.0, "most": 6.0}
    journal = journal_of(trainer.journal_dir)
    assert any(isinstance(event, GroupStarted) for event in journal.events)
    assert steps_of(journal) == []
    assert switches_of(journal) == []
    assert_nothing_left()


class DeafActor(ControlActor):
    """Answers everything but the question for news."""

    async def latest(self, generation: str, version: int, save_number: int = -1) -> Allocation | None:
        await asyncio.sleep(3600)
        return None


def test_a_blocked_actor_call_means_no_switch_and_training_ends_well(
    make_trainer: Callable[..., RexTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "ControlActor", DeafActor)
    trainer = make_trainer()
    assert trainer.fit().metrics == {"fewest": 6.0, "most": 6.0}
    journal = journal_of(trainer.journal_dir)
    assert len(steps_of(journal)) == 6 * ROWS // BATCH
    assert len(journal.commands) >= 2, "a switch was published"
    assert switches_of(journal) == [], "and nobody heard of it"
    assert_nothing_left()


def test_f2_a_killed_control_actor_is_back_from_its_journal_and_training_never_notices(
    make_trainer: Callable[..., RexTrainer], in_background: Callable[..., None]
) -> None:
    def kill() -> None:
        wait_for(first_steps_seen, 60, "the first steps")
        ray.kill(control_actor(), no_restart=False)

    in_background(kill)
    trainer = make_trainer(num_epochs=16)
    assert trainer.fit().metrics == {"fewest": 16.0, "most": 16.0}
    status = trainer.control_status
    assert status is not None
    assert status.num_restarts == 1
    assert status.fault is None
    journal = journal_of(trainer.journal_dir)
    assert len(journal.headers) == 2
    assert steps_of(journal)[-1].step == 16 * ROWS // BATCH - 1
    assert journal.events[-1] == RunEnded(reason="finished")
    report = replay(journal)
    assert report.is_identical, report.differences
    assert_nothing_left()


def test_a_killed_worker_is_restarted_at_the_last_saved_sample(
    make_trainer: Callable[..., RexTrainer], tmp_path: Path
) -> None:
    trainer = make_trainer(num_epochs=4, max_failures=1, at_epoch=2, once=str(tmp_path / "killed"))
    assert trainer.fit().metrics == {"fewest": 4.0, "most": 4.0}
    assert (tmp_path / "killed").exists()
    journal = journal_of(trainer.journal_dir)
    first, second = (event for event in journal.events if isinstance(event, GroupStarted))
    assert first.step == 0
    # The save at the end of epoch 1, or the one before if Ray Train had not taken note of it yet.
    assert second.step in (ROWS // BATCH, 2 * ROWS // BATCH)
    assert second.allocation is not None
    # Whom Ray Train hears of first: the killed one, or the other, which lost its peer in a collective.
    assert any(isinstance(event, WorkerLost) for event in journal.events)
    assert steps_of(journal)[-1].step == 4 * ROWS // BATCH - 1
    assert replay(journal).is_identical
    assert_nothing_left()


def test_a_failing_loop_fails_the_run_and_leaves_nothing(make_trainer: Callable[..., RexTrainer]) -> None:
    trainer = make_trainer(at_epoch=0, raises=True)
    with pytest.raises(TrainingFailedError, match="the loop's own fault"):
        trainer.fit()
    last = journal_of(trainer.journal_dir).events[-1]
    assert isinstance(last, RunEnded)
    assert last.reason.startswith("failed: ")
    assert_nothing_left()


def test_two_runs_under_tune_do_not_meet(cluster: LocalCluster, tmp_path: Path) -> None:
    def trial(config: dict[str, Any]) -> None:
        RexTrainer(
            counting_loop,
            train_loop_config={"num_epochs": config["num_epochs"]},
            rex_config=RexConfig(global_batch_size=BATCH),
            scaling_config=ScalingConfig(num_workers=1, label_selector={"ray.io/accelerator-type": "in(T4,V100)"}),
            run_config=RunConfig(name=f"run-{config['num_epochs']}", storage_path=str(tmp_path)),
        ).fit()

    tuner = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0, "node:__internal_head__": 0.001}),
        param_space={"num_epochs": tune.grid_search([1, 2])},
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    )
    assert tuner.fit().num_errors == 0
    for num_epochs in (1, 2):
        journal = journal_of(tmp_path / f"run-{num_epochs}" / "rex_ray" / "journal")
        assert steps_of(journal)[-1].step == num_epochs * ROWS // BATCH - 1
        assert journal.events[-1] == RunEnded(reason="finished")
    assert_nothing_left()


def test_bad_input_is_refused_before_anything_starts(cluster: LocalCluster, tmp_path: Path) -> None:
    def make(**changes: Any) -> RexTrainer:
        given = {
            "rex_config": RexConfig(global_batch_size=BATCH, placement_timeout_s=1.0),
            "scaling_config": ScalingConfig(num_workers=2),
            "run_config": RunConfig(name="run", storage_path=str(tmp_path)),
            "dataset_size": ROWS,
        }
        return RexTrainer(counting_loop, **(given | changes))

    with pytest.raises(ConfigError, match=r"num_workers=0.*ScalingConfig\(num_workers=1\)"):
        make(scaling_config=ScalingConfig(num_workers=0))
    with pytest.raises(ConfigError, match=r"global_batch_size=1 is below num_workers=2"):
        make(rex_config=RexConfig(global_batch_size=1))
    with pytest.raises(ConfigError, match=r"global_batch_size=32 is below num_workers=64"):
        make(scaling_config=ScalingConfig(num_workers=(1, 64)))
    with pytest.raises(ConfigError, match=r"global_batch_size=32 is above the 31 rows"):
        make(dataset_size=31)
    with pytest.raises(ConfigError, match=r"'T4': 8, 'V100': 25\} sum to 33 rows over 2 workers, not to .*=32"):
        make(
            rex_config=RexConfig(
                global_batch_size=BATCH, policy="bsp", policy_options={"local_batch_sizes": {"T4": 8, "V100": 25}}
            ),
            scaling_config=ScalingConfig(num_workers=2, label_selector=label_selectors({"T4": 1, "V100": 1})),
        )
    nowhere = make(scaling_config=ScalingConfig(num_workers=2, label_selector={"ray.io/accelerator-type": "A100"}))
    with pytest.raises(ConfigError, match=r"accelerator-type=A100.*after waiting 1 s.*accelerator-type=T4.*=V100"):
        nowhere.fit()
    crowded = make(scaling_config=ScalingConfig(num_workers=2, label_selector={"ray.io/accelerator-type": "T4"}))
    with pytest.raises(ConfigError, match=r"no node meets 1 x \[ray.io/accelerator-type=T4\] with 1 CPU"):
        crowded.fit()
    assert not (tmp_path / "run").exists(), "nothing was started, so nothing is stored"
    assert_nothing_left()


def test_ctrl_c_ends_the_run_and_leaves_nothing(cluster: LocalCluster, tmp_path: Path) -> None:
    script = Path(__file__).with_name("ctrl_c_script.py")
    process = subprocess.Popen(
        [sys.executable, str(script), cluster.address, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(script.parent)},
    )
    try:
        wait_for(lambda: process.poll() is not None or first_steps_seen(), 90, "the first steps")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "fit returned" not in output, output
    assert "rank=0, world_size=2" in output, "Ray's own lines are printed"
    assert not re.search(r"warn|error|fail|traceback", output, re.IGNORECASE), output
    assert journal_of(tmp_path / "run" / "rex_ray" / "journal").events[-1] == RunEnded(reason="interrupted"), output
    assert_nothing_left()
