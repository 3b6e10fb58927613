"""Two problems on which every constant of the convergence bound is known, and gradient descent on them.

Many runs are trained side by side, each with its own batch, shares and rate. A schedule is asked before the step's rows
are drawn and sees what earlier steps have shown, nothing else: it is predictable by its signature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np

from rex_ray.core.types import FloatArray, IntArray

__all__ = ["Paths", "Problem", "Quadratic", "Regression", "Schedule", "Seen", "random_shares", "train"]


class Problem(Protocol):
    """A function to minimise whose gradient is only seen through rows."""

    name: str

    @property
    def smoothness(self) -> float:
        """``L``: the gradient changes by at most ``L`` times the distance."""
        ...

    @property
    def row_variance(self) -> float:
        """``sigma^2``: no point's row gradients have a larger ``tr(S)``."""
        ...

    @property
    def least_value(self) -> float:
        """``F*``, a lower bound of the function."""
        ...

    @property
    def start(self) -> FloatArray:
        """A point far from any minimum, shape ``[d]``."""
        ...

    @property
    def minimum(self) -> FloatArray:
        """A minimum, shape ``[d]``."""
        ...

    def value(self, points: FloatArray) -> FloatArray:
        """Return the function, shape ``[runs]``, at points of shape ``[runs, d]``."""
        ...

    def gradient(self, points: FloatArray) -> FloatArray:
        """Return the true gradient, shape ``[runs, d]``."""
        ...

    def group_gradients(self, points: FloatArray, sizes: IntArray, rng: np.random.Generator) -> FloatArray:
        """Return the mean gradient over each worker's fresh rows, shape ``[runs, n, d]``; zeros where it has none.

        Args:
            points: shape ``[runs, d]``.
            sizes: rows per run and worker, shape ``[runs, n]``.
            rng: draws the rows.
        """
        ...


class Quadratic:
    """``F(x) = x' H x / 2``; a row's gradient is ``H x`` plus normal noise of covariance ``S``, the same everywhere."""

    name = "noisy quadratic"
    curvature = np.geomspace(0.2, 1.0, 12)
    noise_sd = np.linspace(0.5, 2.0, 12)
    smoothness = 1.0
    least_value = 0.0

    @property
    def row_variance(self) -> float:
        """``tr(S)``."""
        return float((self.noise_sd**2).sum())

    @property
    def start(self) -> FloatArray:
        """Two in every coordinate."""
        return np.full(self.curvature.size, 2.0)

    @property
    def minimum(self) -> FloatArray:
        """The origin."""
        return np.zeros(self.curvature.size)

    def value(self, points: FloatArray) -> FloatArray:
        """Return ``x' H x / 2``."""
        result: FloatArray = (self.curvature * points**2).sum(axis=1) / 2
        return result

    def gradient(self, points: FloatArray) -> FloatArray:
        """Return ``H x``."""
        return self.curvature * points

    def group_gradients(self, points: FloatArray, sizes: IntArray, rng: np.random.Generator) -> FloatArray:
        """Return group means: that of ``b`` rows has noise of covariance ``S / b``."""
        noise = rng.standard_normal((*sizes.shape, self.curvature.size)) * self.noise_sd
        some = sizes[..., None] > 0
        scale = 1 / np.sqrt(np.maximum(sizes, 1))
        return np.where(some, self.gradient(points)[:, None] + noise * scale[..., None], 0.0)

    def floor(self, rate: float, batch: int) -> float:
        """Return the mean of ``F`` where training at a constant rate and batch ends up, exactly.

        Per coordinate ``x <- (1 - eta h) x - eta e`` is an autoregression of variance
        ``eta s^2 / (B h (2 - eta h))``; the sum of ``h / 2`` times that is the floor.
        """
        return float((rate * self.noise_sd**2 / (2 * batch * (2 - rate * self.curvature))).sum())


