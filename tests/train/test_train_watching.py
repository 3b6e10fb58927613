"""A run is watched from the driver: one tracker run for all ranks, nothing twice past a restart, metrics by run."""

from __future__ import annotations

import importlib.util
import re
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from ray.train import RunConfig, ScalingConfig
from row_counter import BATCH
from train_harness import assert_nothing_left, control_actor, counting_loop, journal_of, wait_for

from rex_ray import ConfigError, RexConfig, RexTrainer
from rex_ray.control.events import MetricReported, ScheduleReported
from rex_ray.loggers import DecisionLog, ProgressLine, TensorBoardLogger, WandbLogger
from rex_ray.train.local_cluster import LocalCluster
from rex_ray.train.prometheus import METRICS, Exporter
from rex_ray.train.watching import chosen_watchers
from rex_ray.watch.seams import Ended, Happened, Progress, Reported, RunInfo, Sight, WorkerView

EPOCHS = 16


class Recorder:
    """Remembers what it was shown; does something at the first step that it sees."""

    def __init__(self, at_first_step: Callable[[], None]) -> None:
        self.begun: list[RunInfo] = []
        self.seen: list[Sight] = []
        self.num_closed = 0
        self._at_first_step: Callable[[], None] | None = at_first_step

    def begin(self, run: RunInfo) -> None:
        self.begun.append(run)

    def see(self, sight: Sight) -> None:
        self.seen.append(sight)
        if isinstance(sight, Progress) and sight.step >= 2 and self._at_first_step is not None:
            todo, self._at_first_step = self._at_first_step, None
            todo()

    def close(self) -> None:
        self.num_closed += 1


class Broken(Recorder):
    def see(self, sight: Sight) -> None:
        raise ArithmeticError("a watcher's own fault")


def scraped() -> dict[str, list[dict[str, str]]]:
    """Return the tags of every metric of ours that this machine's Ray nodes export, by name."""
    found: dict[str, list[dict[str, str]]] = {}
    for port in {node["MetricsExportPort"] for node in ray.nodes() if node["Alive"]}:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if (match := re.match(r"ray_(rexray_\w+)\{(.*)\}", line)) is not None:
                    found.setdefault(match[1], []).append(dict(re.findall(r'(\w+)="([^"]*)"', match[2])))
    return found


def kill_control_actor() -> None:
    ray.kill(control_actor(), no_restart=False)


