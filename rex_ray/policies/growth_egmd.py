"""The paper's rule: exponential growth, multiplicative decrease, each confirmed by a test on blocks of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rex_ray.core.eprocess import SignBet
from rex_ray.core.errors import ConfigError
from rex_ray.core.types import FloatArray
from rex_ray.core.wilcoxon import Alternative, SignedRank, signed_rank, smallest_p
from rex_ray.policies.growth_blocks import BlockStatistic, NoiseBlocks, block_statistic
from rex_ray.policies.growth_rules import UNKNOWN, GrowthView, Hold, Target

__all__ = ["BET", "Egmd", "Statistic", "Test"]

Statistic: TypeAlias = Literal["linear", "log", "both"]
Test: TypeAlias = Literal["wilcoxon", "eprocess"]

BET = SignBet()
"""The anytime-valid test's stakes; its null chance is measured, see ``docs/methods.md``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Egmd:
    """Exponential growth, multiplicative decrease, each confirmed by a test on the last blocks (the paper's rule).

    Grow to ``min(2 B, largest)`` when the noise scale is shown to be above ``2 B`` *and* the larger batch makes
    more progress per second in balanced steps. Shrink to ``max(B / 2, smallest)`` when it is shown to be below
    ``B / 4``, and below what it was just after the last change (the anchor).

    Attributes:
        test: ``"wilcoxon"`` on the last ``window`` blocks, or ``"eprocess"``, which bounds errors per run.
        statistic: ``"linear"`` (default), the paper's ``"log"``, or ``"both"``: ``log``, and above its anchor as well.
        alpha: level of every test.
        window: blocks that a test looks at.
        min_gain: least gain in goodput, as a fraction.
        jump: go on to ``4 B``, ``8 B`` ... at once where the same test and the same gain hold for each of these steps.
            Nested hypotheses tested in order need no correction of the level.
    """

    test: Test = "wilcoxon"
    statistic: Statistic = "linear"
    alpha: float = 0.05
    window: int = 8
    min_gain: float = 0.05
    jump: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < 0.5:
            raise ConfigError(f"growth_alpha must be a level in (0, 0.5), got {self.alpha}")
        least = smallest_p(self.window) if self.window >= 1 else 1.0
        if least >= self.alpha:
            raise ConfigError(
                f"growth_window={self.window} blocks can never show anything at growth_alpha={self.alpha}: their "
                f"smallest p is {least:.3g}; use at least {math.floor(-math.log2(self.alpha)) + 1} blocks"
            )
        if not 0.0 <= self.min_gain < math.inf:
            raise ConfigError(f"growth_min_gain must be a fraction of at least 0, got {self.min_gain}")

    @property
    def is_tried(self) -> bool:
        """Measured losers are left again."""
        return True

    def compare(self, noise: FloatArray, signal: FloatArray, num_rows: float, alternative: Alternative) -> SignedRank:
        """Test blocks against a noise scale of ``num_rows``; arrays ``[..., window]``, one test per row."""
        statistic: BlockStatistic = "linear" if self.statistic == "linear" else "log"
        return signed_rank(block_statistic(noise, signal, num_rows, statistic), alternative)

    def decide(self, view: GrowthView) -> Target | Hold:
        """Shrink, grow, or say why not."""
        blocks = view.blocks
        if blocks.num_blocks < self.window or blocks.noise_scale is None:
            missing = f"{blocks.num_blocks} of {self.window} blocks of measured steps since the last change"
            return Hold(verdict=UNKNOWN if blocks.noise_scale is None else "too few blocks", reason=missing)
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
        num_rows = max(view.num_rows // 2, view.smallest)
        return Target(
            num_rows=num_rows,
            noise_scale=min(blocks.noise_scale or 0.0, bound),
            reason=f"the noise scale is below {bound:.4g} rows, a quarter of the batch, and below what it was just "
            f"after the last change: Wilcoxon p = {float(found.p_value):.3g}",
            evidence=_figures(found),
        )

    def _is_below_anchor(self, blocks: NoiseBlocks) -> bool:
        """Whether the newest blocks lie below the noise scale of the first ones after the last change."""
        if blocks.num_blocks < 2 * self.window:
            return False
        noise, signal = blocks.anchor_noise.sum(), blocks.anchor_signal.sum()
        if signal <= 0:
            return True
        return bool(self.compare(blocks.noise, blocks.signal, float(noise / signal), "less").p_value < self.alpha)

    def _grown(self, view: GrowthView) -> Target | Hold:
        bound = 2 * view.num_rows
        found, p_value = self._above(view, bound)
        evidence = {**_figures(found), "p_value": p_value}
        if not p_value < self.alpha:
            reason = f"it is not shown that the noise scale is above {bound} rows: {self._named(p_value, found)}"
            return Hold(verdict="keep: noise scale too small", reason=reason, evidence=evidence)
        noise_scale = _usable(view.blocks.noise_scale, bound)
        num_rows = min(bound, view.largest)
        gain = self._gain(view, view.num_rows, num_rows, noise_scale)
        if gain is None:
            reason = f"the step time of {num_rows} rows is unknown"
            return Hold(verdict="keep: step time unknown", reason=reason, evidence=evidence)
        evidence["goodput_gain"] = gain
        if not gain > self.min_gain:
            reason = (
                f"the noise scale is above {bound} rows ({self._named(p_value, found)}), but {num_rows} rows would "
                f"change goodput by {gain:+.1%}, not by more than {self.min_gain:+.1%}"
            )
            return Hold(verdict="keep: goodput gate", reason=reason, evidence=evidence)
        num_rows, total, p_value = self._jumped(view, num_rows, gain, p_value)
        evidence |= {"goodput_gain": total, "p_value": p_value}
        return Target(
            num_rows=num_rows,
            noise_scale=_usable(view.blocks.noise_scale, max(bound, num_rows)),
            reason=f"the noise scale is above {max(bound, num_rows)} rows ({self._named(p_value, found)}) and "
            f"{num_rows} rows promise {total:+.1%} of goodput",
            evidence=evidence,
            predicted_gain=1.0 - 1.0 / (1.0 + total),
        )

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

    def _jumped(self, view: GrowthView, num_rows: int, gain: float, p_value: float) -> tuple[int, float, float]:
        """Go on doubling while test and gain hold for each further step."""
        if not self.jump or self.test == "eprocess":
            return num_rows, gain, p_value
        while (following := min(2 * num_rows, view.largest)) > num_rows:
            _, p_next = self._above(view, following)
            more = self._gain(view, num_rows, following, _usable(view.blocks.noise_scale, following))
            if not p_next < self.alpha or more is None or not more > self.min_gain:
                break
            num_rows, gain, p_value = following, (1 + gain) * (1 + more) - 1, p_next
        return num_rows, gain, p_value

    @staticmethod
    def _gain(view: GrowthView, now: int, then: int, noise_scale: float) -> float | None:
        before, after = view.goodput(now, noise_scale), view.goodput(then, noise_scale)
        return None if before is None or after is None else after / before - 1.0

    def _named(self, p_value: float, found: SignedRank) -> str:
        name = "Wilcoxon" if self.test == "wilcoxon" else "anytime-valid"
        return f"{name} p = {p_value:.3g}, effect {float(found.effect):+.2f}, {int(found.num_used)} blocks"


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
