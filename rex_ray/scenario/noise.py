"""Step-to-step noise of a worker's own time.

Public measurements: a dedicated GPU's own time has an sd of 1 %; on shared clusters about 4 %, with a lag-1
autocorrelation of .6 to .9 (Alibaba Cluster Trace Program). Noise that remembers is what makes naive tests cry
wolf, so the emulated kind has to remember as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rex_ray.core.errors import ConfigError
from rex_ray.core.types import FloatArray, frozen, read_only

__all__ = ["NoiseModel", "RecordedNoise"]

# Steps drawn at once. The autoregression of a block starts from a whole block of earlier innovations, which
# forgets its own start (0.9 ** 256 = 2e-12): so any step can be asked for without those before it.
_BLOCK = 256
_NOISE_STREAM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseModel:
    """Factor on an own time: ``(1 + AR(1)) * spike``, times ``first_step_factor`` on the first step.

    Attributes:
        sd: marginal relative sd of the autoregression; 0 is exactly quiet.
        rho: its lag-1 autocorrelation, ``0 <= rho <= 0.9``.
        spike_probability: chance of an isolated spike per step.
        spike_factor: how much longer a step with a spike takes.
        first_step_factor: how much longer the first step takes (cuDNN autotuning: 9 to 10).
    """

    sd: float = 0.0
    rho: float = 0.6
    spike_probability: float = 0.0
    spike_factor: float = 2.0
    first_step_factor: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.sd < 0.3 and 0 <= self.rho <= 0.9 and 0 <= self.spike_probability <= 1):
            raise ConfigError(f"noise needs 0 <= sd < 0.3, 0 <= rho <= 0.9 and a probability of spikes, got {self}")
        if not (0 < self.spike_factor < math.inf and 0 < self.first_step_factor < math.inf):
            raise ConfigError(f"noise needs positive and finite factors, got {self}")

    @classmethod
    def quiet(cls) -> NoiseModel:
        """No noise at all."""
        return cls()

    @classmethod
    def dedicated(cls) -> NoiseModel:
        """A machine of one's own: sd 1 %."""
        return cls(sd=0.01)

    @classmethod
    def shared(cls) -> NoiseModel:
        """A shared cluster: sd 4 %, and one step in 200 takes twice as long (an assumption)."""
        return cls(sd=0.04, spike_probability=0.005)

    def factor(self, seed: int, rank: int, step: int) -> float:
        """Return the factor of one step; the same whatever else was asked for before."""
        first = self.first_step_factor if step == 0 else 1.0
        if self.sd == 0 and self.spike_probability == 0:
            return first
        block, offset = divmod(step, _BLOCK)
        return first * float(_block_factors(self, seed, rank, block)[offset])

    def factors(self, seed: int, rank: int, start: int, stop: int) -> FloatArray:
        """Return the factors of steps ``start`` to ``stop - 1``, shape ``[stop - start]``, as ``factor`` gives them."""
        if self.sd == 0 and self.spike_probability == 0:
            result = np.ones(stop - start)
        else:
            block, offset = divmod(start, _BLOCK)
            end = stop - start + offset
            # Most stretches lie within one block, whose factors need no copy.
            result = _block_factors(self, seed, rank, block)
            if end > _BLOCK:
                further = range(block + 1, -(-stop // _BLOCK))
                result = np.concatenate([result, *(_block_factors(self, seed, rank, other) for other in further)])
            result = result[offset:end]
        if start == 0 and self.first_step_factor != 1:
            result = result.copy()
            result[:1] *= self.first_step_factor
        return result


@dataclass(frozen=True, slots=True, eq=False)
class RecordedNoise:
    """One worker's noise as a trace recorded it, over and over.

    Attributes:
        values: factor per step, shape ``[steps]``; seed and rank have no say in it.
        offset: which of them is the first step's.
    """

    values: FloatArray
    offset: int = 0

    def __post_init__(self) -> None:
        if self.values.size == 0 or not (np.isfinite(self.values) & (self.values > 0)).all():
            raise ConfigError("recorded noise needs at least one factor, all of them positive and finite")

    def factor(self, seed: int, rank: int, step: int) -> float:
        """Return the factor of one step."""
        del seed, rank
        return float(self.values[(step + self.offset) % self.values.size])

    def factors(self, seed: int, rank: int, start: int, stop: int) -> FloatArray:
        """Return the factors of steps ``start`` to ``stop - 1``, shape ``[stop - start]``."""
        del seed, rank
        result: FloatArray = self.values[(np.arange(start, stop) + self.offset) % self.values.size]
        return result


@lru_cache(maxsize=1024)
def _block_factors(noise: NoiseModel, seed: int, rank: int, block: int) -> FloatArray:
    """Return the factors of one block of steps, shape ``[_BLOCK]``."""
    (before, _), (now, chances) = _drawn(seed, rank, block - 1), _drawn(seed, rank, block)
    wander = np.convolve(np.concatenate([before[1:], now]), _response(noise.rho), mode="valid")
    spikes = chances < noise.spike_probability
    # Clipped at 3 sd below: a Gaussian tail must not become a step that takes no time.
    factors = (1 + noise.sd * np.maximum(wander, -3.0)) * np.where(spikes, noise.spike_factor, 1.0)
    return read_only(factors, np.float64)


@lru_cache(maxsize=16)
def _response(rho: float) -> FloatArray:
    """Return what an innovation is worth to the steps from its own on, shape ``[_BLOCK]``."""
    response: FloatArray = np.sqrt(1 - rho**2) * rho ** np.arange(_BLOCK)
    return frozen(response)


@lru_cache(maxsize=1024)
def _drawn(seed: int, rank: int, block: int) -> tuple[FloatArray, FloatArray]:
    """Return a block's innovations and its chances of spikes; a block needs its own and those of the one before."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, _NOISE_STREAM, rank, block + 1))))
    return frozen(generator.standard_normal(_BLOCK)), frozen(generator.random(_BLOCK))
