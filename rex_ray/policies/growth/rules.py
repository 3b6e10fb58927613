"""What a rule of growth sees and answers, and two rules of others beside the paper's (``egmd``).

A rule has no memory: it sees what is known at the end of a block of measured steps and names a batch, or says why it
names none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rex_ray.core.types import FloatArray, Problem
from rex_ray.policies.growth.blocks import NoiseBlocks, rows_text
from rex_ray.policies.growth.pace import BatchTimes
from rex_ray.policies.limits import whole_rows

__all__ = ["UNKNOWN", "GoodputOptimal", "GrowTenPercent", "GrowthRule", "GrowthView", "Hold", "Target"]

UNKNOWN, UNTIMED = "noise scale unknown", "keep: step time unknown"
"""Verdicts of a rule that could not judge yet: its look of the epoch is still to come."""

WITHIN_EPOCH = "keep: within the epoch"
"""Verdict of a rule that has judged in this epoch: what it asked for then still stands."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GrowthView:
    """What a rule may look at.

    Attributes:
        problem: the group and its limits.
        num_rows: the present global batch.
        smallest: batch below which it never shrinks.
        largest: batch above which it never grows.
        blocks: evidence of the noise.
        times: step times of other batches.
        wealth: the anytime-valid test's, against a noise scale of twice the present batch.
        num_bets: looks behind it.
        is_new_epoch: whether the rule has not been able to judge in this epoch so far.
    """

    problem: Problem
    num_rows: int
    smallest: int
    largest: int
    blocks: NoiseBlocks
    times: BatchTimes
    wealth: FloatArray
    num_bets: int
    is_new_epoch: bool

    @property
    def most_known(self) -> int:
        """The largest batch that may be grown to and that memories are known to hold; the present one at least."""
        fits = None if self.times.model is None else self.times.model.max_rows()
        if fits is None:
            return self.largest
        multiple = self.problem.local_batch_multiple
        return min(self.largest, max(int((fits // multiple * multiple).sum()), self.num_rows))

    def whole(self, num_rows: int) -> int:
        """Return the largest batch of at most ``num_rows`` rows that shares may make up."""
        return whole_rows(self.problem, num_rows)

    def goodput(self, num_rows: int, noise_scale: float | None) -> float | None:
        """Return the goodput at ``num_rows``; None while its step time is unknown."""
        return self.times.goodput(num_rows, self.problem.global_batch_size, noise_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A batch to change to.

    ``noise_scale`` is what goodput and learning rate are computed with: the pool's, or the lower bound that the test
    has just shown.
    """

    num_rows: int
    noise_scale: float
    reason: str
    evidence: Mapping[str, float] = field(default_factory=dict)
    predicted_gain: float | None = None

    @property
    def verdict(self) -> str:
        """The outcome in a word."""
        return "change"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Why the batch stays."""

    verdict: str
    reason: str
    evidence: Mapping[str, float] = field(default_factory=dict)


class GrowthRule(Protocol):
    """Names the batch that the evidence asks for."""

    @property
    def window(self) -> int:
        """Blocks that it looks at."""
        ...

    @property
    def optimism(self) -> float:
        """How much of the predicted slowing it leaves out for batches that were never run, a fraction."""
        ...

    @property
    def is_betting(self) -> bool:
        """Whether it looks at the anytime-valid test's wealth."""
        ...

    @property
    def is_tried(self) -> bool:
        """Whether a larger batch is left again when it measures worse, and a batch at which training suffers."""
        ...

    def decide(self, view: GrowthView) -> Target | Hold:
        """Judge what is known at the end of a block."""
        ...


class _TakenAtItsWord:
    """A published rule that neither hopes, nor tests, nor looks back: the next look corrects the last one."""

    __slots__ = ()

    @property
    def optimism(self) -> float:
        """It takes predictions as they are."""
        return 0.0

    @property
    def is_betting(self) -> bool:
        """It tests nothing."""
        return False

    @property
    def is_tried(self) -> bool:
        """Its authors never look back."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowTenPercent(_TakenAtItsWord):
    """A tenth more at every look while the noise scale is above the batch; no test and no goodput (SimiGrad's rule).

    Attributes:
        factor: new batch over the old one.
        window: blocks that are remembered.
    """

    factor: float = 1.1
    window: int = 8

    def decide(self, view: GrowthView) -> Target | Hold:
        """Grow by a tenth, or say why not."""
        phi, now, largest = view.blocks.noise_scale, view.num_rows, view.most_known
        if phi is None:
            return Hold(verdict=UNKNOWN, reason="too few blocks of measured steps")
        if now >= largest:
            whose = "the limits allow" if largest == view.largest else "memories are known to hold"
            return Hold(verdict="at the cap", reason=f"{now} rows are the most that {whose}")
        if phi <= now:
            reason = f"the noise scale is {rows_text(phi)}, the batch {now}"
            return Hold(verdict="keep: noise scale too small", reason=reason)
        next_rows = now + view.problem.local_batch_multiple
        num_rows = min(max(next_rows, view.whole(round(self.factor * now))), largest)
        reason = f"the noise scale is {rows_text(phi)} rows, above the batch of {now}"
        return Target(num_rows=num_rows, noise_scale=phi, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputOptimal(_TakenAtItsWord):
    """The batch of the best goodput, asked for once per epoch and taken if it is clearly better (Pollux, OSDI'21).

    Attributes:
        min_gain: least gain in goodput, as a fraction.
        num_points: candidates, in equal ratios from the smallest to the largest batch.
        window: blocks that are remembered.
    """

    min_gain: float = 0.05
    num_points: int = 50
    window: int = 8

    def decide(self, view: GrowthView) -> Target | Hold:
        """Compare all candidates at the first look of an epoch that knows enough."""
        phi = view.blocks.noise_scale
        if phi is None:
            return Hold(verdict=UNKNOWN, reason="too few blocks of measured steps")
        if not view.is_new_epoch:
            return Hold(verdict=WITHIN_EPOCH, reason="the batch is judged once per epoch")
        present = view.goodput(view.num_rows, phi)
        if present is None:
            return Hold(verdict=UNTIMED, reason=f"the step time of {view.num_rows} rows is unknown")
        spaced = np.rint(np.geomspace(view.smallest, view.largest, self.num_points)).astype(int)
        points = sorted({view.whole(rows) for rows in spaced.tolist()})
        best, num_rows = max(((view.goodput(rows, phi) or 0.0, -rows) for rows in points), default=(0.0, 0))
        gain, num_rows = best / present - 1.0, -num_rows
        evidence = {"goodput_gain": gain}
        if not gain > self.min_gain or num_rows == view.num_rows:
            reason = f"no batch promises more than {gain:+.1%} of goodput"
            return Hold(verdict="keep: goodput gate", reason=reason, evidence=evidence)
        return Target(
            num_rows=num_rows,
            noise_scale=phi,
            reason=f"{num_rows} rows promise {gain:+.1%} of goodput",
            evidence=evidence,
            predicted_gain=1.0 - 1.0 / (1.0 + gain),
        )
