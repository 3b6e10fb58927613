"""Wilcoxon's signed-rank test, for many rows of few values at once, without the traps of a general one.

SciPy's answers p = 1 to thirteen zeros and NaN to fourteen, lets an infinity pass as the largest rank, and breaks
ties by the last bit. Here what is not finite is dropped and counted, values are ranked after rounding, and rows
without a difference are no evidence: p = 1, whatever their number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rex_ray.core.types import BoolArray, FloatArray, IntArray

__all__ = ["Alternative", "SignedRank", "signed_rank", "smallest_p"]

Alternative: TypeAlias = Literal["greater", "less", "two-sided"]

MAX_EXACT = 25
"""Most differences whose null distribution is counted out; beyond, a normal one is within 1 % of it."""

RELATIVE_TOLERANCE = 1e-9
"""Differences that are equal to so many parts of the largest one are ties: arithmetic is no evidence."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SignedRank:
    """The test's result per row, every array of the rows' shape.

    Attributes:
        p_value: probability of such ranks or more extreme ones if signs were coin tosses; 1 without evidence.
        effect: matched-pairs rank-biserial correlation, from -1 (all negative) to 1; 0 without evidence.
        num_used: differences behind it.
        num_zeros: differences that were none.
        num_dropped: values that were not finite.
    """

    p_value: FloatArray
    effect: FloatArray
    num_used: IntArray
    num_zeros: IntArray
    num_dropped: IntArray


def smallest_p(num_pairs: int, alternative: Alternative = "greater") -> float:
    """Return the smallest p that so many differences can reach: a test below it never fires, whatever it sees."""
    return min(1.0, math.ldexp(2.0 if alternative == "two-sided" else 1.0, -num_pairs))


def signed_rank(differences: npt.ArrayLike, alternative: Alternative = "greater") -> SignedRank:
    """Test whether differences lie symmetrically around zero (Wilcoxon 1945); one test per row of the last axis.

    Exact up to ``MAX_EXACT`` differences, ties included (the distribution of the midranks that there are); a normal
    approximation with the ties' correction and without a continuity correction beyond. Zeros are left out.

    Args:
        differences: shape ``[..., n]``.
        alternative: ``"greater"`` looks for positive differences, ``"less"`` for negative ones.
    """
    given = np.asarray(differences, dtype=np.float64)
    if given.ndim == 1 and given.size <= MAX_EXACT:
        return _test_one(given.tolist(), alternative)
    rows = given.reshape(math.prod(given.shape[:-1]), given.shape[-1])
    finite = np.isfinite(rows)
    size = np.abs(np.where(finite, rows, 0.0))
    largest = size.max(axis=-1, keepdims=True, initial=0.0)
    steps = np.rint(size / np.where(largest > 0, largest, 1.0) / RELATIVE_TOLERANCE)
    used = steps > 0
    num_used = used.sum(axis=-1)
    ranks, has_ties = _doubled_midranks(steps, used)
    total = num_used * (num_used + 1)
    positive = (ranks * (used & (rows > 0))).sum(axis=-1)
    if alternative == "greater":
        towards = positive
    elif alternative == "less":
        towards = total - positive
    else:
        towards = np.maximum(positive, total - positive)
    p_value = _upper_tail(towards, num_used, ranks, has_ties)
    if alternative == "two-sided":
        p_value = np.minimum(1.0, 2.0 * p_value)
    shape = given.shape[:-1]
    return SignedRank(
        p_value=p_value.reshape(shape),
        effect=((2 * positive - total) / np.maximum(total, 1)).reshape(shape),
        num_used=num_used.reshape(shape),
        num_zeros=(finite & ~used).sum(axis=-1).reshape(shape),
        num_dropped=(~finite).sum(axis=-1).reshape(shape),
    )


