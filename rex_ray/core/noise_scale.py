"""The gradient noise scale, for shares of any size.

``phi = tr(S) / |G|^2`` (in rows) says how large a batch still pays: ``tr(S)`` is the variance of one row's gradient,
``|G|^2`` the squared norm of the true one. McCandlish et al. 2018 (arXiv:1812.06162, app. A) estimate both from
equal shares; their formula reads up to eight times too much on skewed ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rex_ray.core.observations import StepObserved
from rex_ray.core.types import FloatArray

__all__ = [
    "GradientMoments",
    "Unread",
    "estimate_gradient_moments",
    "moments_from_groups",
    "moments_of_sums",
    "noise_scale",
    "read_moments",
]

MIN_BLOCKS = 8
"""Fewest moments behind a noise scale: a ratio of single-step estimates has no finite mean."""

LOSSY = 1e-4
"""``sum b_i |g_i|^2`` below ``B |g|^2`` by more than this part cannot be: the mean of squares is at least the square of
the mean. Then the reduction itself changed the gradient (a lossy hook). Norms in single precision err by 1e-6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientMoments:
    """Unbiased estimates from one step, or sums of them; never take the ratio of a single step's.

    Attributes:
        sq_norm: estimate of ``|G|^2``; negative in about a third of single steps.
        noise_trace: estimate of ``tr(S)``, per row; never negative unless the reduction itself was lossy.
    """

    sq_norm: float
    noise_trace: float

    def __add__(self, other: GradientMoments) -> GradientMoments:
        """Sum numerators and denominators, which is how moments are averaged."""
        return GradientMoments(sq_norm=self.sq_norm + other.sq_norm, noise_trace=self.noise_trace + other.noise_trace)


def estimate_gradient_moments(
    local_sq_norms: npt.ArrayLike,
    local_batch_sizes: npt.ArrayLike,
    global_sq_norm: float,
    dataset_size: int | None = None,
) -> GradientMoments:
    """Estimate the true gradient's squared norm and the per-sample noise trace.

    With ``g = sum_i (b_i / B) g_i``, ``E|g_i|^2 = |G|^2 + tr(S) / b_i`` and ``E|g|^2 = |G|^2 + tr(S) / B``.
    Weighting the first by ``b_i`` and subtracting leaves ``(n - 1) tr(S)``, so unequal shares need no special
    case; equal ones give the usual formula (McCandlish et al. 2018, app. A).

    Args:
        local_sq_norms: ``|g_i|^2`` per rank, shape ``[n]``, of the unweighted local mean gradient.
        local_batch_sizes: real rows per rank, shape ``[n]``, same order; a rank without rows does not count.
        global_sq_norm: ``|g|^2`` of the reduced gradient.
        dataset_size: rows of the data set when steps draw from it without replacement and a row's gradient is
            fixed; leave out under augmentation or dropout.

    Returns:
        ``sq_norm`` and ``noise_trace``, both unbiased for one step; ``sq_norm`` may be negative, so smooth
        each before taking their ratio.

    Raises:
        ValueError: fewer than two ranks with rows, for which the noise cannot be seen.
    """
    rows = np.asarray(local_batch_sizes, dtype=np.float64)
    norms = np.where(rows > 0, np.asarray(local_sq_norms, dtype=np.float64), 0.0)
    return moments_from_groups(rows * norms, (rows > 0).astype(np.int64), rows, global_sq_norm, dataset_size)


def moments_from_groups(
    weighted_sq_norm: npt.ArrayLike,
    num_groups: npt.ArrayLike,
    num_rows: npt.ArrayLike,
    global_sq_norm: float,
    dataset_size: int | None = None,
) -> GradientMoments:
    """Estimate the same from gradient groups: a rank's micro-batches are groups of their own.

    Args:
        weighted_sq_norm: ``sum_j rows_j |g_j|^2`` over each rank's groups, shape ``[n]``.
        num_groups: groups with rows per rank, shape ``[n]``.
        num_rows: rows per rank, shape ``[n]``.
        global_sq_norm: ``|g|^2`` of the reduced gradient.
        dataset_size: as in ``estimate_gradient_moments``.

    Raises:
        ValueError: fewer than two groups in all, or a measurement that is not finite.
    """
    groups, rows = int(np.sum(num_groups)), float(np.sum(num_rows))
    weighted = math.fsum(np.asarray(weighted_sq_norm, dtype=np.float64).ravel())
    if groups < 2:
        raise ValueError(f"the noise of a gradient shows between two groups of rows or more, got {groups}")
    if not math.isfinite(weighted) or not math.isfinite(global_sq_norm):
        raise ValueError(f"gradient norms must be finite, got {weighted} and {global_sq_norm}")
    noise_trace, sq_norm = moments_of_sums(weighted, groups, rows, global_sq_norm, dataset_size)
    return GradientMoments(sq_norm=float(sq_norm), noise_trace=float(noise_trace))


