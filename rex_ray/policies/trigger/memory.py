"""What the slowdown trigger remembers: the newest samples, what they are measured against, and earlier events.

Its parts change at different paces (every step, every eight, at a switch, at an alarm), and a state is a value, so
each pace has a class of its own: a quiet step copies the newest samples and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rex_ray.core.types import BoolArray, FloatArray, IntArray, frozen
from rex_ray.policies.trigger.baseline import BLOCK, Baseline

__all__ = [
    "LONG",
    "NUM_LENGTHS",
    "NUM_RECENT",
    "SETTLING",
    "SHORT",
    "Footing",
    "Limits",
    "Past",
    "TriggerState",
    "Watch",
]

SHORT, LONG = 8, 16
"""Samples in the short and in the long window."""

NUM_RECENT = LONG + BLOCK
"""Newest samples kept: the long window, and the block that waits behind it."""

SETTLING = NUM_RECENT
"""Samples after which a rank's usual time at a new size or speed is known."""

NUM_LENGTHS = 16
"""Newest events whose lengths are kept."""

NUM_VISITED = 8
"""Sizes that each rank is known to have run, as many as the step-time model keeps."""


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
