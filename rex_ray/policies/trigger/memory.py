"""What the slowdown trigger remembers: the newest samples, what is normal for each rank, and earlier events.

Its parts change at different paces (every step, every eight, at a switch, at an alarm), and a state is a value, so
each pace has a class of its own: a quiet step copies the newest samples and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from rex_ray.core.changed import changed
from rex_ray.core.median import median
from rex_ray.core.types import BoolArray, FloatArray, IntArray, frozen

__all__ = [
    "BLOCK",
    "LONG",
    "MIN_BLOCKS",
    "NUM_BLOCKS",
    "NUM_LENGTHS",
    "NUM_RECENT",
    "SETTLING",
    "SHORT",
    "Baseline",
    "Footing",
    "Limits",
    "Past",
    "TriggerState",
    "Watch",
    "frozen",
]

SHORT, LONG = 8, 16
"""Samples in the short and in the long window."""

BLOCK = 8
"""Samples join the baseline in blocks of so many, once they have left the long window unsuspected."""

NUM_RECENT = LONG + BLOCK
"""Newest samples kept: the long window, and the block that waits behind it."""

SETTLING = NUM_RECENT
"""Samples after which a rank's usual time at a new size or speed is known."""

NUM_BLOCKS = 12
"""Blocks in the baseline window of 96 samples."""

NUM_LENGTHS = 16
"""Newest events whose lengths are kept."""

NUM_VISITED = 8
"""Sizes that each rank is known to have run, as many as the step-time model keeps."""

NUM_MEDIANS = 48
"""Medians of blocks kept, of 384 samples. Over 96 samples that remember, a spread has about five independent ones."""

MIN_BLOCKS = 3
"""Blocks before a rank is armed: 24 samples."""

# sd of a sample, and of a median of 8, from a median deviation; and the latter from the former while blocks are few:
# with a lag-1 correlation of .7 a median of 8 has .7 of a sample's sd.
_TO_SD, _BLOCK_SHARE = 1.4826, 0.7

# Unfired exceedances are forgotten with a half-life of about 550 clean samples.
_MEMORY = 0.99

