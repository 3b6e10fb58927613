"""The second driver of the controller: the same object as in a live run, in virtual time. It replaces two arrows.

Where a live run has workers, a queue and a broadcast, this has timelines and a lag in steps; records, assembler,
events and commands are the production code's. Training itself is not simulated: a step is its times.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rex_ray.control.assembly import StepAssembler
from rex_ray.control.commands import ApplyAllocation, CancelSearch, Command, StartSearch, TellTrial
from rex_ray.control.controller import Controller
from rex_ray.control.events import Event, GroupStarted, RunEnded, SearchFailed, Ticked
from rex_ray.control.notes import Note
from rex_ray.core.apportion import rows_per_rank
from rex_ray.core.observations import StepObserved
from rex_ray.core.types import Allocation, FloatArray, StepFlag, StepRecord
from rex_ray.sim.seams import Learner, Searcher
from rex_ray.sim.world import Scenario

__all__ = ["SimulatedRun", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedRun:
    """What happened.

    Attributes:
        steps: every step, in order.
        own_s: own time per step and rank in seconds, shape ``[steps, n]``.
        step_s: duration per step in seconds, shape ``[steps]``.
        allocations: ``(first step, allocation)`` for each that ran.
        events: every event that the controller was given, in order: what a journal would hold.
        notes: what the controller said.
        total_s: virtual duration of the run.
    """

    steps: tuple[StepObserved, ...]
    own_s: FloatArray
    step_s: FloatArray
    allocations: tuple[tuple[int, Allocation], ...]
    events: tuple[Event, ...]
    notes: tuple[Note, ...]
    total_s: float


def simulate(
    controller: Controller,
    scenario: Scenario,
    *,
    num_steps: int,
    learner: Learner | None = None,
    searcher: Searcher | None = None,
) -> SimulatedRun:
    """Drive ``controller`` through ``num_steps`` optimizer steps of ``scenario``, from a fresh group to the end.

    Args:
        controller: a fresh one.
        scenario: cluster and problem.
        num_steps: most steps to run; epochs follow from the data set's size.
        learner: what training makes of the steps; None: no norms are seen, and nothing ends early.
        searcher: who runs searches; None: every search fails at once, as it does without a helper.

    Raises:
        IllegalEventError: the controller is not fresh.
    """
    group = _Group(controller, scenario, learner, searcher)
    for step in range(num_steps):
        if learner is not None and learner.is_done:
            break
        group.run_step(step)
    group.tell(RunEnded(reason="finished"))
    return SimulatedRun(
        steps=tuple(group.steps),
        own_s=np.array(group.own_s),
        step_s=np.array(group.step_s),
        allocations=tuple(group.allocations),
        events=tuple(group.events),
        notes=controller.take_notes(),
        total_s=group.now_s,
    )


@dataclass(slots=True)
class _Group:
    """The workers, as far as a controller can tell."""

    controller: Controller
    scenario: Scenario
    learner: Learner | None = None
    searcher: Searcher | None = None
    answers: list[tuple[int, Event]] = field(default_factory=list)
    now_s: float = 0.0
    ticked_s: float = 0.0
    cursor: int = 0
    epoch: int = 0
    settled_from: int = 0
    mailbox: tuple[int, Allocation] | None = None
    steps: list[StepObserved] = field(default_factory=list)
    own_s: list[FloatArray] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    allocations: list[tuple[int, Allocation]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    assembler: StepAssembler = field(init=False)

    def __post_init__(self) -> None:
        problem = self.scenario.problem
        self.assembler = StepAssembler(self.scenario.generation, problem.num_workers)
        commands = self.tell(GroupStarted(generation=self.scenario.generation, problem=problem))
        first = next(command for command in commands if isinstance(command, ApplyAllocation))
        self.allocations.append((0, first.allocation))
        self.mailbox = None
        self.settled_from = self.scenario.warm_up_steps

    def tell(self, event: Event, step: int = -1) -> tuple[Command, ...]:
        """Give the controller an event; what it publishes is due ``switch_lag_steps`` after ``step``."""
        self.events.append(event)
        commands = self.controller.handle(event)
        for command in commands:
            if isinstance(command, ApplyAllocation):
                self.assembler.publish(command.allocation.version)
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
        while due := [answer for answer in self.answers if answer[0] <= step]:
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
        left = scenario.problem.dataset_size - self.cursor
        num_rows = min(allocation.global_batch_size, left)
        rows = rows_per_rank(num_rows, allocation.local_batch_sizes)
        norms = None if self.learner is None else self.learner.norms(step, rows)
        flags = StepFlag.WARM_UP if step < self.settled_from else StepFlag.NONE
        if num_rows < allocation.global_batch_size:
            flags |= StepFlag.PARTIAL
        own = [line.own_time(step, rows[rank], rows) for rank, line in enumerate(scenario.timelines)]
        own_s = np.array([time.total_s for time in own])
        step_s = float(own_s.max()) + scenario.network.all_reduce_s(len(rows))
        records = [
            StepRecord(
                generation=scenario.generation,
                epoch=self.epoch,
                rank=rank,
                step=step,
                allocation_version=allocation.version,
                num_rows=rows[rank],
                data_s=own[rank].data_s,
                compute_s=own[rank].compute_s,
                sync_s=step_s - float(own_s[rank]),
                step_s=step_s,
                weighted_sq_norm=None if norms is None else float(norms.weighted_sq_norm[rank]),
                num_groups=int(rows[rank] > 0) if norms is None else int(norms.num_groups[rank]),
                global_sq_norm=None if norms is None or rank else norms.global_sq_norm,
                flags=flags,
            )
            for rank in range(len(rows))
        ]
        self.now_s += step_s
        self.own_s.append(own_s)
        self.step_s.append(step_s)
        if self.learner is not None:
            self.learner.advance(num_rows, allocation.lr_factor)
        self._move_on(num_rows)
        for observed in self.assembler.add(records):
            self.steps.append(observed)
            self.tell(observed, step)
        if self.now_s - self.ticked_s >= scenario.tick_interval_s:
            self.ticked_s = self.now_s
            self.tell(Ticked(now_us=round(self.now_s * 1e6)), step)
        self.hear_answers(step)

    def _move_on(self, num_rows: int) -> None:
        self.cursor += num_rows
        if self.cursor >= self.scenario.problem.dataset_size:
            self.cursor, self.epoch = 0, self.epoch + 1
