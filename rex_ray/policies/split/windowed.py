"""Shares that are corrected window by window from the times of the present ones alone: no curve is kept.

The window, what a correction is and what is remembered of the last ones are a rule's (``moving``, ``proportional``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from rex_ray.core.apportion import apportion
from rex_ray.core.changed import changed
from rex_ray.core.errors import ConfigError
from rex_ray.core.memory import MemoryBook
from rex_ray.core.observations import AllocationApplied, StepObserved
from rex_ray.core.types import Allocation, BoolArray, FloatArray, IntArray, Problem, StepFlag, read_only
from rex_ray.policies.base import Finding, Proposal, Reallocate
from rex_ray.policies.limits import equal_shares, known_bounds, resumed_shares
from rex_ray.policies.seams import Model, Shares
from rex_ray.policies.split.memory_model import MemoryModel

__all__ = ["Move", "Window", "WindowRule", "WindowedSplit", "WindowedState", "check_window"]

MemoryT = TypeVar("MemoryT")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """What a rule sees at the end of a window.

    Attributes:
        sizes: rows per rank that ran, shape ``[n]``.
        own_s: smoothed own time per rank in seconds, shape ``[n]``; 0 for a rank without rows.
        lower: fewest rows per rank, shape ``[n]``.
        upper: most rows per rank, shape ``[n]``.
        multiple: what all of them are multiples of.
    """

    sizes: IntArray
    own_s: FloatArray
    lower: IntArray
    upper: IntArray
    multiple: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Shares to move to, why, and what that saves of a step's time where the rule predicts it."""

    local_batch_sizes: tuple[int, ...]
    reason: str
    predicted_gain: float | None = None
    evidence: Mapping[str, float] = field(default_factory=dict)