def _test_one(values: list[float], alternative: Alternative) -> SignedRank:
    """Test one short row: what a controller asks for block by block, at a tenth of the price of many rows at once."""
    finite = [value for value in values if math.isfinite(value)]
    largest = max(map(abs, finite), default=0.0) or 1.0
    sized = [(round(abs(value) / largest / RELATIVE_TOLERANCE), value > 0) for value in finite]
    used = sorted(pair for pair in sized if pair[0] > 0)
    ranks: list[int] = []
    for _, group in groupby(used, key=lambda pair: pair[0]):
        count = len(list(group))
        ranks.extend([2 * len(ranks) + count + 1] * count)
    total = len(used) * (len(used) + 1)
    positive = sum(rank for rank, (_, is_positive) in zip(ranks, used, strict=True) if is_positive)
    towards = {"greater": positive, "less": total - positive}.get(alternative, max(positive, total - positive))
    if len(set(ranks)) == len(ranks):
        p_value = float(_tail_table()[len(used), towards // 2])
    else:
        p_value = float(_count_out(np.array(ranks))[towards])
    return SignedRank(
        p_value=np.asarray(min(1.0, 2.0 * p_value) if alternative == "two-sided" else p_value),
        effect=np.asarray((2 * positive - total) / max(total, 1)),
        num_used=np.asarray(len(used)),
        num_zeros=np.asarray(len(finite) - len(used)),
        num_dropped=np.asarray(len(values) - len(finite)),
    )


def _doubled_midranks(steps: FloatArray, used: BoolArray) -> tuple[IntArray, BoolArray]:
    """Return twice the midrank of every used value (whole numbers), 0 elsewhere, and which rows have ties."""
    other = np.where(used, steps, np.inf)[:, None, :]
    mine = steps[:, :, None]
    less, not_more = (other < mine).sum(axis=-1), (other <= mine).sum(axis=-1)
    has_ties: BoolArray = (used & (not_more - less > 1)).any(axis=-1)
    return np.where(used, less + not_more + 1, 0), has_ties


def _upper_tail(towards: IntArray, num_used: IntArray, ranks: IntArray, has_ties: BoolArray) -> FloatArray:
    """Return P(twice the rank sum >= ``towards``) per row."""
    exact = num_used <= MAX_EXACT
    p_value: FloatArray = _tail_table()[np.where(exact, num_used, 0), np.where(exact, towards // 2, 0)]
    for row in (exact & has_ties & (num_used > 0)).nonzero()[0]:
        p_value[row] = _count_out(ranks[row][ranks[row] > 0])[int(towards[row])]
    if not exact.all():
        far = ~exact
        mean, square = ranks[far].sum(axis=-1) / 2, (ranks[far].astype(np.float64) ** 2).sum(axis=-1)
        score = (towards[far] - mean) / np.sqrt(square / 4)
        p_value[far] = [0.5 * math.erfc(value / math.sqrt(2)) for value in score]
    return p_value


@lru_cache(maxsize=1)
def _tail_table() -> FloatArray:
    """Return P(rank sum >= w) for every number of untied differences up to ``MAX_EXACT``, shape ``[n, w]``."""
    table = np.zeros((MAX_EXACT + 1, MAX_EXACT * (MAX_EXACT + 1) // 2 + 1))
    for count in range(MAX_EXACT + 1):
        tail = _count_out(2 * np.arange(1, count + 1))[::2]
        table[count, : tail.size] = tail
    return table


def _count_out(doubled_ranks: IntArray) -> FloatArray:
    """Return P(sum >= w) for w = 0, 1, ... where each rank counts or not on the toss of a coin."""
    ways = np.zeros(int(doubled_ranks.sum()) + 1)
    ways[0] = 1.0
    for rank in doubled_ranks.tolist():
        shifted = np.zeros_like(ways)
        shifted[rank:] = ways[: ways.size - rank]
        ways = (ways + shifted) / 2
    tail: FloatArray = np.cumsum(ways[::-1])[::-1]
    return tail
