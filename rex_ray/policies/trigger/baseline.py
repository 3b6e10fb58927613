"""What is normal for each rank: where its own times lie, and how far they spread."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rex_ray.core.changed import changed
from rex_ray.core.median import median
from rex_ray.core.types import BoolArray, FloatArray, IntArray, frozen

__all__ = ["BLOCK", "MIN_BLOCKS", "NUM_BLOCKS", "Baseline"]

BLOCK = 8
"""Samples join the baseline in blocks of so many, once they have left the long window unsuspected."""

NUM_BLOCKS = 12
"""Blocks in the baseline window of 96 samples."""

NUM_MEDIANS = 48
"""Medians of blocks kept, of 384 samples. Over 96 samples that remember, a spread has about five independent ones."""

MIN_BLOCKS = 3
"""Blocks before a rank is armed: 24 samples."""

# sd of a sample, and of a median of 8, from a median deviation; and the latter from the former while blocks are few:
# with a lag-1 correlation of .7 a median of 8 has .7 of a sample's sd.
_TO_SD, _BLOCK_SHARE = 1.4826, 0.7

# Unfired exceedances are forgotten with a half-life of about 550 clean samples.
_MEMORY = 0.99


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Baseline:
    """What is normal for each rank.

    Attributes:
        samples: ring of the newest blocks, shape ``[n, NUM_BLOCKS, BLOCK]``.
        medians: ring of the newest blocks' medians, shape ``[n, NUM_MEDIANS]``.
        num_blocks: blocks taken so far, shape ``[n]``.
        centre: median of the window, shape ``[n]``.
        spread: robust sd of one sample, shape ``[n]``.
        block_spread: robust sd of a median of 8, shape ``[n]``.
        data_us: usual time waiting for data in microseconds, shape ``[n]``.
        num_seen: samples seen, fading, shape ``[n]``.
        num_far: of these, samples beyond the fast path's threshold that no alarm explained, shape ``[n]``.
        num_far_pairs: of these, such that followed another, shape ``[n]``.
    """

    samples: FloatArray
    medians: FloatArray
    num_blocks: IntArray
    centre: FloatArray
    spread: FloatArray
    block_spread: FloatArray
    data_us: FloatArray
    num_seen: FloatArray
    num_far: FloatArray
    num_far_pairs: FloatArray

    @classmethod
    def empty(cls, num_workers: int) -> Baseline:
        """Return the baseline of a group that has not run yet."""
        zeros = frozen(np.zeros(num_workers))
        return cls(
            samples=frozen(np.zeros((num_workers, NUM_BLOCKS, BLOCK))),
            medians=frozen(np.zeros((num_workers, NUM_MEDIANS))),
            num_blocks=frozen(np.zeros(num_workers, dtype=np.int64)),
            centre=zeros,
            spread=zeros,
            block_spread=zeros,
            data_us=zeros,
            num_seen=zeros,
            num_far=zeros,
            num_far_pairs=zeros,
        )

    @property
    def is_armed(self) -> BoolArray:
        """Ranks of which enough is known to judge them, shape ``[n]``."""
        armed: BoolArray = self.num_blocks >= MIN_BLOCKS
        return armed

    def window(self, rank: int) -> FloatArray:
        """Return the rank's baseline window, shape ``[<= 96]``."""
        count = min(int(self.num_blocks[rank]), NUM_BLOCKS)
        flat: FloatArray = self.samples[rank, :count].reshape(-1)
        return flat

    def absorb(self, block: FloatArray, data_us: FloatArray, ranks: BoolArray, limit: FloatArray) -> Baseline:
        """Return the baseline that also knows a block of some ranks; one from another speed is left out.

        Args:
            block: samples, shape ``[BLOCK, n]``.
            data_us: time waiting for data, shape ``[BLOCK, n]``.
            ranks: of whom the block counts, shape ``[n]``.
            limit: how far (log) from the centre a block's median may be, shape ``[n]``.
        """
        ordered = np.sort(block, axis=0)
        middle = (ordered[BLOCK // 2 - 1] + ordered[BLOCK // 2]) / 2
        ranks = ranks & (np.abs(middle - self.centre) <= limit)
        who = ranks.nonzero()[0]
        if who.size == 0:
            return self
        samples, medians, num_blocks = self.samples.copy(), self.medians.copy(), self.num_blocks.copy()
        samples[who, num_blocks[who] % NUM_BLOCKS] = ordered[:, who].T
        medians[who, num_blocks[who] % NUM_MEDIANS] = middle[who]
        num_blocks[who] += 1
        flat = samples.reshape(len(samples), -1)
        centre, spread = _centre_and_spread(flat, np.minimum(num_blocks, NUM_BLOCKS) * BLOCK)
        _, of_blocks = _centre_and_spread(medians, np.minimum(num_blocks, NUM_MEDIANS))
        guess = _BLOCK_SHARE * spread
        trust = np.minimum(num_blocks / NUM_BLOCKS, 1.0)
        blocks = np.add.reduce(data_us[:, who], axis=0) / len(data_us)
        usual = self.data_us.copy()
        usual[who] += (blocks - usual[who]) / np.minimum(num_blocks[who], 8)
        return changed(
            self,
            samples=frozen(samples),
            medians=frozen(medians),
            num_blocks=frozen(num_blocks),
            centre=frozen(centre),
            spread=frozen(spread),
            block_spread=frozen(np.maximum(trust * of_blocks + (1 - trust) * guess, 0.35 * spread)),
            data_us=frozen(usual),
            num_seen=frozen(np.where(ranks, _MEMORY * self.num_seen + BLOCK, self.num_seen)),
            num_far=frozen(np.where(ranks, _MEMORY * self.num_far, self.num_far)),
            num_far_pairs=frozen(np.where(ranks, _MEMORY * self.num_far_pairs, self.num_far_pairs)),
        )

    def remember_runs(self, lengths: IntArray) -> Baseline:
        """Return the baseline that also knows of far runs that ended without an alarm, shape ``[n]``, 0: none."""
        return replace(
            self,
            num_far=frozen(self.num_far + lengths),
            num_far_pairs=frozen(self.num_far_pairs + np.maximum(lengths - 1, 0)),
        )


def _centre_and_spread(values: FloatArray, counts: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return each row's median and robust sd over its first ``counts`` values, shape ``[n]``; 0 where there are none.

    ``np.median`` costs ten times as much on so few values.
    """
    if counts.min() >= values.shape[1]:
        middle = median(values, axis=1)
        return middle, _TO_SD * median(np.abs(values - middle[:, None]), axis=1)
    valid = np.arange(values.shape[1]) < counts[:, None]
    centre = _middle(np.where(valid, values, np.inf), counts)
    deviation = np.abs(values - centre[:, None])
    return centre, _TO_SD * _middle(np.where(valid, deviation, np.inf), counts)


def _middle(values: FloatArray, counts: IntArray) -> FloatArray:
    ordered = np.sort(values, axis=1)
    rows = np.arange(len(values))
    some = np.maximum(counts, 1)
    middle = (ordered[rows, (some - 1) // 2] + ordered[rows, some // 2]) / 2
    result: FloatArray = np.where(counts > 0, middle, 0.0)
    return result
