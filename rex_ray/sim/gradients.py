"""Gradient norms without gradients: draws whose noise scale is known, for what decides on the norms alone.

A group of ``b`` rows sees ``g_i = G + e_i / sqrt(b)`` with ``|G|^2 = 1`` and ``E|e_i|^2 = phi``, so that the noise
scale ``tr(S) / |G|^2`` is ``phi`` rows exactly. Real training differs in that ``phi`` drifts; that is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rex_ray.core.errors import ConfigError
from rex_ray.core.types import FloatArray, frozen

__all__ = ["NoisyGradients"]

# Steps drawn at once. The autoregression of a block starts one block earlier from its stationary law, so that any
# step can be asked for without those before it: every marginal is exact, and what correlation across a border lacks
# is of the order rho ** 32.
_BLOCK = 32
_GRADIENT_STREAM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyGradients:
    """Draws of a step's gradient norms.

    Attributes:
        seed: of every draw; a step's draw does not depend on which others were asked for.
        num_dims: effective dimensions of the noise, ``tr(S)^2 / tr(S^2)``. Few make the norms noisy and skewed; large
            networks have hundreds.
        tail: degrees of freedom of a Student-t radius per group, more than 2; None: normal noise. At 3, the squared
            norms have no finite variance.
        rho: correlation of a group's noise with its noise one step earlier, ``0 <= rho <= 0.9``. Rows drawn afresh
            have none.
    """

    seed: int = 0
    num_dims: int = 64
    tail: float | None = None
    rho: float = 0.0

    def __post_init__(self) -> None:
        if self.num_dims < 1 or not 0 <= self.rho <= 0.9 or not (self.tail is None or self.tail > 2):
            raise ConfigError(
                f"gradient noise needs at least one dimension, 0 <= rho <= 0.9 and more than 2 degrees of freedom, "
                f"got {self}"
            )

    def draw(self, step: int, noise_scale: float, num_rows: Sequence[int]) -> tuple[FloatArray, float]:
        """Return one step's norms, as the workers would measure them.

        Args:
            step: optimizer step.
            noise_scale: ``phi`` in rows at this step.
            num_rows: rows per rank, ``[n]``; a rank without rows has no gradient.

        Returns:
            ``rows_i |g_i|^2`` per rank, shape ``[n]``, and ``|g|^2`` of the row-weighted mean gradient.
        """
        block, offset = divmod(step, _BLOCK)
        noise = _unit_noise(self, len(num_rows), block)[offset]
        weighted, reduced = _norms(noise, noise_scale, np.asarray(num_rows, dtype=np.float64))
        return weighted, float(reduced)

    def draw_runs(
        self, num_runs: int, num_steps: int, noise_scale: npt.ArrayLike, num_rows: npt.ArrayLike
    ) -> tuple[FloatArray, FloatArray]:
        """Return the norms of many independent runs at once, for calibration.

        Args:
            num_runs: independent runs.
            num_steps: consecutive steps of each.
            noise_scale: ``phi``, a number or an array that broadcasts to ``[num_runs, num_steps]``.
            num_rows: rows per rank, shape ``[n]``, the same in all.

        Returns:
            ``rows_i |g_i|^2``, shape ``[num_runs, num_steps, n]``, and ``|g|^2``, shape ``[num_runs, num_steps]``.
        """
        rows = np.asarray(num_rows, dtype=np.float64)
        rng = _generator(self.seed, 0)
        noise = _autoregressive(self, rng.standard_normal((num_steps, num_runs, rows.size, self.num_dims)))
        noise *= _radius(self, rng, (num_steps, num_runs, rows.size))
        return _norms(noise.swapaxes(0, 1), noise_scale, rows)


def _norms(noise: FloatArray, noise_scale: npt.ArrayLike, rows: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Turn unit noise ``[..., n, d]`` (``E|e|^2 = 1``) into the norms of its gradients."""
    scale = np.sqrt(np.asarray(noise_scale, dtype=np.float64))[..., None]
    root = np.sqrt(rows)
    # Along G there is G itself; sqrt(b_i) g_i keeps ranks without rows harmless.
    along = root + scale * noise[..., 0]
    across = np.einsum("...nd,...nd->...n", noise[..., 1:], noise[..., 1:])
    weighted = np.where(rows > 0, along**2 + scale**2 * across, 0.0)
    mean = np.einsum("n,...nd->...d", root, noise) / rows.sum() * scale
    reduced = (1.0 + mean[..., 0]) ** 2 + np.einsum("...d,...d->...", mean[..., 1:], mean[..., 1:])
    return weighted, reduced


# Steps come in order, and a block of a thousand workers takes 16 MiB.
@lru_cache(maxsize=2)
def _unit_noise(gradients: NoisyGradients, num_workers: int, block: int) -> FloatArray:
    """Return one block of steps' noise with ``E|e|^2 = 1``, shape ``[_BLOCK, n, d]``."""
    now = _generator(gradients.seed, block + 1)
    shape = (_BLOCK, num_workers, gradients.num_dims)
    if gradients.rho > 0:
        before = _generator(gradients.seed, block)
        innovations = np.concatenate([before.standard_normal(shape), now.standard_normal(shape)])
        noise = _autoregressive(gradients, innovations)[_BLOCK:]
    else:
        noise = _autoregressive(gradients, now.standard_normal(shape))
    noise *= _radius(gradients, now, shape[:2])
    return frozen(noise)


def _autoregressive(gradients: NoisyGradients, innovations: FloatArray) -> FloatArray:
    """Run AR(1) along the first axis, in place, from its stationary law; scaled to ``E|e|^2 = 1``."""
    innovations /= math.sqrt(gradients.num_dims)
    if gradients.rho > 0:
        fresh = math.sqrt(1 - gradients.rho**2)
        for step in range(1, len(innovations)):
            innovations[step] = gradients.rho * innovations[step - 1] + fresh * innovations[step]
    return innovations


def _radius(gradients: NoisyGradients, rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray | float:
    """Return the factor per group that makes normal noise a multivariate Student t of the same variance."""
    if gradients.tail is None:
        return 1.0
    radius: FloatArray = np.sqrt((gradients.tail - 2) / rng.chisquare(gradients.tail, shape))[..., None]
    return radius


def _generator(seed: int, block: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, _GRADIENT_STREAM, block))))