def moments_of_sums(
    weighted_sq_norm: npt.ArrayLike,
    num_groups: int,
    num_rows: float,
    global_sq_norm: npt.ArrayLike,
    dataset_size: int | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Return ``tr(S)`` and ``|G|^2`` from sums over all ranks; any number of steps at once.

    Args:
        weighted_sq_norm: ``sum_j rows_j |g_j|^2`` over all groups, any shape.
        num_groups: groups behind it, at least two.
        num_rows: rows of a step.
        global_sq_norm: ``|g|^2``, of the same shape.
        dataset_size: as in ``estimate_gradient_moments``.
    """
    reduced = np.asarray(global_sq_norm, dtype=np.float64)
    noise_trace: FloatArray = (np.asarray(weighted_sq_norm) - num_rows * reduced) / (num_groups - 1)
    # Without replacement the mean of B of N rows varies by tr(S) (1/B - 1/N).
    share = 1.0 / num_rows - (0.0 if dataset_size is None else 1.0 / dataset_size)
    sq_norm: FloatArray = reduced - noise_trace * share
    return noise_trace, sq_norm


Unread: TypeAlias = Literal["not measured", "not finite", "one group", "lossy reduction"]
"""Why a step says nothing of the noise scale."""


def read_moments(step: StepObserved, dataset_size: int | None = None) -> GradientMoments | Unread:
    """Return what a step's norms say, or why they say nothing.

    Groups are micro-batches of ranks that had rows. ``num_norm_steps == 2`` is a lone worker's estimate over two
    steps: its sums and its mean gradient are over the rows of both.

    Args:
        step: a complete step.
        dataset_size: as in ``estimate_gradient_moments``; off by default, since nobody here knows whether the data
            are augmented or rows dropped out.
    """
    if step.weighted_sq_norm is None and step.global_sq_norm is None:
        return "not measured"
    if step.weighted_sq_norm is None or step.global_sq_norm is None or step.num_groups is None:
        return "not finite"
    has_rows = step.num_rows > 0
    groups = int(step.num_groups @ has_rows)
    weighted = float(np.where(has_rows, step.weighted_sq_norm, 0.0).sum())
    rows = float(step.num_rows.sum() * step.num_norm_steps)
    if not (math.isfinite(weighted) and math.isfinite(step.global_sq_norm)):
        return "not finite"
    if groups < 2:
        return "one group"
    if weighted < rows * step.global_sq_norm * (1 - LOSSY):
        return "lossy reduction"
    noise_trace, sq_norm = moments_of_sums(weighted, groups, rows, step.global_sq_norm, dataset_size)
    return GradientMoments(sq_norm=float(sq_norm), noise_trace=max(float(noise_trace), 0.0))


def noise_scale(moments: Sequence[GradientMoments], min_blocks: int = MIN_BLOCKS) -> float | None:
    """Return ``phi`` as a ratio of sums, in rows.

    Returns:
        None while fewer than ``min_blocks`` moments are known, where the noise sums to less than nothing (a lossy
        reduction), or there is neither noise nor gradient (nothing is trained); ``inf`` where the noise hides the
        gradient altogether.
    """
    if len(moments) < min_blocks:
        return None
    noise = math.fsum(moment.noise_trace for moment in moments)
    signal = math.fsum(moment.sq_norm for moment in moments)
    if noise < 0 or noise == signal == 0:
        return None
    return noise / signal if signal > 0 else math.inf
