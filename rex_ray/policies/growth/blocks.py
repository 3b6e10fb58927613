"""From single steps' noisy moments to blocks that can be tested, and to one noise scale that can be used.

A single step's ``|G|^2`` is negative one time in three, so nothing is ever decided on one, nor on a running mean of
them, whose values depend on one another. Blocks do not share steps, and a test on the last few of them keeps its
level.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rex_ray.core.changed import changed
from rex_ray.core.noise_scale import GradientMoments, Unread
from rex_ray.core.types import FloatArray, read_only
from rex_ray.policies.growth.pool import NoisePool

__all__ = ["BlockStatistic", "NoiseBlocks", "block_statistic", "rows_text"]

BLOCK_STEPS = 4
"""Measured steps in a block. Sums over four are nearly symmetric under the null; see ``docs/methods.md``."""

BlockStatistic: TypeAlias = Literal["linear", "log"]

_FEWEST_ROWS = 1e-9

_NONE = read_only(np.zeros(0), np.float64)


def rows_text(num_rows: float) -> str:
    """Return a noise scale, or a bound of one, to four digits and without an exponent: ``12,780``."""
    rounded = float(f"{num_rows:.4g}")
    if abs(rounded) >= 10_000:
        return f"{rounded:,.0f}"
    return f"{rounded:.4g}" if abs(rounded) >= 1e-4 else "0"


def block_statistic(
    noise: npt.ArrayLike, signal: npt.ArrayLike, num_rows: float, statistic: BlockStatistic
) -> FloatArray:
    """Return how far each block lies above a noise scale of ``num_rows``, any shape.

    ``linear`` is ``sum S - c sum G2``: of mean 0 at ``phi = c`` and always defined. ``log`` is the paper's
    ``log(sum S / sum G2) - log c``: NaN where ``sum G2 <= 0``, which is commonest exactly when growth is right.
    """
    trace, sq_norm = np.asarray(noise, dtype=np.float64), np.asarray(signal, dtype=np.float64)
    if statistic == "linear":
        linear: FloatArray = trace - num_rows * sq_norm
        return linear
    known = (trace > 0) & (sq_norm > 0)
    ratio = np.where(known, trace, 1.0) / np.where(known, sq_norm, 1.0)
    # A batch that pays without any noise is tested against 0: every block that is defined lies above it.
    logarithmic: FloatArray = np.where(known, np.log(ratio / max(num_rows, _FEWEST_ROWS)), np.nan)
    return logarithmic


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoiseBlocks:
    """The newest blocks of measured steps, those just after the last change of the batch, and the pool over all.

    Both moments are unbiased at any batch, so the window and the pool outlive a change of it; the anchor does not.

    Attributes:
        noise: each of the newest blocks' sum of ``tr(S)``, shape ``[<= window]``.
        signal: their sums of ``|G|^2``.
        anchor_noise: the same of the first blocks after the change.
        anchor_signal: likewise.
        num_blocks: blocks since the change, without skipped ones.
        num_to_skip: blocks that are still to be left out of the window.
        open_noise: sum over the steps of the unfinished block.
        open_signal: likewise.
        num_open: steps in it.
        pool: all blocks, older ones counting less: what the noise scale that is *used* rests on.
        num_dropped: measured steps that said nothing.
        fault: why the newest such step said nothing; empty after one that did.
        num_faults: such steps in a row.
        is_flagged: the newest estimate is a lone worker's, over two steps.
    """

    noise: FloatArray = field(default_factory=lambda: _NONE)
    signal: FloatArray = field(default_factory=lambda: _NONE)
    anchor_noise: FloatArray = field(default_factory=lambda: _NONE)
    anchor_signal: FloatArray = field(default_factory=lambda: _NONE)
    num_blocks: int = 0
    num_to_skip: int = 0
    open_noise: float = 0.0
    open_signal: float = 0.0
    num_open: int = 0
    pool: NoisePool = field(default_factory=NoisePool)
    num_dropped: int = 0
    fault: str = ""
    num_faults: int = 0
    is_flagged: bool = False

    @property
    def noise_scale(self) -> float | None:
        """``phi`` in rows as of now: None while unknown, ``inf`` where the noise hides the gradient."""
        return self.pool.noise_scale

    @property
    def num_pooled(self) -> int:
        """Blocks behind it."""
        return self.pool.num_blocks

    def take(
        self, read: GradientMoments | Unread, window: int, *, is_flagged: bool = False
    ) -> tuple[NoiseBlocks, bool]:
        """Take in what a measured step said; also return whether that ended a block.

        A reduction that loses something makes *every* step's noise a wrong one, also where it does not show: all
        that is known is forgotten.
        """
        if not isinstance(read, GradientMoments):
            known = NoiseBlocks() if read == "lossy reduction" else self
            faults = self.num_faults + 1 if self.fault == read else 1
            return changed(known, num_dropped=self.num_dropped + 1, fault=read, num_faults=faults), False
        noise, signal = self.open_noise + read.noise_trace, self.open_signal + read.sq_norm
        if self.num_open + 1 < BLOCK_STEPS:
            now = changed(
                self,
                open_noise=noise,
                open_signal=signal,
                num_open=self.num_open + 1,
                fault="",
                num_faults=0,
                is_flagged=is_flagged,
            )
            return now, False
        return self._closed(noise, signal, window, is_flagged), True

    def _closed(self, noise: float, signal: float, window: int, is_flagged: bool) -> NoiseBlocks:
        closed = changed(
            self,
            open_noise=0.0,
            open_signal=0.0,
            num_open=0,
            pool=self.pool.take(noise, signal),
            fault="",
            num_faults=0,
            is_flagged=is_flagged,
        )
        if self.num_to_skip > 0:
            return changed(closed, num_to_skip=self.num_to_skip - 1)
        is_early = self.num_blocks < window
        return changed(
            closed,
            noise=_appended(self.noise, noise, window),
            signal=_appended(self.signal, signal, window),
            anchor_noise=_appended(self.anchor_noise, noise, window) if is_early else self.anchor_noise,
            anchor_signal=_appended(self.anchor_signal, signal, window) if is_early else self.anchor_signal,
            num_blocks=self.num_blocks + 1,
        )

    def after_change(self) -> NoiseBlocks:
        """Leave out one block: the first steps at another batch and rate are transient. The anchor begins anew."""
        return changed(
            self,
            anchor_noise=_NONE,
            anchor_signal=_NONE,
            num_blocks=0,
            num_to_skip=1,
            open_noise=0.0,
            open_signal=0.0,
            num_open=0,
        )

    def afresh(self) -> NoiseBlocks:
        """Forget all: the norms are of other parameters from now on."""
        return NoiseBlocks(num_dropped=self.num_dropped)


def _appended(values: FloatArray, value: float, window: int) -> FloatArray:
    return read_only([*values[max(0, values.size - window + 1) :].tolist(), value], np.float64)
