"""What size costs: ``python -m experiments.scale --json FILE [--page docs/results.md] [--quick]``.

Three questions about a simulated run, each for bsp (a fixed batch in equal shares) and rex (everything on):

- *Time per step* over 4 to 1,024 workers, half T4 half V100, ResNet-50 with 64 rows a worker to begin with, noise of
  dedicated machines, norms at every fourth step: the controller's part, which a live run pays as well, and the engine's
  part with noise and norms, which only a simulation does. CPU time, so that a busy neighbour changes it little.
- *Memory* of such a run without noise of which figures alone are kept: its peak, and what each further step adds.
- *A whole training*: ResNet-50 for 90 epochs of ImageNet's 1,281,167 rows on 8 T4 and 8 V100, rex from a reference
  batch of 256 rows (a decision may be made at every step), in wall-clock seconds. Goal: at most 60.

Seeds fix everything but the times.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from experiments._harness import Findings, Row, Settings
from experiments._page import main
from experiments.lab.cells import Cell
from experiments.lab.worlds import scenario_of
from rex_ray.control.commands import Command
from rex_ray.control.controller import Controller
from rex_ray.control.events import Event
from rex_ray.core.measuring import INTERVAL_STEPS
from rex_ray.policies.registry import make_policy
from rex_ray.scenario import load_learning
from rex_ray.sim import SimulatedRun, StepNorms, TraceLearner, simulate
from rex_ray.sim.gradients import NoisyGradients

WORKERS = (4, 8, 16, 64, 256, 1024)
POLICIES = ("bsp", "rex")
GOAL_S = 60.0

_FEW_WORKERS = (4, 64)

_ROWS_PER_WORKER = 64
_EPOCHS, _CLUSTER, _M0 = 90, "8xT4,8xV100", 256
_LEARNING = load_learning("resnet50")


class _TimedController(Controller):
    """The production controller, and the CPU time that it takes."""

    cpu_ns: int = 0

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Take an event as the controller does."""
        begun = time.process_time_ns()
        commands = super().handle(event)
        self.cpu_ns += time.process_time_ns() - begun
        return commands


@dataclass(slots=True)
class _Epochs:
    """Training for so many rows, wherever the target is."""

    inner: TraceLearner
    num_rows: int
    rows_done: int = field(default=0, init=False)

    @property
    def is_done(self) -> bool:
        """Whether all rows were used."""
        return self.rows_done >= self.num_rows

    def norms(self, step: int, num_rows: Sequence[int]) -> StepNorms | None:
        """Return the norms of a step."""
        return self.inner.norms(step, num_rows)

    def advance(self, num_rows: int, lr_factor: float) -> None:
        """Take a step."""
        self.rows_done += num_rows
        self.inner.advance(num_rows, lr_factor)


def measure(settings: Settings) -> Findings:
    """Measure what a step costs by number of workers, the memory of a run, and a whole training."""
    per_step = [
        _per_step(policy, workers, _num_steps(workers, settings.quick), settings.seed)
        for workers in WORKERS
        for policy in POLICIES
    ]
    memory = [
        _memory(policy, workers, 256, settings.seed)
        for workers in (_FEW_WORKERS if settings.quick else WORKERS)
        for policy in POLICIES
    ]
    num_epochs = 2 if settings.quick else _EPOCHS
    whole, figures = _whole_training(num_epochs, settings.seed)
    for row in per_step:
        name = f"{row['policy']}_{row['workers']}"
        figures[f"controller_us_{name}"] = float(row["controller_us"] or 0.0)
        figures[f"engine_us_{name}"] = float(row["engine_us"] or 0.0)
    for row in memory:
        name = f"{row['policy']}_{row['workers']}"
        figures[f"memory_peak_mib_{name}"] = float(row["peak_mib"] or 0.0)
        figures[f"memory_growth_bytes_per_step_{name}"] = float(row["growth_bytes_per_step"] or 0.0)
    return Findings(
        figures=figures,
        tables={"scale": per_step, "scale_memory": memory, "scale_training": [whole]},
        settings={
            "rows_per_worker": _ROWS_PER_WORKER,
            "norms_every": INTERVAL_STEPS,
            "imagenet16_epochs": num_epochs,
            "imagenet16_cluster": _CLUSTER,
            "imagenet16_reference_batch": _M0,
            "imagenet16_goal_s": GOAL_S,
        },
    )


