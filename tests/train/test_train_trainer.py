"""RexTrainer on a real Ray cluster: it trains, journals, survives what may die, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray.exceptions import GetTimeoutError
from ray.train import RunConfig, ScalingConfig, TrainingFailedError
from row_counter import BATCH, ROWS
from train_harness import (
    assert_nothing_left,
    control_actor,
    counting_loop,
    journal_of,
    queue_actor,
    steps_of,
    switches_of,
    wait_for,
)

from experiments._leftovers import search_helpers
from rex_ray import ConfigError, RexConfig, RexTrainer
from rex_ray.control.events import GroupStarted, MetricReported, RunEnded, SearchFailed, SearchFinished
from rex_ray.control.replay import replay
from rex_ray.train.local_cluster import LocalCluster
from rex_ray.train.placement import label_selectors

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]

EPOCHS = 24


def trainer_in(storage: Path, cluster: LocalCluster, num_epochs: int) -> RexTrainer:
    return RexTrainer(
        counting_loop,
        train_loop_config={"num_epochs": num_epochs},
        rex_config=RexConfig(
            policy="rex",
            policy_options={"growth": "off", "trigger": "off"},  # so that it comes to a search soon
            global_batch_size=BATCH,
            join_timeout_s=20.0,
        ),
        scaling_config=ScalingConfig(num_workers=2, label_selector=cluster.label_selectors),
        run_config=RunConfig(name="run", storage_path=str(storage)),
        dataset_size=ROWS,
    )


def first_steps_seen() -> bool:
    control = control_actor()
    with contextlib.suppress(GetTimeoutError):  # its process may be starting
        return control is not None and bool(ray.get(control.status.remote(), timeout=10).last_step >= 2)
    return False


@pytest.fixture(scope="module")
def finished(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[RexTrainer, Path]:
    """A run that ended well, searched meanwhile, and where it stored."""
    storage = tmp_path_factory.mktemp("finished")
    trainer = trainer_in(storage, cluster, num_epochs=EPOCHS)
    seen: list[str] = []
    threading.Thread(target=lambda: seen.extend(wait_for(search_helpers, 60, "a search")), daemon=True).start()
    assert trainer.fit().metrics == {"fewest": EPOCHS, "most": EPOCHS}
    assert seen, "there was a helper, which is gone"
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
    assert [step.step for step in steps_of(journal)] == list(range(EPOCHS * ROWS // BATCH))
    reported = [event for event in journal.events if isinstance(event, MetricReported)]
    assert [event.metrics["fewest"] for event in reported] == list(range(1, EPOCHS + 1))
    assert any(isinstance(event, SearchFinished | SearchFailed) for event in journal.events)
    assert journal.events[-1] == RunEnded(reason="finished")
    report = replay(journal)
    assert report.is_identical, report.differences


def test_the_slow_kind_of_device_is_read_off_its_node_and_gets_fewer_rows(finished: tuple[RexTrainer, Path]) -> None:
    journal = journal_of(finished[0].run_dir / "journal")
    (started,) = (event for event in journal.events if isinstance(event, GroupStarted))
    devices = [worker.device for worker in started.problem.workers]
    assert sorted(devices) == ["T4", "V100"]
    assert switches_of(journal)[0].local_batch_sizes[devices.index("T4")] < BATCH / 2


def test_the_same_name_goes_on_from_the_last_save_and_a_broken_queue_means_no_observations_and_no_more(
    finished: tuple[RexTrainer, Path], cluster: LocalCluster, tmp_path: Path
) -> None:
    shutil.copytree(finished[1], tmp_path, dirs_exist_ok=True)
    killed: list[bool] = []

    def kill() -> None:
        ray.kill(wait_for(queue_actor, 60, "the queue"), no_restart=True)
        killed.append(True)

    threading.Thread(target=kill, daemon=True).start()
    trainer = trainer_in(tmp_path, cluster, num_epochs=EPOCHS + 2)
    assert trainer.fit().metrics == {"fewest": EPOCHS + 2, "most": EPOCHS + 2}
    assert killed
    journal = journal_of(trainer.journal_dir)
    (started,) = (event for event in journal.events if isinstance(event, GroupStarted))
    assert started.step == EPOCHS * ROWS // BATCH
    assert steps_of(journal) == []
    assert switches_of(journal) == []
    assert steps_of(journal_of(trainer.run_dir / "journal-1"))[-1].step == EPOCHS * ROWS // BATCH - 1
    assert_nothing_left()


def test_two_runs_under_tune_do_not_meet_and_a_loop_that_fails_fails_its_own(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    def trial(config: dict[str, Any]) -> None:
        trainer = RexTrainer(
            counting_loop,
            train_loop_config={"num_epochs": 2, "raises": config["raises"]},
            rex_config=RexConfig(global_batch_size=BATCH),
            scaling_config=ScalingConfig(num_workers=1, label_selector={"ray.io/accelerator-type": "in(T4,V100)"}),
            run_config=RunConfig(name=f"raises-{config['raises']}", storage_path=str(tmp_path)),
        )
        if not config["raises"]:
            trainer.fit()
            return
        with pytest.raises(TrainingFailedError, match="the loop's own fault"):
            trainer.fit()

    tuner = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0, "node:__internal_head__": 0.001}),
        param_space={"raises": tune.grid_search([False, True])},
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    )
    assert tuner.fit().num_errors == 0
    journals = [journal_of(tmp_path / f"raises-{raises}" / "rex_ray" / "journal") for raises in (False, True)]
    assert steps_of(journals[0])[-1].step == 2 * ROWS // BATCH - 1
    ends = [journal.events[-1] for journal in journals]
    assert ends[0] == RunEnded(reason="finished")
    assert isinstance(ends[1], RunEnded)
    assert ends[1].reason.startswith("failed: ")
    assert_nothing_left()


def test_bad_input_is_refused_before_anything_starts(cluster: LocalCluster, tmp_path: Path) -> None:
    def make(**changes: Any) -> RexTrainer:
        given = {
            "rex_config": RexConfig(global_batch_size=BATCH, placement_timeout_s=0.3),
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
    with pytest.raises(ConfigError, match=r"accelerator-type=A100.*after waiting 0.3 s.*accelerator-type=T4.*=V100"):
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
