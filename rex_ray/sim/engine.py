"""The second driver of the controller: the same object as in a live run, in virtual time. It replaces two arrows.

Where a live run has workers, a queue and a broadcast, this has timelines and a lag in steps; the gate of the evidence,
events and commands are the production code's. Training itself is not simulated: a step is its times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from rex_ray.control.commands import ApplyAllocation, CancelSearch, Command, StartSearch, TellTrial
from rex_ray.control.controller import Controller
from rex_ray.control.events import Event, GroupStarted, RunEnded, SearchFailed, Ticked
from rex_ray.control.notes import Note
from rex_ray.core.apportion import rows_per_rank
from rex_ray.core.observations import StepObserved
from rex_ray.core.types import Allocation, FloatArray, IntArray, StepFlag
from rex_ray.sim.seams import Learner, Searcher
from rex_ray.sim.stretches import Stretch
from rex_ray.sim.world import Scenario

__all__ = ["Keep", "SimulatedRun", "simulate"]

Keep: TypeAlias = Literal["all", "figures"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedRun:
    """What happened.

    Attributes:
        step_s: duration per step in seconds, shape ``[steps]``.
        slowest_s: own time of the slowest rank per step in seconds, shape ``[steps]``.
        mean_own_s: own time per step in seconds, the mean over ranks, shape ``[steps]``.
        num_rows: rows per step, shape ``[steps]``.
        allocations: ``(first step, allocation)`` for each that ran.
        notes: what the controller said.
        total_s: virtual duration of the run: its steps and its charges.
        step_charges_s: what control cost beside each step in seconds, shape ``[steps]``.
        steps: every step, in order; empty unless all is kept.
        own_s: own time per step and rank in seconds, shape ``[steps, n]``; of no step unless all is kept.
        events: every event that the controller was given, in order: what a journal would hold; empty unless all is
            kept.
    """

    step_s: FloatArray
    slowest_s: FloatArray
    mean_own_s: FloatArray
    num_rows: IntArray
    allocations: tuple[tuple[int, Allocation], ...]
    notes: tuple[Note, ...]
    total_s: float
    step_charges_s: FloatArray
    steps: tuple[StepObserved, ...]
    own_s: FloatArray
    events: tuple[Event, ...]

    @property
    def charged_s(self) -> float:
        """Seconds that control cost beside the steps."""
        return float(self.step_charges_s.sum())


def simulate(
    controller: Controller,
    scenario: Scenario,
    *,
    num_steps: int,
    learner: Learner | None = None,
    searcher: Searcher | None = None,
    keep: Keep = "all",
) -> SimulatedRun:
    """Drive ``controller`` through ``num_steps`` optimizer steps of ``scenario``, from a fresh group to the end.

    Args:
        controller: a fresh one.
        scenario: cluster and problem.
        num_steps: most steps to run; epochs follow from the data set's size.
        learner: what training makes of the steps; None: no norms are seen, and nothing ends early.
        searcher: who runs searches; None: every search fails at once, as it does without a helper.
        keep: ``"all"``, or only ``"figures"``: a step of a thousand workers takes 40 KiB, its four figures 100 bytes.

    Raises:
        IllegalEventError: the controller is not fresh.
    """
    group = _Group(controller, scenario, learner, searcher, keep == "all")
    for step in range(num_steps):
        if learner is not None and learner.is_done:
            break
        group.run_step(step)
    group.tell(RunEnded(reason="finished"))
    return SimulatedRun(
        step_s=np.array(group.step_s),
        slowest_s=np.array(group.slowest_s),
        mean_own_s=np.array(group.mean_own_s),
        num_rows=np.array(group.num_rows, dtype=np.int64),
        allocations=tuple(group.allocations),
        notes=controller.take_notes(),
        total_s=group.now_s,
        step_charges_s=np.array(group.charges_s),
        steps=tuple(group.steps),
        own_s=np.array(group.own_s) if group.own_s else np.empty((0, len(scenario.timelines))),
        events=tuple(group.events),
    )


@dataclass(slots=True)
class _Group:
    """The workers, as far as a controller can tell."""

    controller: Controller
    scenario: Scenario
    learner: Learner | None = None
    searcher: Searcher | None = None
    keeps_all: bool = True
    answers: list[tuple[int, Event]] = field(default_factory=list)
    now_s: float = 0.0
    ticked_s: float = 0.0
    cursor: int = 0
    epoch: int = 0
    settled_from: int = 0
    measured_batch: int = 0
    measured_from: int = 0
    mailbox: tuple[int, Allocation] | None = None
    stretch: Stretch | None = None
    steps: list[StepObserved] = field(default_factory=list)
    own_s: list[FloatArray] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    slowest_s: list[float] = field(default_factory=list)
    mean_own_s: list[float] = field(default_factory=list)
    num_rows: list[int] = field(default_factory=list)
    charges_s: list[float] = field(default_factory=list)
    allocations: list[tuple[int, Allocation]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    rows_per_epoch: int = field(init=False)

    def __post_init__(self) -> None:
        problem = self.scenario.problem
        assert problem.dataset_size is not None, "a simulated data set has been counted"
        self.rows_per_epoch = problem.dataset_size
        commands = self.tell(GroupStarted(generation=self.scenario.generation, problem=problem))
        first = next(command for command in commands if isinstance(command, ApplyAllocation))
        self.allocations.append((0, first.allocation))
        self.mailbox = None
        self.settled_from = self.scenario.warm_up_steps

    def tell(self, event: Event, step: int = -1) -> tuple[Command, ...]:
        """Give the controller an event; what it publishes is due ``switch_lag_steps`` after ``step``."""
        if self.keeps_all:
            self.events.append(event)
        commands = self.controller.handle(event)
        for command in commands:
            if isinstance(command, ApplyAllocation):
                known = self.mailbox[1] if self.mailbox else self.allocations[-1][1] if self.allocations else None
                if known is None or command.allocation.version > known.version:
                    self.mailbox = (step + self.scenario.switch_lag_steps, command.allocation)
            elif isinstance(command, StartSearch | TellTrial | CancelSearch):
                self.answers.extend(self._searched(command, step))
        return commands

    def _searched(self, command: StartSearch | TellTrial | CancelSearch, step: int) -> list[tuple[int, Event]]:
        if self.searcher is not None:
            due = step + self.searcher.latency_steps
            return [(due, event) for event in self.searcher.carry_out(command)]
        if isinstance(command, StartSearch):
            return [(step, SearchFailed(search_id=command.search_id, reason="there is no search helper"))]
        return []

    def hear_answers(self, step: int) -> None:
        """Give the controller every answer of a search that is due; an answer may lead to further ones."""
        while self.answers and (due := [answer for answer in self.answers if answer[0] <= step]):
            self.answers.remove(due[0])
            self.tell(due[0][1], step)

    def run_step(self, step: int) -> None:
        """Run one optimizer step and tell the controller of it, and of the time that it took."""
        scenario = self.scenario
        if self.mailbox is not None and step >= self.mailbox[0]:
            self.allocations.append((step, self.mailbox[1]))
            self.mailbox = None
            self.settled_from = max(self.settled_from, step + scenario.settle_steps)
        allocation = self.allocations[-1][1]
        flags = StepFlag.WARM_UP if step < self.settled_from else StepFlag.NONE
        left = self.rows_per_epoch - self.cursor
        num_rows, rows = allocation.global_batch_size, allocation.local_batch_sizes
        if left < num_rows:
            num_rows, rows = left, rows_per_rank(left, rows)
            flags |= StepFlag.PARTIAL
        stretch = self._stretch(step, allocation, rows)
        if allocation.global_batch_size != self.measured_batch:
            self.measured_batch, self.measured_from = allocation.global_batch_size, step
        norms = None
        if self.learner is not None and scenario.norm_schedule.is_due(step, self.measured_from):
            norms = self.learner.norms(step, rows)
        observed = stretch.observed(step, epoch=self.epoch, flags=flags, norms=norms)
        self._count(stretch, step, num_rows)
        if self.learner is not None:
            self.learner.advance(num_rows, allocation.lr_factor)
        self._move_on(num_rows)
        if observed is not None:
            if self.keeps_all:
                self.steps.append(observed)
            self.tell(observed, step)
        if self.now_s - self.ticked_s >= scenario.tick_interval_s:
            self.ticked_s = self.now_s
            self.tell(Ticked(now_us=round(self.now_s * 1e6)), step)
        self.hear_answers(step)

    def _stretch(self, step: int, allocation: Allocation, rows: Sequence[int]) -> Stretch:
        """Return the stretch that the step is in; a partial step has its own and leaves the present one as it is."""
        version = allocation.version
        if rows is not allocation.local_batch_sizes:
            return Stretch.ahead(self.scenario, step, version, rows, is_single=True)
        if self.stretch is None or not self.stretch.has(step, version):
            self.stretch = Stretch.ahead(self.scenario, step, version, rows)
        return self.stretch

    def _count(self, stretch: Stretch, step: int, num_rows: int) -> None:
        at = step - stretch.first_step
        step_s = stretch.step_s[at]
        is_switch = step > 0 and step == self.allocations[-1][0] and self._has_other_shares()
        charge_s = self.scenario.charges.of_step(step_s, is_searching=bool(self.answers), is_switch=is_switch)
        self.now_s += step_s + charge_s
        self.charges_s.append(charge_s)
        self.step_s.append(step_s)
        self.slowest_s.append(stretch.slowest_s[at])
        self.mean_own_s.append(stretch.mean_own_s[at])
        self.num_rows.append(num_rows)
        if self.keeps_all:
            self.own_s.append(stretch.own_s[at])

    def _has_other_shares(self) -> bool:
        """Whether the newest allocation is more than another learning rate."""
        (_, before), (_, now) = self.allocations[-2:]
        return before.local_batch_sizes != now.local_batch_sizes

    def _move_on(self, num_rows: int) -> None:
        self.cursor += num_rows
        if self.cursor >= self.rows_per_epoch:
            self.cursor, self.epoch = 0, self.epoch + 1
