"""The paper's rule: exponential growth, multiplicative decrease, each confirmed by a test on blocks of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from rex_ray.core.eprocess import SignBet
from rex_ray.core.errors import ConfigError
from rex_ray.core.types import FloatArray
from rex_ray.core.wilcoxon import Alternative, SignedRank, signed_rank, smallest_p
from rex_ray.policies.growth.blocks import BlockStatistic, NoiseBlocks, block_statistic, rows_text
from rex_ray.policies.growth.rules import UNKNOWN, UNTIMED, GrowthView, Hold, Target

__all__ = ["BET", "Egmd", "Statistic", "Test"]

Statistic: TypeAlias = Literal["linear", "log", "both"]
Test: TypeAlias = Literal["wilcoxon", "eprocess"]

BET = SignBet()
"""The anytime-valid test's stakes; its null chance is measured, see ``docs/methods.md``."""

_NEXT, _BETWEEN = (0.25, 0.5, 0.75), (0.125, 0.0625)
"""Octaves above the present batch, and then from the best one so far, at which better ones are sought than doublings:
memories end, and times bend, between them."""

_PARTS = (1.0, 0.95, 0.9, 0.75, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Egmd:
    """Exponential growth, multiplicative decrease, each confirmed by a test on the last blocks (the paper's rule).

    Grow to ``min(2 B, largest)`` when the noise scale is shown to be above ``2 B`` *and* the larger batch makes
    more progress per second in balanced steps. Shrink to ``max(B / 2, smallest)`` when it is shown to be below
    ``B / 4``, and below what it was just after the last change (the anchor), unless smaller steps would not pay.

    Attributes:
        test: ``"wilcoxon"`` on the last ``window`` blocks, or ``"eprocess"``, which bounds errors per run.
        statistic: ``"linear"`` (default), the paper's ``"log"``, or ``"both"``: ``log``, and above its anchor as well.
        alpha: level of every test.
        window: blocks that a test looks at.
        min_gain: least gain in goodput, as a fraction.
        jump: ask the goodput itself. The batch of the best goodput among the doublings is the candidate, and the test
            is against the noise scale from which it pays by ``min_gain``, which may be less than twice the batch; if
            that is not shown, the next smaller one is. With ``"wilcoxon"`` only: a bet needs one lasting question.
        optimism: how much of the predicted slowing is left out for a batch that was never run, up to twice the largest
            that was; a fraction. What was hoped for is tried by the clock, until it once disappoints.
        gate: ask goodput at all. Without, the noise scale alone decides, as in the paper: whatever a test allows is
            run and kept, and ``min_gain``, ``jump`` and ``optimism`` mean nothing.
    """

    test: Test = "wilcoxon"
    statistic: Statistic = "linear"
    alpha: float = 0.05
    window: int = 8
    min_gain: float = 0.02
    jump: bool = True
    optimism: float = 0.5
    gate: bool = True

    def __post_init__(self) -> None:
        names = (("growth_test", self.test, get_args(Test)), ("growth_statistic", self.statistic, get_args(Statistic)))
        for option, value, known in names:
            if value not in known:
                raise ConfigError(f"option {option!r} must be one of {', '.join(known)}, got {value!r}")
        if not 0.0 < self.alpha < 0.5:
            raise ConfigError(f"growth_alpha must be a level in (0, 0.5), got {self.alpha}")
        least = smallest_p(self.window) if self.window >= 1 else 1.0
        if least >= self.alpha:
            raise ConfigError(
                f"growth_window={self.window} blocks can never show anything at growth_alpha={self.alpha}: their "
                f"smallest p is {least:.3g}; use at least {math.floor(-math.log2(self.alpha)) + 1} blocks"
            )
        if not 0.0 <= self.optimism <= 1.0:
            raise ConfigError(f"growth_optimism must be a fraction in [0, 1], got {self.optimism}")
        if not 0.0 <= self.min_gain < math.inf:
            raise ConfigError(f"growth_min_gain must be a fraction of at least 0, got {self.min_gain}")

    @property
    def is_betting(self) -> bool:
        """The anytime-valid test is a bet."""
        return self.test == "eprocess"

    @property
    def is_tried(self) -> bool:
        """Measured losers are left again."""
        return self.gate

    def compare(self, noise: FloatArray, signal: FloatArray, num_rows: float, alternative: Alternative) -> SignedRank:
        """Test blocks against a noise scale of ``num_rows``; arrays ``[..., window]``, one test per row."""
        statistic: BlockStatistic = "linear" if self.statistic == "linear" else "log"
        return signed_rank(block_statistic(noise, signal, num_rows, statistic), alternative)

    def decide(self, view: GrowthView) -> Target | Hold:
        """Shrink, grow, or say why not."""
        blocks = view.blocks
        if blocks.num_blocks == 0:
            return Hold(verdict="settling", reason="the first block of steps after a change is left out")
        if blocks.noise.size < self.window:
            missing = f"{blocks.noise.size} of {self.window} blocks of measured steps"
            return Hold(verdict=UNKNOWN, reason=missing)
        if view.num_rows > view.smallest and (target := self._shrunk(view)) is not None:
            return target
        if view.num_rows >= view.largest:
            return Hold(verdict="at the cap", reason=f"{view.num_rows} rows are the most that the limits allow")
        return self._grown(view)

    def _shrunk(self, view: GrowthView) -> Target | None:
        blocks, bound = view.blocks, view.num_rows / 4
        found = self.compare(blocks.noise, blocks.signal, bound, "less")
        if not found.p_value < self.alpha or not self._is_below_anchor(blocks):
            return None
        num_rows = max(view.whole(view.num_rows // 2), view.smallest)
        noise_scale = min(blocks.noise_scale or 0.0, bound)
        gain = _gain(view, num_rows, noise_scale)
        # Times that are unknown stop no shrinking: what was shown is that the rows of the larger batch are wasted.
        if self.gate and gain is not None and not gain > self.min_gain:
            return None
        return Target(
            num_rows=num_rows,
            noise_scale=noise_scale,
            reason=f"the noise scale is below {rows_text(bound)} rows, a quarter of the batch, and below what it was "
            f"just after the last change: Wilcoxon p = {float(found.p_value):.3g}",
            evidence=_figures(found) | ({} if gain is None else {"goodput_gain": gain}),
            predicted_gain=None if gain is None else 1.0 - 1.0 / (1.0 + gain),
        )

    def _is_below_anchor(self, blocks: NoiseBlocks) -> bool:
        """Whether the newest blocks lie below the first ones after the last change.

        Blocks are compared in pairs, at the noise scale of both windows together: one estimated from the anchor alone
        would be as uncertain as what it judges, and the test would lose its level.
        """
        if blocks.num_blocks < 2 * self.window:
            return False
        both = blocks.anchor_noise.sum() + blocks.noise.sum(), blocks.anchor_signal.sum() + blocks.signal.sum()
        if both[1] <= 0:
            return False
        now = block_statistic(blocks.noise, blocks.signal, float(both[0] / both[1]), "linear")
        then = block_statistic(blocks.anchor_noise, blocks.anchor_signal, float(both[0] / both[1]), "linear")
        return bool(signed_rank(now - then, "less").p_value < self.alpha)

    def _grown(self, view: GrowthView) -> Target | Hold:
        noise_scale = view.blocks.noise_scale
        bound = 2.0 * view.num_rows
        num_rows = _within_reach(view, min(2 * view.num_rows, view.largest))
        found, p_value = self._above(view, bound)
        is_asked = False
        if self.gate and self.jump and self.test == "wilcoxon":
            for rows in self._ladder(view):
                pays_from = view.times.break_even(rows, self.min_gain)
                if pays_from is None or math.isinf(pays_from):
                    continue
                tested, p_tested = self._above(view, pays_from)
                if p_tested < self.alpha:
                    num_rows, bound, found, p_value, is_asked = rows, pays_from, tested, p_tested, True
                    break
        evidence = {**_figures(found), "p_value": p_value, "tested_noise_scale": bound}
        if not p_value < self.alpha:
            not_shown = f"it is not shown that the noise scale is above {rows_text(bound)} rows"
            reason = f"{not_shown}: {self._named(p_value, found)}"
            verdict = UNKNOWN if noise_scale is None else "keep: noise scale too small"
            return Hold(verdict=verdict, reason=reason, evidence=evidence)
        usable = _usable(noise_scale, bound)
        shown = f"the noise scale is above {rows_text(bound)} rows ({self._named(p_value, found)})"
        if not self.gate:
            return Target(num_rows=num_rows, noise_scale=usable, reason=f"{shown}; no gate is asked", evidence=evidence)
        gain = _gain(view, num_rows, usable)
        # Where a bound is all that is known, the gain there is the least that was asked for, and the test has shown it.
        is_shown = is_asked and (noise_scale is None or math.isinf(noise_scale))
        if gain is None:
            reason = f"the step time of {num_rows} rows is unknown"
            return Hold(verdict=UNTIMED, reason=reason, evidence=evidence)
        evidence["goodput_gain"] = gain
        if not gain > self.min_gain and not is_shown:
            reason = f"{shown}, but {num_rows} rows would change goodput by {gain:+.2%}, not above {self.min_gain:+.2%}"
            return Hold(verdict="keep: goodput gate", reason=reason, evidence=evidence)
        return Target(
            num_rows=num_rows,
            noise_scale=usable,
            reason=f"{shown} and {num_rows} rows promise {gain:+.1%} of goodput",
            evidence=evidence,
            predicted_gain=1.0 - 1.0 / (1.0 + gain),
        )

    def _ladder(self, view: GrowthView) -> list[int]:
        """Return the batch of the best goodput, sought between the doublings, and the doublings below it."""
        rungs: list[int] = []
        rows = view.num_rows
        while rows < view.largest:
            rows = min(2 * rows, view.largest)
            rungs.append(_within_reach(view, rows))
        phi = _usable(view.blocks.noise_scale, 2.0 * view.num_rows)

        def worth(num_rows: int) -> float:
            is_allowed = view.num_rows < num_rows <= view.largest
            return view.goodput(num_rows, phi) or 0.0 if is_allowed else 0.0

        def about(num_rows: int, octaves: float) -> int:
            return view.whole(round(num_rows * 2**octaves))

        best = max((*rungs, *(about(view.num_rows, octaves) for octaves in _NEXT)), key=worth)
        for octaves in _BETWEEN:
            best = max((best, about(best, -octaves), about(best, octaves)), key=worth)
        return [best, *(rung for rung in reversed(rungs) if rung < best)]

    def _above(self, view: GrowthView, bound: float) -> tuple[SignedRank, float]:
        """Test the newest blocks against ``bound``; return the figures and the p that counts."""
        blocks = view.blocks
        found = self.compare(blocks.noise, blocks.signal, bound, "greater")
        if self.test == "eprocess":
            return found, float(BET.p_value(view.wealth, view.num_bets))
        if self.statistic != "both":
            return found, float(found.p_value)
        if blocks.num_blocks < 2 * self.window:
            return found, 1.0
        now = block_statistic(blocks.noise, blocks.signal, bound, "log")
        then = block_statistic(blocks.anchor_noise, blocks.anchor_signal, bound, "log")
        return found, max(float(found.p_value), float(signed_rank(now - then).p_value))

    def _named(self, p_value: float, found: SignedRank) -> str:
        name = "Wilcoxon" if self.test == "wilcoxon" else "anytime-valid"
        return f"{name} p = {p_value:.3g}, effect {float(found.effect):+.2f}, {int(found.num_used)} blocks"


def _within_reach(view: GrowthView, num_rows: int) -> int:
    """Return ``num_rows``, or a little less where its step time is unknown and that of a little less is not.

    Curves reach to twice the sizes that were run, and memories end where they end: all ranks' limits together are
    seldom a doubling.
    """
    for part in _PARTS:
        rows = view.whole(view.num_rows + int(part * (num_rows - view.num_rows)))
        if view.times.step_s(rows) is not None:
            return rows
    return num_rows


def _gain(view: GrowthView, num_rows: int, noise_scale: float) -> float | None:
    before, after = view.goodput(view.num_rows, noise_scale), view.goodput(num_rows, noise_scale)
    return None if before is None or after is None else after / before - 1.0


def _usable(noise_scale: float | None, bound: float) -> float:
    """Return the pool's noise scale, or where the noise hides the gradient what the test has shown it to exceed."""
    return bound if noise_scale is None or math.isinf(noise_scale) else noise_scale


def _figures(found: SignedRank) -> dict[str, float]:
    return {
        "p_value": float(found.p_value),
        "effect": float(found.effect),
        "num_used": float(found.num_used),
        "num_undefined": float(found.num_dropped),
    }