@pytest.fixture(scope="module")
def watched_run(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[RexTrainer, Recorder, Path]:
    """A run whose control actor dies once, with a watcher that is broken and one that remembers."""
    storage = tmp_path_factory.mktemp("watched")
    threads = set(threading.enumerate())
    recorder = Recorder(kill_control_actor)
    loggers = [recorder, Broken(kill_control_actor), TensorBoardLogger(interval_s=1.0)]
    if importlib.util.find_spec("wandb"):
        loggers.append(WandbLogger(init={"mode": "offline"}, interval_s=1.0))
    trainer = RexTrainer(
        counting_loop,
        train_loop_config={"num_epochs": EPOCHS},
        rex_config=RexConfig(policy="rex", policy_options={"growth": "off"}, global_batch_size=BATCH),
        scaling_config=ScalingConfig(num_workers=2, label_selector=cluster.label_selectors),
        run_config=RunConfig(name="watched", storage_path=str(storage)),
        loggers=loggers,
    )
    trainer.fit()
    assert not [t for t in threading.enumerate() if t not in threads and t.name.startswith("rex_ray")]
    return trainer, recorder, storage / "watched"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_watcher_sees_every_report_once_past_the_actors_death_and_the_end_last(watched_run) -> None:
    trainer, recorder, _ = watched_run
    assert trainer.control_status is not None
    assert trainer.control_status.num_restarts == 1
    assert [(run.name, run.policy) for run in recorder.begun] == [("watched", "rex")]
    assert recorder.begun[0].settings["global_batch_size"] == BATCH
    assert recorder.num_closed == 1
    journalled = [event for event in journal_of(trainer.journal_dir).events if isinstance(event, MetricReported)]
    reports = [sight for sight in recorder.seen if isinstance(sight, Reported)]
    assert [(r.epoch, r.step, r.metrics) for r in reports] == [(m.epoch, m.step, m.metrics) for m in journalled]
    # The journal lacks at most what the dead actor had in its hands.
    assert [report.epoch for report in reports] == sorted({report.epoch for report in reports})
    assert {report.epoch for report in reports} >= set(range(EPOCHS // 2, EPOCHS))
    assert recorder.seen[-1] == Ended(elapsed_s=recorder.seen[-1].elapsed_s, reason="finished")
    kinds = [sight.kind for sight in recorder.seen if isinstance(sight, Happened)]
    assert kinds.count("group") == 1
    assert {"decided", "applied"} <= set(kinds)
    assert_nothing_left()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(480)
def test_rank_0_says_how_far_it_is_to_go_and_at_what_rate_and_seldom(watched_run) -> None:
    trainer, recorder, _ = watched_run
    told = [event for event in journal_of(trainer.journal_dir).events if isinstance(event, ScheduleReported)]
    assert {(event.num_epochs, event.learning_rate) for event in told} == {(EPOCHS, float(BATCH))}
    assert len(told) == 1  # neither changed
    last = [sight for sight in recorder.seen if isinstance(sight, Progress)][-1]
    assert (last.epoch, last.num_epochs, last.learning_rate) == (EPOCHS - 1, EPOCHS, float(BATCH))
    assert {worker.device for worker in last.workers} == {"T4", "V100"}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_job_has_one_tracker_run_however_many_ranks_train(watched_run) -> None:
    _, recorder, folder = watched_run
    assert len(list(folder.rglob("events.out.tfevents.*"))) == 1
    if importlib.util.find_spec("wandb"):
        (run,) = folder.rglob("offline-run-*")
        assert run.name.endswith(recorder.begun[0].run_id)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(480)
def test_metrics_bear_run_rank_and_device_and_two_runs_do_not_mix(cluster: LocalCluster) -> None:
    actors = {run: ray.remote(num_cpus=0)(_Exports).remote(run) for run in ("one", "two")}
    try:
        ray.get(
            [
                actors["one"].export.remote(progress_of(("T4", "V100"))),
                actors["two"].export.remote(progress_of(("A100",))),
            ]
        )
        known = set(METRICS) - {"rexray_noise_scale"}  # not known, and so not exported

        def both_are_there() -> bool:
            both = {name for name, tags in scraped().items() if {"one", "two"} <= {t["run"] for t in tags}}
            return both >= known

        wait_for(both_are_there, 60.0, "the export of both runs' metrics")
        found = scraped()
        for name, (_, tags) in METRICS.items():
            for series in found.get(name, []):
                assert set(tags) <= set(series)
        by_run = {(t["run"], t["rank"], t["device"]) for t in found["rexray_own_seconds"] if t["run"] in actors}
        assert by_run == {("one", "0", "T4"), ("one", "1", "V100"), ("two", "0", "A100")}
        # After a resize the rank that is gone does not linger.
        ray.get(actors["one"].export.remote(progress_of(("V100",))))

        def is_gone() -> bool:
            left = {(t["rank"], t["device"]) for t in scraped()["rexray_share"] if t["run"] == "one"}
            return left == {("0", "V100")}

        wait_for(is_gone, 60.0, "the end of what the lost ranks exported")
    finally:
        for actor in actors.values():
            ray.kill(actor)


class _Exports:
    def __init__(self, run: str) -> None:
        self._exporter = Exporter(run)

    def export(self, progress: Progress) -> None:
        self._exporter.export(progress)


def progress_of(devices: tuple[str, ...]) -> Progress:
    workers = tuple(
        WorkerView(rank=rank, device=device, node="n", local_batch_size=64, own_s=0.1)
        for rank, device in enumerate(devices)
    )
    return Progress(
        elapsed_s=1.0,
        epoch=0,
        step=7,
        rows_per_s=1000.0,
        step_s=0.1,
        global_batch_size=64 * len(devices),
        lr_factor=1.0,
        workers=workers,
        slowest_rank=0,
        slowest_why="",
        imbalance=0.0,
        learning_rate=0.1,
        left_s=60.0,
    )


def test_a_loggers_own_terminal_lines_take_the_place_of_the_usual_ones() -> None:
    usual = chosen_watchers((), verbose=True)
    assert [type(watcher) for watcher in usual] == [ProgressLine, DecisionLog]
    own = ProgressLine(interval_s=600.0)
    assert [type(watcher) for watcher in chosen_watchers((own,), verbose=True)] == [DecisionLog, ProgressLine]
    assert chosen_watchers((own,), verbose=False) == (own,)


@pytest.mark.parametrize("given", ["tensorboard", TensorBoardLogger, object()])
def test_what_is_no_logger_is_refused_before_anything_starts(given: object) -> None:
    with pytest.raises(ConfigError, match=r"loggers=\[\.\.\.\] takes objects with begin, see and close"):
        chosen_watchers((given,), verbose=True)  # type: ignore[arg-type]
