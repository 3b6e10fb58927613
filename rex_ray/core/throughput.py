"""Pollux's model of a step's time from the rows per worker, and its fit (Qiao et al., OSDI'21; AdaptDL).

Seven parameters say how long a step takes on equal workers with ``b`` rows each:

    T_grad = alpha_c + beta_c b                            the local gradient
    T_sync = alpha + beta max(n - 2, 0), 0 for n = 1       the reduction: (alpha_n, beta_n) over several nodes,
                                                           (alpha_r, beta_r) within one
    T_iter = (T_grad^gamma + T_sync^gamma)^(1/gamma)       gamma from 1, one after the other, to 10, all of it hidden

AdaptDL minimises root mean squares of log errors by gradient descent, and holds what cannot be told: with one size of
batch ``alpha_c`` is half of the time, without workers on several nodes (within one node) that pair is as good as 0,
and so are both ``beta`` without more than two workers. The same here, but with squares of log errors, whose minimum
is smooth, from several first values of ``gamma``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, nnls

from rex_ray.core.types import FloatArray

__all__ = ["PerfParams", "fit_perf_params"]

_LEAST = 1e-8
_MOST_GAMMA = 10.0
_FIRST_GAMMAS = (1.01, 2.0, 5.0)

_MOST_EVALUATIONS = 40

_GAMMA_WEIGHT, _BETA_WEIGHT = 1e-4, 1e-3
"""Weights of AdaptDL's two priors, ``gamma`` near 1 and small ``beta / alpha``, among log errors: they decide where
the times leave it open (one size, or one number of workers), and are far below any noise where they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerfParams:
    """The seven parameters, in seconds and seconds per row or worker.

    Attributes:
        alpha_c: constant part of a gradient's time.
        beta_c: seconds per row.
        alpha_n: constant part of a reduction over several nodes.
        beta_n: what each worker beyond the second adds to it.
        alpha_r: constant part of a reduction within one node.
        beta_r: what each worker beyond the second adds to it.
        gamma: how much of gradient and reduction overlaps, 1 to 10.
    """

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float

    def grad_s(self, local_rows: npt.ArrayLike) -> FloatArray:
        """Return the seconds of a local gradient over so many rows (any shape)."""
        result: FloatArray = self.alpha_c + self.beta_c * np.asarray(local_rows, dtype=np.float64)
        return result

    def sync_s(self, num_nodes: npt.ArrayLike, num_workers: npt.ArrayLike) -> FloatArray:
        """Return the seconds of a reduction among so many workers on so many nodes; broadcasts."""
        nodes, workers = np.asarray(num_nodes), np.asarray(num_workers)
        more = np.maximum(workers - 2, 0)
        apart, together = self.alpha_n + self.beta_n * more, self.alpha_r + self.beta_r * more
        result: FloatArray = np.where(nodes > 1, apart, np.where(workers > 1, together, 0.0))
        return result

    def step_s(self, num_nodes: npt.ArrayLike, num_workers: npt.ArrayLike, local_rows: npt.ArrayLike) -> FloatArray:
        """Return the seconds of a whole step; broadcasts."""
        grad, sync = self.grad_s(local_rows), self.sync_s(num_nodes, num_workers)
        # Divided by the larger of the two, so that no power overflows.
        larger = np.maximum(np.maximum(grad, sync), _LEAST)
        parts = (grad / larger) ** self.gamma + (sync / larger) ** self.gamma
        result: FloatArray = larger * parts ** (1.0 / self.gamma)
        return result


def fit_perf_params(
    num_nodes: npt.ArrayLike,
    num_workers: npt.ArrayLike,
    local_rows: npt.ArrayLike,
    grad_s: npt.ArrayLike,
    step_s: npt.ArrayLike,
) -> PerfParams:
    """Fit the parameters to mean times, one entry per placement and size of batch.

    Args:
        num_nodes: nodes of each entry, shape ``[k]``, ``k >= 1``.
        num_workers: workers of each entry, shape ``[k]``.
        local_rows: rows per worker, shape ``[k]``.
        grad_s: positive seconds of the local gradient, shape ``[k]``.
        step_s: positive seconds of the whole step, shape ``[k]``.

    Returns:
        Parameters; a pair that no entry speaks of is as good as 0.
    """
    nodes, workers = np.asarray(num_nodes), np.asarray(num_workers)
    rows = np.asarray(local_rows, dtype=np.float64)
    grad, step = np.asarray(grad_s, dtype=np.float64), np.asarray(step_s, dtype=np.float64)
    apart, together = nodes > 1, (nodes <= 1) & (workers > 1)
    first = np.full(7, _LEAST)
    free = np.zeros(7, dtype=np.bool_)
    if np.unique(rows).size == 1:
        # Half and half, as AdaptDL has it: optimistic about larger batches.
        first[:2] = grad.mean() / 2, grad.mean() / 2 / rows[0]
        free[1] = True
    else:
        first[:2] = np.maximum(nnls(np.stack([1 / grad, rows / grad], axis=1), np.ones(grad.size))[0], _LEAST)
        free[:2] = True
    rest = np.maximum(step - grad, _LEAST)
    for at, seen in ((2, apart), (4, together)):
        if seen.any():
            first[at] = rest[seen].mean()
            free[at], free[at + 1] = True, bool((workers[seen] > 2).any())
    free[6] = bool(apart.any() or together.any())
    lower, upper = np.full(7, _LEAST), np.full(7, np.inf)
    lower[6], upper[6] = 1.0, _MOST_GAMMA
    where = free.nonzero()[0]

    def whole(values: FloatArray) -> PerfParams:
        every = first.copy()
        every[6] = 1.0
        every[where] = values
        return PerfParams(**dict(zip(PerfParams.__slots__, every.tolist(), strict=True)))

    def errors(values: FloatArray) -> FloatArray:
        params = whole(values)
        slopes = [params.beta_n / params.alpha_n, params.beta_r / params.alpha_r]
        priors = np.array([_GAMMA_WEIGHT * (params.gamma - 1), *(_BETA_WEIGHT * np.array(slopes))])
        return np.concatenate(
            [np.log(params.grad_s(rows) / grad), np.log(params.step_s(nodes, workers, rows) / step), priors]
        )

    best, least = first[where], np.inf
    for gamma in _FIRST_GAMMAS if free[6] else (1.0,):
        begin = first.copy()
        begin[6] = gamma
        found = least_squares(
            errors,
            begin[where],
            bounds=(lower[where], upper[where]),
            x_scale=np.maximum(begin[where], 1e-6),
            max_nfev=_MOST_EVALUATIONS,
            ftol=1e-6,
        )
        if found.cost < least * (1 - 1e-9):
            best, least = found.x, float(found.cost)
    return whole(best)
