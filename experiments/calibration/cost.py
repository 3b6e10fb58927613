"""What the controller itself costs, whole: CPU time per worker and step, and memory over a long run.

The full ``rex`` policy is shown steps of a cluster on which nothing happens (two kinds of device, noise that remembers,
a noise scale at the present batch, gradient norms at every fourth step): the cost that every run pays all the time. CPU
time is counted, not wall time, so that a busy neighbour does not change the figure; making the steps is not counted.
Twice: the controller alone, and with what stands around it in a live run (records of single ranks assembled, the
journal encoded).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.signal import lfilter

from experiments._harness import bootstrap_median
from experiments.calibration._bounds import Budget, Result
from rex_ray.control.commands import ApplyAllocation, Command, StartSearch
from rex_ray.control.controller import Controller
from rex_ray.control.events import Event, GroupStarted, SearchFailed, Ticked
from rex_ray.control.journalled import JournalledController
from rex_ray.control.vocabulary import CODEC
from rex_ray.core.observations import StepObserved
from rex_ray.core.types import Allocation, FloatArray, Problem, StepFlag, StepRecord, WorkerSpec, read_only
from rex_ray.policies.registry import make_policy

__all__ = ["GOAL_US", "Feed", "measure"]

RHO, SD = 0.6, 0.04
"""Noise of own times on a shared cluster, see ``scenario.noise``."""

GOAL_US = {4: 25.0, 64: 10.0, 1024: 10.0}
"""Most CPU time per worker and step in microseconds, by number of workers."""

_BLOCK_STEPS = 96
"""Steps over which cost is averaged: the longest distance of two reviews of a split, whose cost each block bears."""

_ROWS_PER_WORKER = 64
_NORMS_EVERY = 4
_LAG_STEPS, _WARM_UP_STEPS, _TICK_S = 10, 3, 1.0
_CHUNK = 256
_PAGE_BYTES = 4096

# Own time of the two kinds: seconds per step and per row. Their shape is of no interest here, only that they differ.
_KINDS = {"T4": (0.010, 0.0020), "V100": (0.014, 0.0008)}


@dataclass(slots=True)
class Feed:
    """A cluster on which nothing happens, as the controller sees it; it runs what the controller publishes.

    Args:
        num_workers: size of the group, half of each kind.
        seed: of the noise.
    """

    num_workers: int
    seed: int
    step: int = field(default=0, init=False)
    now_s: float = field(default=0.0, init=False)
    allocation: Allocation = field(init=False)
    _pending: tuple[int, Allocation] | None = field(default=None, init=False)
    _settled_from: int = field(default=_WARM_UP_STEPS, init=False)
    _answers: list[Event] = field(default_factory=list, init=False)
    _ticked_s: float = field(default=0.0, init=False)
    _rng: np.random.Generator = field(init=False)
    _noise: FloatArray = field(init=False)
    _own: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng((self.seed, self.num_workers))
        self._own = np.array([_KINDS[device] for device in self.devices])
        self._noise = np.zeros((1, self.num_workers))

    @property
    def devices(self) -> tuple[str, ...]:
        """Kind of device per rank."""
        kinds = tuple(_KINDS)
        return tuple(kinds[rank % len(kinds)] for rank in range(self.num_workers))

    def started(self) -> GroupStarted:
        """The event that begins the group."""
        rows = _ROWS_PER_WORKER * self.num_workers
        workers = tuple(
            WorkerSpec(rank=rank, device=device, max_local_batch_size=8 * _ROWS_PER_WORKER)
            for rank, device in enumerate(self.devices)
        )
        problem = Problem(
            workers=workers, global_batch_size=rows, max_global_batch_size=8 * rows, dataset_size=1000 * rows
        )
        return GroupStarted(generation="g", problem=problem)

    def obey(self, commands: Sequence[Command]) -> None:
        """Take up an allocation some steps later, as a group does; there is no search helper."""
        for command in commands:
            if isinstance(command, ApplyAllocation):
                if self.step == 0:
                    self.allocation = command.allocation
                else:
                    self._pending = (self.step + _LAG_STEPS, command.allocation)
            elif isinstance(command, StartSearch):
                self._answers.append(SearchFailed(search_id=command.search_id, reason="there is no search helper"))

    def next_step(self) -> StepObserved:
        """Run one step."""
        if self._pending is not None and self.step >= self._pending[0]:
            self.allocation, self._pending = self._pending[1], None
            self._settled_from = self.step + 1
        if self.step % _CHUNK == 0:
            self._noise = self._more_noise()
        rows = read_only(list(self.allocation.local_batch_sizes), np.int64)
        own_s = (self._own[:, 0] + self._own[:, 1] * rows) * (1 + SD * self._noise[1 + self.step % _CHUNK])
        own_us = np.rint(own_s * 1e6).astype(np.int64)
        step_us = np.full_like(own_us, own_us.max())
        observed = StepObserved(
            generation="g",
            epoch=self.step // 1000,
            step=self.step,
            allocation_version=self.allocation.version,
            num_rows=rows,
            data_us=read_only(own_us // 10, np.int64),
            compute_us=read_only(own_us - own_us // 10, np.int64),
            sync_us=read_only(step_us - own_us, np.int64),
            step_us=read_only(step_us, np.int64),
            flags=StepFlag.WARM_UP if self.step < self._settled_from else StepFlag.NONE,
            loss=1.0,
        )
        if self.step % _NORMS_EVERY == 0:
            observed = self._with_norms(observed)
        self.step += 1
        self.now_s += float(step_us[0]) * 1e-6
        return observed

    def other_events(self) -> list[Event]:
        """What else is due after a step: a tick a second, answers to searches."""
        due, self._answers = self._answers, []
        if self.now_s - self._ticked_s >= _TICK_S:
            self._ticked_s = self.now_s
            due.append(Ticked(now_us=round(self.now_s * 1e6)))
        return due

    def _more_noise(self) -> FloatArray:
        """Return the next rows of the autoregression; row 0 is the last one before them."""
        innovations = np.sqrt(1 - RHO**2) * self._rng.standard_normal((_CHUNK, self.num_workers))
        following, _ = lfilter([1.0], [1.0, -RHO], innovations, axis=0, zi=RHO * self._noise[-1:])
        noise: FloatArray = np.maximum(np.concatenate([self._noise[-1:], following]), -3.0)
        return noise

    def _with_norms(self, step: StepObserved) -> StepObserved:
        """Norms at a noise scale of one global batch: growth looks at every block, and finds no reason to act."""
        rows = step.num_rows
        total = float(rows.sum())
        chi = self._rng.chisquare(10, size=self.num_workers) / 10
        return replace(
            step,
            weighted_sq_norm=read_only(total * chi + rows, np.float64),
            num_groups=read_only(np.ones_like(rows), np.int64),
            global_sq_norm=1.0 + float(chi.mean()),
        )


def records_of(step: StepObserved) -> list[StepRecord]:
    """Return what each rank would have sent of a step."""
    norms = step.weighted_sq_norm
    return [
        StepRecord(
            generation=step.generation,
            epoch=step.epoch,
            rank=rank,
            step=step.step,
            allocation_version=step.allocation_version,
            num_rows=int(step.num_rows[rank]),
            data_s=step.data_us[rank] * 1e-6,
            compute_s=step.compute_us[rank] * 1e-6,
            sync_s=step.sync_us[rank] * 1e-6,
            step_s=step.step_us[rank] * 1e-6,
            weighted_sq_norm=None if norms is None else float(norms[rank]),
            global_sq_norm=None if rank else step.global_sq_norm,
            loss=step.loss,
            flags=step.flags,
        )
        for rank in range(len(step.num_rows))
    ]


Sample = tuple[int, int, int]
"""Step, bytes of resident memory, bytes of the controller's whole memory as JSON."""