def _num_steps(workers: int, quick: bool) -> int:
    """Enough steps for the reviews that come ever more rarely to have come at their last distance, 96 steps."""
    if quick:
        return 200 if workers <= 64 else 100
    return 4000 if workers <= 16 else 2000 if workers <= 64 else 800


def _cell(policy: str, workers: int, seed: int) -> Cell:
    return Cell(
        method=policy,
        workload="resnet50",
        cluster=f"{workers // 2}xT4,{workers // 2}xV100",
        # Noise that another policy's run has drawn already would come for nothing.
        seed=seed * len(POLICIES) + POLICIES.index(policy),
        global_batch_size=_ROWS_PER_WORKER * workers,
    )


def _play(cell: Cell, num_steps: int, num_rows: int | None = None) -> tuple[SimulatedRun, _TimedController]:
    scenario = scenario_of(cell, _LEARNING.dataset_size, num_steps)
    inner = TraceLearner(
        learning=_LEARNING,
        reference_batch_size=cell.global_batch_size,
        gradients=NoisyGradients(seed=cell.seed),
    )
    learner = _Epochs(inner, num_rows or num_steps * 8 * cell.global_batch_size)
    controller = _TimedController(make_policy(cell.method), seed=cell.seed)
    run = simulate(controller, scenario, num_steps=num_steps, learner=learner, keep="figures")
    return run, controller


def _per_step(policy: str, workers: int, num_steps: int, seed: int) -> Row:
    begun = time.process_time_ns()
    run, controller = _play(_cell(policy, workers, seed), num_steps)
    whole_us = (time.process_time_ns() - begun) / 1e3
    controller_us = controller.cpu_ns / 1e3
    return {
        "policy": policy,
        "workers": workers,
        "steps": len(run.step_s),
        "controller_us": round(controller_us / len(run.step_s), 1),
        "engine_us": round((whole_us - controller_us) / len(run.step_s), 1),
        "controller_us_per_worker": round(controller_us / len(run.step_s) / workers, 2),
        "allocations": len(run.allocations),
    }


def _memory(policy: str, workers: int, num_steps: int, seed: int) -> Row:
    """Trace a run, and one of twice its length: what the longer one has more at its peak has been kept.

    Without noise, of which the library keeps the newest thousand blocks whatever runs, some 6 MiB.
    """
    cell = replace(_cell(policy, workers, seed), noise="quiet")
    peaks = []
    for length in (num_steps, 2 * num_steps):
        with _traced() as traced:
            _play(cell, length)
        peaks.append(traced.peak_bytes)
    return {
        "policy": policy,
        "workers": workers,
        "steps": 2 * num_steps,
        "peak_mib": round(peaks[1] / 2**20, 2),
        "growth_bytes_per_step": round((peaks[1] - peaks[0]) / num_steps),
    }


@dataclass(slots=True)
class _Traced:
    peak_bytes: int = 0


@contextmanager
def _traced() -> Iterator[_Traced]:
    traced = _Traced()
    tracemalloc.start()
    try:
        yield traced
        traced.peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _whole_training(num_epochs: int, seed: int) -> tuple[Row, dict[str, float]]:
    cell = Cell(method="rex", workload="resnet50", cluster=_CLUSTER, seed=seed, global_batch_size=_M0)
    num_rows = num_epochs * _LEARNING.dataset_size
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    run, controller = _play(cell, num_rows // _M0 + num_epochs, num_rows)
    wall_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    figures = {
        "imagenet16_wall_s": wall_s,
        "imagenet16_cpu_s": cpu_s,
        "imagenet16_num_steps": float(len(run.step_s)),
        "imagenet16_largest_batch": float(run.num_rows.max()),
        "imagenet16_mean_batch": float(run.num_rows.mean()),
    }
    row: Row = {
        "epochs": num_epochs,
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "controller_cpu_s": round(controller.cpu_ns / 1e9, 1),
        "steps": len(run.step_s),
        "largest_batch": int(run.num_rows.max()),
        "virtual_hours": round(run.total_s / 3600, 2),
    }
    return row, figures


if __name__ == "__main__":
    main("scale", measure, sys.argv[1:])
