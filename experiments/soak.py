"""Half an hour of live training with a failure a minute: ``python -m experiments.soak --minutes 30 --json FILE``.

On an emulated cluster of a T4 and a V100 (real Ray, real workers), workers slow down at random, and every minute one
thing is killed, in turn by the seed: a worker, the control actor, the telemetry queue. Replicas are compared by hash
every 20 steps. The run must end with every row seen once an epoch, flat memory, a bounded journal and nothing left
behind; the command ends with exit code 1 where a law does not hold.

- ``slope_KIND_mib_per_hour``: of the resident memory of the largest process of a kind, after the first quarter.
- ``growth_KIND_mib``: its median in the last quarter less that in the second.
- ``journal_bytes_per_step``: in the second half.
- ``recovery_s``: median time that training stood still after a worker was killed; other faults never stop it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig

from experiments import _harness
from experiments._harness import Findings, Settings
from experiments._leftovers import wait_for_no_leftovers
from experiments._recovery_loop import logged_steps
from experiments._soak_loop import BATCH, NUM_ROWS, soak_loop
from experiments._soak_summary import (
    Sample,
    Soaked,
    faults_in_turn,
    growth_mib,
    journal_bytes_per_step,
    kinds_of,
    laws,
    slope_mib_per_hour,
)
from rex_ray import RexConfig, RexTrainer
from rex_ray.control.events import GroupStarted, IncidentReported, WorkerLost
from rex_ray.control.reading import read_journal
from rex_ray.hosting.journal_files import read_files
from rex_ray.train.local_cluster import local_cluster
from workloads.arguments import Parser, number

__all__ = ["main", "soak"]

DEVICES = {"T4": 1, "V100": 1}
_FAULT_EVERY_S = 60.0
_SAMPLE_EVERY_S = 2.0
_STEPS_BETWEEN = 20
_LIMIT_S = 600.0
_LEFT_LIMIT_S = 30.0
_PROCESSES = {
    "ray::RayTrainWorker": "worker",
    "ray::TrainController": "train controller",
    "ray::ControlActor": "control actor",
    "ray::_QueueActor": "queue",
}


def main(argv: Sequence[str]) -> None:
    """Parse the command line, soak, and end with exit code 1 where a law does not hold."""
    parser = Parser(add_help=False)
    parser.add_argument(
        "--minutes", type=number(above=0.0), default=None, metavar="M", help="how long to train (30; 2 with --quick)"
    )
    asked, rest = _harness.parsed_apart(parser, argv)
    broken: list[str] = []

    def measure(settings: Settings) -> Findings:
        """Train for long under a failure a minute, and see that nothing is lost, grows or stays behind."""
        minutes = asked.minutes or (2.0 if settings.quick else 30.0)
        findings = soak(minutes, settings.seed)
        broken.extend(str(row["law"]) for row in findings.tables["laws"] if not row["holds"])
        return findings

    _harness.main("soak", measure, rest, apart=[parser])
    if broken:
        print("broken:", "; ".join(broken), file=sys.stderr)
        sys.exit(1)


def soak(minutes: float, seed: int) -> Findings:
    """Train for so many minutes on a cluster of its own, with a failure a minute."""
    with contextlib.ExitStack() as stack:
        # Workers import the loop.
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        stack.enter_context(_environment("PYTHONPATH", path))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rex_ray-soak-")))
        cluster = stack.enter_context(local_cluster(DEVICES))
        # A call to Ray that comes too late would find another cluster of this machine otherwise.
        stack.enter_context(_environment("RAY_ADDRESS", cluster.address))
        run = stack.enter_context(contextlib.closing(_Run(folder, cluster.label_selectors, seed)))
        faults, recoveries_s = run.under_fire(60.0 * minutes)
        metrics = run.finish()
        soaked = run.soaked(metrics, faults, wait_for_no_leftovers(_LEFT_LIMIT_S))
        return _findings(soaked, recoveries_s, minutes)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _findings(soaked: Soaked, recoveries_s: Sequence[float], minutes: float) -> Findings:
    samples, judged = soaked.samples, laws(soaked)
    figures = {
        "steps": float(samples[-1].num_steps),
        "epochs": float(soaked.epochs),
        "faults": float(len(soaked.faults)),
        "restarts": float(soaked.num_restarts),
        "lost_rows": max(soaked.epochs - soaked.fewest, 0.0),
        "doubled_rows": max(soaked.most - soaked.epochs, 0.0),
        "replica_differences": float(soaked.replica_differences),
        "left_behind": float(len(soaked.left)),
        "journal_bytes_per_step": journal_bytes_per_step(samples),
        "laws_broken": float(sum(not law.holds for law in judged)),
    }
    if recoveries_s:
        figures["recovery_s"] = float(np.median(recoveries_s))
    for kind in kinds_of(samples):
        name = kind.replace(" ", "_")
        figures[f"growth_{name}_mib"] = growth_mib(samples, kind)
        figures[f"slope_{name}_mib_per_hour"] = slope_mib_per_hour(samples, kind)
    return Findings(
        figures=figures,
        tables={"laws": [law.row() for law in judged]},
        settings={"minutes": minutes, "fault_every_s": _FAULT_EVERY_S, "workers": sum(DEVICES.values())},
    )


class _Run:
    """A run in a thread of its own, looked at and struck from this one."""

    def __init__(self, folder: Path, selectors: list[dict[str, str]], seed: int) -> None:
        self._folder = folder
        self._rng = np.random.default_rng([seed, 1])
        self._seed = seed
        self._samples: list[Sample] = []
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._trainer = RexTrainer(
            soak_loop,
            train_loop_config={"folder": str(folder), "seed": seed},
            rex_config=RexConfig(
                global_batch_size=BATCH,
                max_global_batch_size=BATCH,  # a row counts one only at this batch
                seed=seed,
                checkpoint_interval_s=5.0,
                replica_check_interval_steps=20,
            ),
            scaling_config=ScalingConfig(num_workers=len(selectors), label_selector=selectors),
            run_config=RunConfig(
                name="run", storage_path=str(folder / "storage"), failure_config=FailureConfig(max_failures=-1)
            ),
            dataset_size=NUM_ROWS,
        )
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._fit, name="fit", daemon=True)
        self._thread.start()

    def under_fire(self, seconds: float) -> tuple[list[str], list[float]]:
        """Let it train for so long with a fault a minute; return the faults, and the pauses after killed workers."""
        self._train_on(_STEPS_BETWEEN)
        self._began_s = time.monotonic()
        faults: list[str] = []
        recoveries_s: list[float] = []
        for fault in faults_in_turn(self._seed, int(seconds // _FAULT_EVERY_S)):
            self._look_until(self._began_s + _FAULT_EVERY_S * (len(faults) + 0.5))
            recovered_s = self._strike(fault)
            faults.append(fault)
            elapsed_s = time.monotonic() - self._began_s
            _say(f"{elapsed_s:.0f} s: killed the {fault}; {self._samples[-1].num_steps} steps so far")
            if fault == "worker":
                recoveries_s.append(recovered_s)
        self._look_until(self._began_s + seconds)
        return faults, recoveries_s

    def finish(self) -> dict[str, Any]:
        """Have it end at the end of an epoch; return its last metrics."""
        self.close()
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise TimeoutError(f"the run did not end within {_LIMIT_S:g} s")
        return dict(self._result.metrics or {})

    def close(self) -> None:
        """Have no run any more, within a limit: the cluster must not go before it does."""
        (self._folder / "stop").touch()
        self._thread.join(_LIMIT_S)

    def soaked(self, metrics: dict[str, Any], faults: Sequence[str], left: Sequence[str]) -> Soaked:
        """Return what is known of the run, now that it is over."""
        events = read_journal(read_files(self._trainer.journal_dir)).events
        said = [event.reason for event in events if isinstance(event, WorkerLost)]
        said += [event.message for event in events if isinstance(event, IncidentReported) and "replica" in event.kind]
        return Soaked(
            samples=self._samples,
            faults=faults,
            num_restarts=sum(isinstance(event, GroupStarted) for event in events) - 1,
            epochs=int(metrics["epochs"]),
            fewest=metrics["fewest"],
            most=metrics["most"],
            replica_differences=sum("replica" in text for text in said),
            left=left,
        )

    def _strike(self, fault: str) -> float:
        """Kill something; return for how long training stood still until a number of steps was trained again."""
        generation = logged_steps(self._folder)[-1].generation
        match fault:
            case "worker":
                workers = [pid for pid, kind, _ in _processes() if kind == "worker"]
                os.kill(int(self._rng.choice(workers)), signal.SIGKILL)
                return self._new_group(generation)
            case "control actor":
                ray.kill(_actor("rex_ray-control-"), no_restart=False)
            case _:
                ray.kill(_actor("rex_ray-queue-"), no_restart=False)
        self._train_on(_STEPS_BETWEEN)
        return 0.0

    def _new_group(self, old: str) -> float:
        """Wait for a group in the place of the old one; return the pause between the steps of both."""
        self._look_while(lambda: logged_steps(self._folder)[-1].generation == old, "a new worker group")
        steps = logged_steps(self._folder)
        first = next(k for k, step in enumerate(steps) if step.generation == steps[-1].generation)
        self._train_on(_STEPS_BETWEEN)
        return steps[first].at_s - steps[first - 1].at_s

    def _train_on(self, num_steps: int) -> None:
        seen = len(logged_steps(self._folder))
        self._look_while(lambda: len(logged_steps(self._folder)) < seen + num_steps, f"{num_steps} more steps")

    def _look_while(self, what: Any, name: str) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while what():
            if not self._thread.is_alive():
                raise RuntimeError(f"the run ended while {name} was waited for") from self._error
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name}: not within {_LIMIT_S:g} s")
            self._look()

    def _look_until(self, deadline: float) -> None:
        while time.monotonic() < deadline and self._thread.is_alive():
            self._look()

    def _look(self) -> None:
        rss_mib = {"driver": _rss_mib(os.getpid())}
        for _, kind, mib in _processes():
            rss_mib[kind] = max(rss_mib.get(kind, 0.0), mib)
        self._samples.append(
            Sample(
                at_s=time.monotonic() - self._began_s,
                rss_mib=rss_mib,
                num_steps=len(logged_steps(self._folder)),
                journal_bytes=sum(file.stat().st_size for file in self._trainer.journal_dir.glob("*")),
            )
        )
        time.sleep(_SAMPLE_EVERY_S)

    def _fit(self) -> None:
        try:
            self._result = self._trainer.fit()
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._error = error


def _say(text: str) -> None:
    """Half an hour is long to wait for the first word."""
    print(text, file=sys.stderr, flush=True)


def _processes() -> list[tuple[int, str, float]]:
    """Return pid, kind and resident MiB of the run's processes on this cluster; others may share the machine."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid=,rss=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 3) for line in table.splitlines()]
    raylets = {row[0] for row in rows if len(row) == 4 and os.environ["RAY_TMPDIR"] in row[3]}
    found = []
    for pid, parent, rss_kib, args in (row for row in rows if len(row) == 4):
        kind = next((kind for name, kind in _PROCESSES.items() if args.startswith(name)), None)
        if parent in raylets and kind is not None:
            found.append((int(pid), kind, int(rss_kib) / 1024))
    return found


def _rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _actor(prefix: str) -> Any:
    named = ray.util.list_named_actors(all_namespaces=True)
    return ray.get_actor(**next(actor for actor in named if actor["name"].startswith(prefix)))


if __name__ == "__main__":
    main(sys.argv[1:])