def drive(
    feed: Feed, controller: Controller, take: Callable[[StepObserved], Any], num_steps: int, sample_every: int = 0
) -> tuple[FloatArray, list[Sample]]:
    """Return the CPU seconds of every step and samples of memory.

    Args:
        feed: a fresh cluster.
        controller: looked at for the samples.
        take: prepares a step outside of the count and returns what the count runs: a call that gives commands.
        num_steps: steps to run.
        sample_every: steps between two samples; 0: none.
    """
    # Filled, not empty: pages that are touched one by one would pass for a leak.
    spent_s, samples = np.full(num_steps, np.nan), []
    for index in range(num_steps):
        handle, others = take(feed.next_step()), feed.other_events()
        began = time.process_time()
        commands = handle(others)
        spent_s[index] = time.process_time() - began
        feed.obey(commands)
        if sample_every and (index + 1) % sample_every == 0:
            samples.append((index + 1, resident_bytes(), state_bytes(controller)))
    return spent_s, samples


def bare(num_workers: int, seed: int) -> tuple[Feed, Controller, Callable[[StepObserved], Any]]:
    """A cluster and the controller alone, as ``drive`` takes them."""
    feed, controller = Feed(num_workers, seed), Controller(make_policy("rex"), seed=seed)
    feed.obey(controller.handle(feed.started()))

    def take(step: StepObserved) -> Callable[[Sequence[Event]], list[Command]]:
        def handle(others: Sequence[Event]) -> list[Command]:
            commands = list(controller.handle(step))
            for event in others:
                commands.extend(controller.handle(event))
            controller.take_notes()
            return commands

        return handle

    return feed, controller, take