AnyT = TypeVar("AnyT", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footing:
    """What a sample is measured against under the allocation that runs.

    Attributes:
        version: the allocation's version.
        sizes: its rows, shape ``[n]``.
        reference: log own time in microseconds from which samples are counted, shape ``[n]``. It is frozen while an
            allocation runs: a model that goes on learning would learn the slowdown, too.
        visited: newest distinct sizes that the rank has settled on before, shape ``[n, NUM_VISITED]``; 0: none.
        unsettled: samples still to come before the rank's usual time under these shares is known, shape ``[n]``.
        guess: by how much (log) the expected time may be wrong, where the new size is beyond what the rank has run,
            shape ``[n]``; 0 elsewhere.
        given: 1 for a rank that was given rows, -1 for one that lost some, 0 for others and for those that were suspect
            just before, shape ``[n]``.
        was_falling: the rank's last times before the move were too short for the speed that was known, shape ``[n]``.
        since: clean sample from which on the allocation runs.
    """

    version: int
    sizes: IntArray
    reference: FloatArray
    visited: IntArray
    unsettled: IntArray
    guess: FloatArray
    given: IntArray
    was_falling: BoolArray
    since: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Watch:
    """The newest samples and what they raise suspicion of.

    Attributes:
        recent: newest samples, oldest first, shape ``[NUM_RECENT, 2, n]``: log own time over the reference, and time
            waiting for data in microseconds.
        num_recent: how many of them count for each rank, shape ``[n]``.
        off: consecutive newest samples beyond the rank's threshold, negative below, shape ``[n]``.
        far: the same for the threshold of the fast path, shape ``[n]``.
        hits: consecutive hits of the two-level test, negative below, shape ``[n]``.
        lasting: how long each rank has been off its usual time, a count that odd samples set back, shape ``[n]``.
        suspect: ranks whose newest samples may be of another speed, shape ``[n]``.
        is_quiet: nobody is.
    """

    recent: FloatArray
    num_recent: IntArray
    off: IntArray
    far: IntArray
    hits: IntArray
    lasting: IntArray
    suspect: BoolArray
    is_quiet: bool = True

    @classmethod
    def empty(cls, num_workers: int) -> Watch:
        """Return the watch of a group that has not run yet."""
        zeros = frozen(np.zeros(num_workers, dtype=np.int64))
        return cls(
            recent=frozen(np.zeros((NUM_RECENT, 2, num_workers))),
            num_recent=zeros,
            off=zeros,
            far=zeros,
            hits=zeros,
            lasting=zeros,
            suspect=frozen(np.zeros(num_workers, dtype=np.bool_)),
        )

    def forget(self, ranks: BoolArray, *, keep_samples: bool = False) -> Watch:
        """Return the watch without any suspicion of some ranks, and without their samples."""
        zero = {name: frozen(np.where(ranks, 0, getattr(self, name))) for name in ("off", "far", "hits", "lasting")}
        num_recent = self.num_recent if keep_samples else frozen(np.where(ranks, 0, self.num_recent))
        suspect = frozen(self.suspect & ~ranks)
        quiet = not (suspect.any() or zero["off"].any() or zero["hits"].any())
        return replace(self, num_recent=num_recent, suspect=suspect, is_quiet=quiet, **zero)


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limits:
    """From where on a sample is off, by rank; kept, since they change with the baseline and not with every step.

    Attributes:
        off: log factor of the two-level test, shape ``[n]``; out of reach for a rank that is not armed.
        far: log factor of the fast path, shape ``[n]``.
        far_run: consecutive samples beyond ``far`` that raise the alarm, shape ``[n]``.
    """

    off: FloatArray
    far: FloatArray
    far_run: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Past:
    """Earlier alarms.

    Attributes:
        level: log factor by which each rank is known to be slower than at first, shape ``[n]``.
        began: clean sample at which it became so, shape ``[n]``.
        ended: clean sample at which it last recovered, shape ``[n]``; -1: never.
        hold: samples for which a recovery must have lasted before it is believed, shape ``[n]``.
        lengths: of the newest slowdowns that have ended, in steps.
        lag_steps: steps from an alarm until the shares that it led to were applied, fading mean.
        alarm_step: optimizer step of the newest alarm that has not been followed by new shares; -1: none.
        is_review_due: shares were applied so soon after an alarm that they must have been decided before it.
        quiet_until: clean sample up to which no further alarm is raised.
        said: clean sample of the newest finding about a suspicion.
    """

    level: FloatArray
    began: IntArray
    ended: IntArray
    hold: IntArray
    lengths: tuple[int, ...] = ()
    lag_steps: float = 10.0
    alarm_step: int = -1
    is_review_due: bool = False
    quiet_until: int = 0
    said: int = -1

    @classmethod
    def none(cls, num_workers: int, hold: int, lengths: tuple[int, ...] = ()) -> Past:
        """Return the past of a new group; what an earlier one learnt about the length of events is kept."""
        zeros = np.zeros(num_workers, dtype=np.int64)
        return cls(
            level=frozen(np.zeros(num_workers)),
            began=frozen(zeros),
            ended=frozen(zeros - 1),
            hold=frozen(zeros + hold),
            lengths=lengths,
        )

    def remember(self, lengths: tuple[int, ...]) -> Past:
        """Return the past with the lengths of events that ended before they were answered."""
        return replace(self, lengths=(*self.lengths, *lengths)[-NUM_LENGTHS:])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TriggerState:
    """Everything that the trigger remembers.

    Attributes:
        num_clean: clean samples so far.
        footing: what they are measured against; None before the first.
        watch: the newest ones.
        baseline: what is normal.
        limits: what is not.
        past: what has happened.
    """

    num_clean: int
    footing: Footing | None
    watch: Watch
    baseline: Baseline
    limits: Limits
    past: Past


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
