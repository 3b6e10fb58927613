"""REX's split: measured curves, and the exact min-max solution on them. Alone it finds balance and keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from rex_ray.core.errors import ConfigError
from rex_ray.core.median import median
from rex_ray.core.memory import MemoryBook
from rex_ray.core.observations import AllocationApplied, StepObserved
from rex_ray.core.split import CurveSet
from rex_ray.core.step_time import WINDOW, StepTimeBook
from rex_ray.core.types import Allocation, BoolArray, FloatArray, Problem, StepFlag, read_only
from rex_ray.policies.base import Finding, Proposal, Reallocate
from rex_ray.policies.limits import equal_shares, resumed_shares
from rex_ray.policies.seams import Model, Shares
from rex_ray.policies.split.model import SplineModel

__all__ = ["SplineSplit", "SplineSplitState"]

_MIN_SPREAD = 0.005
"""Relative sd of own times below which no few samples are believed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplineSplitState:
    """What is known about times, and how far the present shares have been judged.

    Attributes:
        problem: the group and its limits.
        book: own times per rank and size.
        memory: peaks of memory per kind and size.
        sizes: shares that the group is known to run, or None before its first step.
        num_clean: clean steps under these shares.
        recent_s: own times of the newest of those steps, at most 32, shape ``[n]`` each.
        offer: better shares that the last review found; stands until applied or reviewed again.
        verdict: what the last review said when it found none.
        evidence: its figures.
        is_new: that review took place at the newest step.
    """

    problem: Problem
    book: StepTimeBook
    memory: MemoryBook
    sizes: tuple[int, ...] | None
    num_clean: int
    recent_s: tuple[FloatArray, ...] = ()
    offer: Reallocate | None = None
    verdict: str = "too few clean steps yet"
    evidence: Mapping[str, float] = field(default_factory=dict)
    is_new: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SplineSplit:
    """Fit, solve exactly, move, measure again: each round corrects the curves where the last one used them.

    The present shares are reviewed after ``min_steps`` clean steps, after twice as many, and so on up to every
    ``max_review_steps``. A move must promise more than ``min_gain`` and more than the noise of what was measured can
    feign, so the first, large move comes early and small corrections wait until they are sure.

    Attributes:
        min_gain: least predicted fraction of step time saved.
        min_steps: clean steps of an allocation before its first review.
        max_review_steps: longest distance of two reviews in clean steps.
        num_sigmas: how many standard errors of the slowest rank's median a predicted gain must exceed.
        autocorrelation: assumed lag-1 correlation of own times; shared clusters have .6 to .9.
    """

    min_gain: float = 0.03
    min_steps: int = 6
    max_review_steps: int = 96
    num_sigmas: float = 2.0
    autocorrelation: float = 0.6

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_gain < 1.0:
            raise ConfigError(f"min_gain must be a fraction of step time in [0, 1), got {self.min_gain}")
        if not 1 <= self.min_steps <= self.max_review_steps:
            raise ConfigError(
                f"min_steps must be at least 1 and at most max_review_steps ({self.max_review_steps}), "
                f"got {self.min_steps}"
            )
        if self.num_sigmas < 0 or not 0 <= self.autocorrelation < 1:
            raise ConfigError(
                f"num_sigmas must not be negative and autocorrelation must lie in [0, 1), "
                f"got {self.num_sigmas} and {self.autocorrelation}"
            )

    def init(
        self, problem: Problem, prior: SplineSplitState | None, current: Allocation | None, global_batch_size: int
    ) -> tuple[tuple[int, ...], SplineSplitState]:
        """Begin with shares for the devices that there are now, as far as anything is known of their kinds.

        On the very kinds that an earlier group ran on, rank by rank, these are the shares that it ran last: they may be
        newer than those of the save. On other ones, the exact split on what is known of each kind. Where some kind is
        unknown, the shares resumed from, else equal ones.
        """
        devices = tuple(worker.device for worker in problem.workers)
        book = prior.book.carry_over(devices) if prior else StepTimeBook.empty(devices)
        book = book.with_learnt(problem.learnt)
        memory = MemoryBook.empty(devices, prior.memory if prior else None)
        fits = memory.max_rows(problem.workers)
        shares = None
        if current is not None and prior is not None and prior.book.devices == devices:
            newest = current if prior.sizes is None else replace(current, local_batch_sizes=prior.sizes)
            shares = resumed_shares(problem, newest, global_batch_size, fits)
        if shares is None:
            plan = SplineModel(problem=problem, book=book, memory=memory).exact_plan(global_batch_size)
            shares = plan.local_batch_sizes if plan else resumed_shares(problem, current, global_batch_size, fits)
        if shares is None:
            shares = equal_shares(problem, global_batch_size, fits)
        state = SplineSplitState(
            problem=problem,
            book=book,
            memory=memory,
            sizes=None,
            num_clean=0,
        )
        return shares, state

    def observe(self, state: SplineSplitState, step: StepObserved, use: BoolArray | None = None) -> SplineSplitState:
        """Take a clean step into the book; review the shares when their time has come."""
        if step.flags != StepFlag.NONE:
            return replace(state, is_new=False) if state.is_new else state
        own_s: FloatArray = np.multiply(step.own_us, 1e-6)
        book = state.book.observe(step.num_rows, own_s, use)
        memory = state.memory.observe(step.num_rows, step.peak_memory_bytes)
        if state.sizes is None or tuple(step.num_rows.tolist()) != state.sizes:
            return replace(state, book=book, memory=memory, is_new=False)
        own_s.setflags(write=False)
        state = SplineSplitState(
            problem=state.problem,
            book=book,
            memory=memory,
            sizes=state.sizes,
            num_clean=state.num_clean + 1,
            recent_s=(*state.recent_s[1 - WINDOW :], own_s),
            offer=state.offer,
            verdict=state.verdict,
            evidence=state.evidence,
        )
        return self._review(state) if self._is_due(state.num_clean) else state

    def propose(self, state: SplineSplitState) -> Reallocate | Finding | str:
        """Offer what the last review found; a review that found nothing better is told of once."""
        if state.offer is not None:
            return state.offer
        if not state.is_new:
            return state.verdict
        return Finding(part="split", verdict="keep", reason=state.verdict, evidence=dict(state.evidence))

    def plan(self, state: SplineSplitState, global_batch_size: int) -> Shares:
        """Return the exact split of another batch, equal shares while the curves are unknown or do not reach."""
        model = _model(state)
        plan = model.exact_plan(global_batch_size)
        if plan is None:
            return Shares(local_batch_sizes=equal_shares(state.problem, global_batch_size, model.max_rows()))
        return Shares(local_batch_sizes=plan.local_batch_sizes, step_time_s=plan.step_time_s)

    def rescale(self, state: SplineSplitState, factors: Mapping[int, float]) -> SplineSplitState:
        """Move the scales of ranks that a trigger names, and review at once: its test stands for the clean steps.

        Where all ranks changed alike no split is better for it: what was judged so far stays judged.
        """
        book = state.book
        for rank, factor in factors.items():
            book = book.rescale(rank, factor)
        if len(factors) == state.problem.num_workers and len(set(factors.values())) == 1:
            factor = next(iter(factors.values()))
            recent = tuple(read_only(own_s * factor, np.float64) for own_s in state.recent_s)
            return replace(state, book=book, recent_s=recent)
        return self._review(replace(_unjudged(state), book=book), confident=True)

    def applied(self, state: SplineSplitState, applied: AllocationApplied) -> SplineSplitState:
        """Begin to judge the shares that the group now runs."""
        return replace(_unjudged(state), sizes=applied.allocation.local_batch_sizes)

    def model(self, state: SplineSplitState) -> Model | None:
        """Return the book's curves."""
        return _model(state)

    def _is_due(self, num_clean: int) -> bool:
        doublings, rest = divmod(num_clean, self.min_steps)
        if num_clean >= self.max_review_steps:
            return num_clean % self.max_review_steps == 0
        return rest == 0 and doublings & (doublings - 1) == 0

    def _review(self, state: SplineSplitState, *, confident: bool = False) -> SplineSplitState:
        """Compare the present shares with the exact split on today's curves."""
        if state.sizes is None:
            return state
        plan = _model(state).exact_plan(sum(state.sizes))
        if plan is None:
            why = "no split fits what the ranks hold" if state.book.is_complete else "some rank's times are unknown"
            return replace(state, offer=None, verdict=why, evidence={}, is_new=True)
        now_s = float(CurveSet(state.book.curves()).own_s(np.array(state.sizes)).max())
        gain = 1.0 - plan.step_time_s / now_s
        needed = self.min_gain if confident else max(self.min_gain, self.num_sigmas * self._standard_error(state))
        evidence = {
            "step_time_s": now_s,
            "planned_step_time_s": plan.step_time_s,
            "gain": gain,
            "needed_gain": needed,
            "num_clean_steps": float(state.num_clean),
        }
        if gain <= needed or plan.local_batch_sizes == state.sizes:
            verdict = f"another split would save {max(gain, 0.0):.1%} of {now_s:.4g} s, not more than {needed:.1%}"
            return replace(state, offer=None, verdict=verdict, evidence=evidence, is_new=True)
        offer = Reallocate(
            proposal=Proposal(local_batch_sizes=plan.local_batch_sizes),
            reason=f"the exact split on the measured curves saves {gain:.1%} of {now_s:.4g} s",
            predicted_gain=gain,
            evidence=evidence,
        )
        return replace(state, offer=offer)

    def _standard_error(self, state: SplineSplitState) -> float:
        """Relative standard error of the noisiest rank's median own time, as far as so few steps can tell.

        A median has 1.25 times the error of a mean, and a step that resembles the last one counts for less. The
        spread is taken from the median deviation: a pause of the garbage collector is no reason to doubt the rest.
        """
        count = len(state.recent_s)
        if count < 2:
            return _MIN_SPREAD
        log_s = np.log(np.maximum(state.recent_s, 1e-6))
        deviations = np.abs(log_s - median(log_s))
        spread = max(1.4826 * float(median(deviations).max()), _MIN_SPREAD)
        effective = count * (1 - self.autocorrelation) / (1 + self.autocorrelation)
        return 1.25 * spread / math.sqrt(effective)


def _unjudged(state: SplineSplitState) -> SplineSplitState:
    return replace(
        state,
        num_clean=0,
        recent_s=(),
        offer=None,
        verdict="too few clean steps yet",
        evidence={},
        is_new=False,
    )


def _model(state: SplineSplitState) -> SplineModel:
    return SplineModel(problem=state.problem, book=state.book, memory=state.memory)