def journalled(num_workers: int, seed: int) -> tuple[Feed, Controller, Callable[[StepObserved], Any]]:
    """A cluster and the controller with assembly and journal, whose chunks nobody writes."""
    feed = Feed(num_workers, seed)
    whole, _ = JournalledController.begin(policy="rex", seed=seed)
    feed.obey(whole.handle(feed.started()).commands)

    def take(step: StepObserved) -> Callable[[Sequence[Event]], list[Command]]:
        records = records_of(step)

        def handle(others: Sequence[Event]) -> list[Command]:
            commands = list(whole.add(records).commands)
            for event in others:
                commands.extend(whole.handle(event).commands)
            return commands

        return handle

    return feed, whole.controller, take


def state_bytes(controller: Controller) -> int:
    """Return the size of everything that the controller remembers, as JSON."""
    return len(json.dumps(CODEC.encode(controller.state)))


def resident_bytes() -> int:
    """Return the memory that this process holds, 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * _PAGE_BYTES if statm.exists() else 0


def measure(budget: Budget) -> Result:
    """Measure the controller's cost at 4, 64 and 1,024 workers, and its memory over a long run of 4."""
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    notes: list[str] = []
    for num_workers, num_steps, block in (
        (4, budget.scaled(200_000, 12_000), 5 * _BLOCK_STEPS),
        (64, budget.scaled(50 * _BLOCK_STEPS, 6 * _BLOCK_STEPS), _BLOCK_STEPS),
        (1024, budget.scaled(12 * _BLOCK_STEPS, 3 * _BLOCK_STEPS), _BLOCK_STEPS),
    ):
        for path, build, share in (("controller", bare, 1), ("with assembly and journal", journalled, 8)):
            exposure = max(num_steps // share, 3 * block)
            every = max(1, num_steps // 10) if build is bare else 0
            spent_s, samples = drive(*build(num_workers, budget.seed), exposure, every)
            row = _cost_row(spent_s, num_workers, block, path, budget)
            rows.append(row)
            memory.extend(
                {"num_workers": num_workers, "step": step, "resident_mb": resident / 1e6, "state_kb": state / 1e3}
                for step, resident, state in samples
            )
            key = "controller" if build is bare else "journalled"
            figures[f"{key}_us_per_worker_step_{num_workers}"] = row["us_per_worker_step"]
    for num_workers in GOAL_US:
        notes.append(_memory_note([row for row in memory if row["num_workers"] == num_workers]))
    return Result(figures=figures, tables={"controller": rows, "memory": memory}, notes=notes)


def _cost_row(spent_s: FloatArray, num_workers: int, block: int, path: str, budget: Budget) -> dict[str, Any]:
    """Condense steps to blocks: the first one, in which curves are unknown and code is cold, is left out."""
    num_blocks = len(spent_s) // block
    blocks = spent_s[: num_blocks * block].reshape(num_blocks, block)[1:].mean(axis=1) * 1e6 / num_workers
    median, low, high = bootstrap_median(blocks, seed=budget.seed, num_resamples=1000)
    return {
        "figure": f"controller_us_per_worker_step_{num_workers}" if path == "controller" else "",
        "path": path,
        "num_workers": num_workers,
        "us_per_worker_step": median,
        "low": low,
        "high": high,
        "p95_block": float(np.quantile(blocks, 0.95)),
        "goal": GOAL_US[num_workers] if path == "controller" else None,
        "slowest_step_ms": float(spent_s[block:].max()) * 1e3,
        "num_steps": len(spent_s),
        "block_steps": block,
        "rho": RHO,
        "sd": SD,
        "seed": budget.seed,
    }


def _memory_note(samples: Sequence[dict[str, Any]]) -> str:
    """Say in a sentence whether memory is flat: the last sample against the one after a fifth of the run."""
    early, last = samples[len(samples) // 5], samples[-1]
    return (
        f"memory at {last['num_workers']} workers from step {early['step']} to {last['step']}: resident "
        f"{last['resident_mb'] - early['resident_mb']:+.2f} MB of {last['resident_mb']:.0f}, remembered "
        f"{early['state_kb']:.1f} to {last['state_kb']:.1f} kB"
    )