class WindowRule(Protocol[MemoryT]):
    """Corrects shares at the end of a window."""

    @property
    def window(self) -> int:
        """Clean steps between two looks."""
        ...

    @property
    def smoothing(self) -> float:
        """Weight of the newest step in an exponential mean since the last switch; 0: the plain mean of a window."""
        ...

    def begin(self, problem: Problem, global_batch_size: int) -> MemoryT:
        """Begin with a worker group, or with another batch."""
        ...

    def judge(self, memory: MemoryT, window: Window) -> Move | str:
        """Return the shares to move to, or why none."""
        ...

    def moved(self, memory: MemoryT, before: IntArray, after: IntArray) -> MemoryT:
        """Take note of a change of shares of the same batch, shape ``[n]`` each."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowedState(Generic[MemoryT]):
    """The present window, and what the last one led to.

    Attributes:
        problem: the group and its limits.
        rule: the rule's memory.
        memory: peaks of memory per kind and size.
        sizes: shares that the group is known to run, or None before its first step.
        num_clean: clean steps under them.
        own_us: their smoothed own times, shape ``[n]``.
        offer: what the last window asks for; stands until applied, or until the next.
        verdict: what it said when it asks for nothing.
        is_new: that window ended at the newest step.
    """

    problem: Problem
    rule: MemoryT
    memory: MemoryBook
    sizes: tuple[int, ...] | None
    num_clean: int
    own_us: FloatArray
    offer: Reallocate | None = None
    verdict: str = "no window has ended yet"
    is_new: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedSplit(Generic[MemoryT]):
    """A rule, asked at the end of every window of clean steps under the same shares.

    Attributes:
        rule: what corrects them.
    """

    rule: WindowRule[MemoryT]

    def init(
        self,
        problem: Problem,
        prior: WindowedState[MemoryT] | None,
        current: Allocation | None,
        global_batch_size: int,
    ) -> tuple[tuple[int, ...], WindowedState[MemoryT]]:
        """Begin with the shares that training resumes from, else equal ones; of earlier groups peaks of memory stay."""
        devices = tuple(worker.device for worker in problem.workers)
        memory = MemoryBook.empty(devices, prior.memory if prior else None)
        fits = memory.max_rows(problem.workers)
        shares = resumed_shares(problem, current, global_batch_size, fits)
        shares = shares or equal_shares(problem, global_batch_size, fits)
        state = WindowedState(
            problem=problem,
            rule=self.rule.begin(problem, global_batch_size),
            memory=memory,
            sizes=None,
            num_clean=0,
            own_us=read_only(np.zeros(problem.num_workers), np.float64),
        )
        return shares, state

    def observe(
        self, state: WindowedState[MemoryT], step: StepObserved, use: BoolArray | None = None
    ) -> WindowedState[MemoryT]:
        """Take a clean step into the window, and judge where it ends."""
        del use  # whoever slowed down is to have fewer rows, however suddenly
        if step.flags != StepFlag.NONE or tuple(step.num_rows.tolist()) != state.sizes:
            return changed(state, is_new=False) if state.is_new else state
        count = state.num_clean + 1
        weight = max(self.rule.smoothing, 1 / count)
        if not self.rule.smoothing:
            weight = 1 / (state.num_clean % self.rule.window + 1)
        own_us = np.where(step.num_rows > 0, step.own_us, 0)
        state = changed(
            state,
            memory=state.memory.observe(step.num_rows, step.peak_memory_bytes),
            num_clean=count,
            own_us=read_only(state.own_us + weight * (own_us - state.own_us), np.float64),
            is_new=False,
        )
        return state if count % self.rule.window else self._judged(state)

    def propose(self, state: WindowedState[MemoryT]) -> Reallocate | Finding | str:
        """Offer what the last window asks for; one that asks for nothing is told of once."""
        if state.offer is not None:
            return state.offer
        return Finding(part="split", verdict="keep", reason=state.verdict) if state.is_new else state.verdict

    def plan(self, state: WindowedState[MemoryT], global_batch_size: int) -> Shares:
        """Return shares of another batch in the same proportions."""
        fits = state.memory.max_rows(state.problem.workers)
        if state.sizes is None:
            return Shares(local_batch_sizes=equal_shares(state.problem, global_batch_size, fits))
        lower, upper = known_bounds(state.problem, global_batch_size, fits)
        shares = apportion(global_batch_size, state.sizes, lower, upper, state.problem.local_batch_multiple)
        return Shares(local_batch_sizes=tuple(shares.tolist()))

    def rescale(self, state: WindowedState[MemoryT], factors: Mapping[int, float]) -> WindowedState[MemoryT]:
        """Take a trigger's word for the window under way."""
        own_us = state.own_us.copy()
        for rank, factor in factors.items():
            own_us[rank] *= factor
        return replace(state, own_us=read_only(own_us, np.float64))

    def applied(self, state: WindowedState[MemoryT], applied: AllocationApplied) -> WindowedState[MemoryT]:
        """Begin a window under what the group now runs."""
        after = applied.allocation.local_batch_sizes
        rule = state.rule
        if state.sizes is not None and sum(after) != sum(state.sizes):
            rule = self.rule.begin(state.problem, sum(after))
        elif state.sizes is not None and after != state.sizes:
            rule = self.rule.moved(rule, np.array(state.sizes), np.array(after))
        elif state.sizes is not None:
            return state  # the learning rate alone: the same times
        return WindowedState(
            problem=state.problem,
            rule=rule,
            memory=state.memory,
            sizes=after,
            num_clean=0,
            own_us=read_only(np.zeros(len(after)), np.float64),
        )

    def model(self, state: WindowedState[MemoryT]) -> Model | None:
        """Return what is known of memory; of times nothing is known but of the present shares."""
        return MemoryModel(problem=state.problem, memory=state.memory)

    def _judged(self, state: WindowedState[MemoryT]) -> WindowedState[MemoryT]:
        assert state.sizes is not None
        rows = sum(state.sizes)
        lower, upper = known_bounds(state.problem, rows, state.memory.max_rows(state.problem.workers))
        window = Window(
            sizes=np.array(state.sizes),
            own_s=state.own_us * 1e-6,
            lower=lower,
            upper=upper,
            multiple=state.problem.local_batch_multiple,
        )
        move = self.rule.judge(state.rule, window)
        if isinstance(move, str) or move.local_batch_sizes == state.sizes:
            verdict = move if isinstance(move, str) else "the shares are those that the times ask for"
            return changed(state, offer=None, verdict=verdict, is_new=True)
        offer = Reallocate(
            proposal=Proposal(local_batch_sizes=move.local_batch_sizes),
            reason=move.reason,
            predicted_gain=move.predicted_gain,
            evidence=dict(move.evidence),
        )
        return changed(state, offer=offer, is_new=True)


def check_window(method: str, window: int, smoothing: float = 0.0) -> None:
    """Refuse a window that holds no step, or a weight that is none.

    Raises:
        ConfigError: names the value.
    """
    if window < 1:
        raise ConfigError(f"option 'window' of policy {method!r} must be at least 1 step, got {window}")
    if not 0.0 <= smoothing <= 1.0:
        raise ConfigError(f"option 'smoothing' of policy {method!r} must be a weight in [0, 1], got {smoothing}")