class Regression:
    """Robust regression: ``F(w)`` is the mean over rows of ``u^2 / (1 + u^2)``, ``u = y - w' z``. Not convex.

    ``rho(u) = u^2 / (1 + u^2)`` has ``|rho'| <= 3 sqrt(3) / 8`` and ``|rho''| <= 2``, so ``L`` and ``sigma^2`` are
    known for every point at once. A tenth of the rows are outliers, which is what the loss is made for.
    """

    name = "robust regression"
    least_value = 0.0

    def __init__(self, num_rows: int = 1024, num_dims: int = 8, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.inputs = rng.standard_normal((num_rows, num_dims)) * np.geomspace(0.7, 1.4, num_dims)
        self.targets = self.inputs @ rng.standard_normal(num_dims) + 0.3 * rng.standard_normal(num_rows)
        outliers = rng.random(num_rows) < 0.1
        self.targets[outliers] += 6 * rng.standard_normal(int(outliers.sum()))

    @cached_property
    def smoothness(self) -> float:
        """Twice the largest eigenvalue of the inputs' second moments."""
        return 2 * float(np.linalg.eigvalsh(self.inputs.T @ self.inputs / len(self.inputs))[-1])

    @cached_property
    def row_variance(self) -> float:
        """``max |rho'|^2`` times the mean squared input."""
        return 27 / 64 * float((self.inputs**2).sum(axis=1).mean())

    @property
    def start(self) -> FloatArray:
        """The origin."""
        return np.zeros(self.inputs.shape[1])

    @cached_property
    def minimum(self) -> FloatArray:
        """Where plain gradient descent from the start ends up."""
        point = self.start[None]
        for _ in range(4000):
            point = point - self.gradient(point) / self.smoothness
        return point[0]

    def value(self, points: FloatArray) -> FloatArray:
        """Return the mean loss over all rows."""
        square = (self.targets - points @ self.inputs.T) ** 2
        result: FloatArray = (square / (1 + square)).mean(axis=1)
        return result

    def gradient(self, points: FloatArray) -> FloatArray:
        """Return the mean gradient over all rows."""
        result: FloatArray = _slope(self.targets - points @ self.inputs.T) @ -self.inputs / len(self.inputs)
        return result

    def group_gradients(self, points: FloatArray, sizes: IntArray, rng: np.random.Generator) -> FloatArray:
        """Return group means over rows drawn independently of one another."""
        ends = np.cumsum(sizes, axis=1)
        rows = rng.integers(len(self.inputs), size=(len(points), int(ends[:, -1].max())))
        inputs = self.inputs[rows]
        each = -_slope(self.targets[rows] - np.einsum("rjd,rd->rj", inputs, points))[..., None] * inputs
        # Sums up to every border, whose differences are the groups' sums.
        sums = np.concatenate([np.zeros((len(points), 1, inputs.shape[2])), np.cumsum(each, axis=1)], axis=1)
        borders = np.concatenate([np.zeros((len(points), 1), dtype=np.int64), ends], axis=1)
        totals = np.diff(np.take_along_axis(sums, borders[..., None], axis=1), axis=1)
        result: FloatArray = totals / np.maximum(sizes, 1)[..., None]
        return result


def _slope(residual: FloatArray) -> FloatArray:
    result: FloatArray = 2 * residual / (1 + residual**2) ** 2
    return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """What a schedule may know at a step: all of it is older than the step's rows.

    Attributes:
        step: number of the step.
        batches: rows of the step before, shape ``[runs]``.
        sq_norms: ``|g|^2`` that the step before measured, shape ``[runs]``; inf before the first.
        noise_scale: true ``tr(S) / |grad F|^2`` at the present points, shape ``[runs]``.
    """

    step: int
    batches: IntArray
    sq_norms: FloatArray
    noise_scale: FloatArray


Schedule: TypeAlias = Callable[[Seen, np.random.Generator], tuple[IntArray, FloatArray]]
"""Returns rows and the factor on the rate, both of shape ``[runs]``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Paths:
    """Runs side by side, arrays of shape ``[steps, runs]``.

    Attributes:
        values: ``F`` before each step.
        sq_slopes: ``|grad F|^2`` before each step.
        rates: ``eta``.
        batches: rows.
    """

    values: FloatArray
    sq_slopes: FloatArray
    rates: FloatArray
    batches: IntArray


def random_shares(batches: IntArray, num_workers: int, rng: np.random.Generator) -> IntArray:
    """Return skewed random shares of each batch, shape ``[runs, n]``, with some workers left without rows."""
    weights = rng.random((len(batches), num_workers)) ** 3
    ends = np.rint(batches[:, None] * np.cumsum(weights, axis=1) / weights.sum(axis=1, keepdims=True)).astype(np.int64)
    return np.diff(ends, axis=1, prepend=0)


def train(
    problem: Problem,
    schedule: Schedule,
    *,
    rate: float,
    num_steps: int,
    num_runs: int,
    rng: np.random.Generator,
    start: FloatArray | None = None,
    num_workers: int = 5,
) -> Paths:
    """Train many runs by the weighted gradient of random shares, drawn anew at every step.

    Args:
        problem: what is minimised.
        schedule: batch and factor on the rate; told nothing about the step's own rows.
        rate: ``eta_0``.
        num_steps: steps.
        num_runs: runs side by side.
        rng: of schedule, shares and rows.
        start: first point of every run, shape ``[d]``; default the problem's.
        num_workers: workers.
    """
    points = np.tile(problem.start if start is None else start, (num_runs, 1))
    batches, sq_norms = np.zeros(num_runs, dtype=np.int64), np.full(num_runs, np.inf)
    kept: list[tuple[FloatArray, FloatArray, FloatArray, IntArray]] = []
    for step in range(num_steps):
        sq_slopes = (problem.gradient(points) ** 2).sum(axis=1)
        noise_scale = problem.row_variance / np.maximum(sq_slopes, 1e-300)
        seen = Seen(step=step, batches=batches, sq_norms=sq_norms, noise_scale=noise_scale)
        batches, factors = schedule(seen, rng)
        sizes = random_shares(batches, num_workers, rng)
        groups = problem.group_gradients(points, sizes, rng)
        gradient = np.einsum("rn,rnd->rd", sizes / batches[:, None], groups)
        kept.append((problem.value(points), sq_slopes, rate * factors, batches))
        points = points - rate * factors[:, None] * gradient
        sq_norms = (gradient**2).sum(axis=1)
    values, slopes, rates, rows = zip(*kept, strict=True)
    return Paths(values=np.array(values), sq_slopes=np.array(slopes), rates=np.array(rates), batches=np.array(rows))
