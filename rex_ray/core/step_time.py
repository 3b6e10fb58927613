"""What is known about the workers' own times: a curve's *shape* per kind of device, a *scale* per worker.

A slowdown changes a worker's scale, not its shape. So what was learnt about a kind survives a slowdown, serves
every worker of the kind, and passes on to the next worker group; forgetting and re-fitting would lose all three.

So that samples from before and after a slowdown stay comparable, they are stored at the scale of their time. That a
scale has changed shows at a size that goes on being run; at a new size it could as well be the shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rex_ray.core.changed import changed
from rex_ray.core.curves import StepTimeCurve
from rex_ray.core.kind_fit import KindFit, LearntShape, SizeMedians, distinct_sizes, fit_kind
from rex_ray.core.median import median
from rex_ray.core.sample_blocks import (
    BLOCK,
    LEVEL_BLOCKS,
    WINDOW,
    compare_blocks,
    follow_drift,
    slot_for,
    whole_blocks,
)
from rex_ray.core.types import FloatArray, IntArray, frozen, read_only

__all__ = ["WINDOW", "LearntShape", "StepTimeBook", "StepTimeCurve"]

MAX_SIZES = 8
"""Distinct sizes remembered per worker."""

RUN = 8
"""Steps of the same rows that are taken in at once; half a block, so that blocks end with a run where ranks agree."""

# An own time outside of a microsecond to a day is a broken clock, not evidence.
_SHORTEST_S, _LONGEST_S = 1e-6, 86_400.0

# A size that was not run for this many samples counts half.
_HALF_LIFE = 64

_NO_RUN: IntArray = read_only([], np.int64)
_NOTHING_WAITS: FloatArray = read_only([], np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTimeBook:
    """Samples of own time per worker and size, as one immutable value; curves are fitted when asked for.

    Plain enough to be written as JSON: strings, integers and read-only arrays. A slot without samples has count 0.

    Attributes:
        devices: kind of device per rank.
        applied_scale: product of the factors given to ``rescale`` or found in the samples, shape ``[n]``; samples are
            stored divided by it.
        num_rows: the size of each slot, shape ``[n, MAX_SIZES]``.
        counts: samples taken at that size, shape ``[n, MAX_SIZES]``.
        last_seen: value of ``num_observed`` when the size was last run, shape ``[n, MAX_SIZES]``.
        recent_s: ring of the newest samples in seconds, shape ``[n, MAX_SIZES, WINDOW]``.
        level_s: mean level of each slot's first ``LEVEL_BLOCKS`` blocks of ``BLOCK`` samples, shape ``[n, MAX_SIZES]``;
            0 before the first.
        newest_s: fading mean of its newest blocks, shape ``[n, MAX_SIZES]``; means nothing where that is 0.
        num_observed: calls of ``observe`` so far that brought a sample.
        learnt: shapes that an earlier worker group left behind.
        run_rows: rows of the newest step if it gave a sample of every rank, shape ``[n]``, else empty.
        waiting_s: own times of further such steps, shape ``[< RUN, n]``, that the fields above do not know yet: what
            has the same rows as the step before it is taken in by the run, at a fraction of the price.
    """

    devices: tuple[str, ...]
    applied_scale: FloatArray
    num_rows: IntArray
    counts: IntArray
    last_seen: IntArray
    recent_s: FloatArray
    level_s: FloatArray
    newest_s: FloatArray
    num_observed: int = 0
    learnt: tuple[LearntShape, ...] = ()
    run_rows: IntArray = field(default_factory=lambda: _NO_RUN)
    waiting_s: FloatArray = field(default_factory=lambda: _NOTHING_WAITS)

    @classmethod
    def empty(cls, devices: tuple[str, ...]) -> StepTimeBook:
        """Return a book in which nothing is known yet of workers on these kinds of device."""
        n = len(devices)
        slots = np.zeros((n, MAX_SIZES), dtype=np.int64)
        return cls(
            devices=devices,
            applied_scale=frozen(np.ones(n)),
            num_rows=frozen(slots),
            counts=frozen(slots.copy()),
            last_seen=frozen(slots.copy()),
            recent_s=frozen(np.zeros((n, MAX_SIZES, WINDOW))),
            level_s=frozen(np.zeros((n, MAX_SIZES))),
            newest_s=frozen(np.zeros((n, MAX_SIZES))),
        )

    def observe(
        self, num_rows: npt.ArrayLike, own_s: npt.ArrayLike, use: npt.NDArray[np.bool_] | None = None
    ) -> StepTimeBook:
        """Return a book that also knows one step.

        Args:
            num_rows: rows per rank, shape ``[n]``; a rank without rows gives no sample.
            own_s: own time in seconds per rank, shape ``[n]``; less than a microsecond, more than a day or NaN gives
                no sample.
            use: which ranks' times are evidence, shape ``[n]``; default all.
        """
        rows = np.asarray(num_rows, dtype=np.int64)
        times = np.asarray(own_s, dtype=np.float64)
        goes_on = self.run_rows.size and (rows == self.run_rows).all()
        # Of steps that go on as before, nearly all are usable whole, and two comparisons say so.
        if not (goes_on and use is None and times.min() >= _SHORTEST_S and times.max() <= _LONGEST_S):
            usable = (rows > 0) & (times >= _SHORTEST_S) & (times <= _LONGEST_S)
            if use is not None:
                usable &= use
            if np.count_nonzero(usable) < rows.size:
                ranks = usable.nonzero()[0]
                return self.settled._take(ranks, rows, times[None])[0] if ranks.size else self
        if goes_on:
            waiting = np.concatenate([self.waiting_s, times[None]]) if len(self.waiting_s) else times[None]
            longer = changed(self, waiting_s=frozen(waiting))
            return longer if len(waiting) < RUN else longer.settled
        book, _ = self.settled._take(np.arange(rows.size), rows, times[None])
        return changed(book, run_rows=read_only(rows, np.int64))

    @property
    def settled(self) -> StepTimeBook:
        """This book with nothing waiting."""
        return _settle(self) if len(self.waiting_s) else self

    def _take(self, ranks: IntArray, rows: IntArray, times: FloatArray) -> tuple[StepTimeBook, int]:
        """Take in samples of ``ranks`` from the first of ``times`` (shape ``[m, n]``), up to the end of a block.

        More than one at a time only where the ranks have run the same rows before.

        Returns:
            The book, and how many of the steps it took in.
        """
        # What changes at every step is copied at every step, the rest where it changes.
        counts, last_seen, recent = self.counts.copy(), self.last_seen.copy(), self.recent_s.copy()
        sizes, level, scale = self.num_rows, self.level_s, self.applied_scale
        newest = self.newest_s
        hits = (sizes[ranks] == rows[ranks, None]) & (counts[ranks] > 0)
        slots = hits.argmax(axis=1)
        is_new = ~hits.any(axis=1)
        if is_new.any():
            sizes, level = sizes.copy(), level.copy()
            for index in is_new.nonzero()[0]:
                rank = int(ranks[index])
                slots[index] = slot = slot_for(sizes[rank], counts[rank], last_seen[rank])
                sizes[rank, slot], counts[rank, slot], level[rank, slot] = rows[rank], 0, 0.0
        seen = counts[ranks, slots]
        returned = last_seen[ranks, slots] < last_seen[ranks].max(axis=1)
        if returned.any():
            seen = np.where(returned, whole_blocks(seen), seen)
        taken = min(len(times), BLOCK - int((seen % BLOCK).max()))
        at_ring = ranks[:, None], slots[:, None], (seen[:, None] + np.arange(taken)) % WINDOW
        recent[at_ring] = times[:taken, ranks].T / scale[ranks, None]
        seen = seen + taken
        counts[ranks, slots] = seen
        last_seen[ranks, slots] = self.num_observed + taken
        full = (seen % BLOCK == 0).nonzero()[0]
        if full.size:
            at = ranks[full], slots[full]
            block = (*(index[:, None] for index in at), (seen[full, None] - 1 - np.arange(BLOCK)) % WINDOW)
            level, scale = level.copy(), scale.copy()
            num_blocks = seen[full] // BLOCK
            level[at], factor = compare_blocks(recent[block], level[at], num_blocks)
            recent[block] /= factor[:, None]
            scale[at[0]] *= factor
            newest = newest.copy()
            newest[at] = level[at]
            if (known := num_blocks > LEVEL_BLOCKS).any():
                at = at[0][known], at[1][known]
                block_s = median(recent[block][known], axis=1)
                newest[at], drift = follow_drift(recent[at], block_s, level[at], self.newest_s[at])
                recent[at] /= drift[:, None]
                scale[at[0]] *= drift
        book = StepTimeBook(
            devices=self.devices,
            applied_scale=frozen(scale),
            num_rows=frozen(sizes),
            counts=frozen(counts),
            last_seen=frozen(last_seen),
            recent_s=frozen(recent),
            level_s=frozen(level),
            newest_s=frozen(newest),
            num_observed=self.num_observed + taken,
            learnt=self.learnt,
        )
        return book, taken

    def rescale(self, rank: int, factor: float) -> StepTimeBook:
        """Return a book in which ``rank`` takes ``factor`` times as long from now on.

        Its samples are kept, but for those of an unfinished block: they are what told the caller, and would tell the
        book the same once more.
        """
        if not 0 < factor < np.inf:
            raise ValueError(f"a scale factor must be positive and finite, got {factor}")
        book = self.settled
        scale, counts = book.applied_scale.copy(), book.counts.copy()
        scale[rank] *= factor
        counts[rank] = whole_blocks(counts[rank])
        return replace(book, applied_scale=frozen(scale), counts=frozen(counts))

    def carry_over(self, devices: tuple[str, ...]) -> StepTimeBook:
        """Return the book of a new worker group: shapes per kind are kept, everything per rank is dropped."""
        return replace(StepTimeBook.empty(devices), learnt=self.shapes)

    @property
    def shapes(self) -> tuple[LearntShape, ...]:
        """What is known of each kind of device, by its name: what the next group, or the next job, begins with."""
        shapes = {shape.device: shape for shape in self.learnt}
        measured = {device for device, counts in zip(self.devices, self.counts, strict=True) if counts.any()}
        # A kind that this group measured nothing of is passed on as it came: fitting a fit again would smooth it away.
        for device, fit in _fit_all(self.settled).items():
            if device in measured:
                shapes[device] = fit.as_learnt(device)
        return tuple(shapes[device] for device in sorted(shapes))

    def with_learnt(self, shapes: Iterable[LearntShape]) -> StepTimeBook:
        """Return a book that also knows what others learnt, of kinds of which it knows nothing itself."""
        known = {shape.device for shape in self.shapes}
        news = [shape for shape in shapes if shape.device not in known]
        if not news:
            return self
        learnt = sorted((*self.learnt, *news), key=lambda shape: shape.device)
        return replace(self, learnt=tuple(learnt))

    @property
    def is_complete(self) -> bool:
        """Whether every rank has a curve: some worker of its kind was measured, now or in an earlier group."""
        known = {shape.device for shape in self.learnt}
        known.update(self.devices[rank] for rank in np.flatnonzero(self.counts.any(axis=1)).tolist())
        return known.issuperset(self.devices)

    def curve(self, rank: int) -> StepTimeCurve:
        """Return the own time of ``rank`` as a function of its rows; fitted once per book and kept.

        Raises:
            ValueError: no worker of its kind was ever measured (``num_sizes`` is 0).
        """
        return self.settled._curve(rank, sum(other == self.devices[rank] for other in self.devices[:rank]))

    def curves(self) -> tuple[StepTimeCurve, ...]:
        """Return every rank's curve; see ``curve``."""
        book = self.settled
        seen: Counter[str] = Counter()
        curves = []
        for rank, device in enumerate(self.devices):
            curves.append(book._curve(rank, seen[device]))
            seen[device] += 1
        return tuple(curves)

    def _curve(self, rank: int, member: int) -> StepTimeCurve:
        """Return the curve of ``rank``, which is the ``member``-th of its kind."""
        device = self.devices[rank]
        fit = _fit_all(self).get(device)
        if fit is None:
            raise ValueError(f"no own time of any {device!r} was measured yet, so rank {rank} has no curve")
        return replace(fit.shape, scale=float(self.applied_scale[rank] * fit.scales[member]))

    def num_sizes(self, rank: int) -> int:
        """Return how many distinct sizes of the rank's kind were measured (near-equal ones count once)."""
        medians = self._medians(self.devices[rank], with_times=False)
        return distinct_sizes(medians.num_rows, medians.weight)[0].size

    def num_samples(self, rank: int) -> int:
        """Return how many samples of this rank itself were taken."""
        return int(self.settled.counts[rank].sum())

    def _medians(self, device: str, *, with_times: bool = True) -> SizeMedians:
        """Condense the samples of one kind to one median per worker and size, the learnt shape as one more worker."""
        members = np.array([rank for rank, kind in enumerate(self.devices) if kind == device], dtype=np.int64)
        who, slot = self.counts[members].nonzero()
        at = members[who], slot
        counts = self.counts[at]
        age = self.num_observed - self.last_seen[at]
        weight = np.minimum(counts, 50.0) * np.maximum(0.5 ** (age / _HALF_LIFE), 0.1)
        samples = np.log(self._samples_with_nan(at)) if with_times else np.zeros((counts.size, WINDOW))
        known = next((shape for shape in self.learnt if shape.device == device), None)
        return SizeMedians.condense(
            members=members.size, who=who, num_rows=self.num_rows[at], weight=weight, log_samples=samples, known=known
        )

    def _samples_with_nan(self, at: tuple[IntArray, IntArray]) -> FloatArray:
        """Return the rings of the given (rank, slot) pairs, shape ``[pairs, WINDOW]``, NaN where not yet filled."""
        filled = np.arange(WINDOW) < self.counts[at][:, None]
        samples: FloatArray = np.where(filled, self.recent_s[at], np.nan)
        return samples


@lru_cache(maxsize=4)
def _settle(book: StepTimeBook) -> StepTimeBook:
    """Take in what waits, once per book; a block that becomes full ends a stretch, since it may move the scale."""
    ranks, waiting, run_rows = np.arange(book.run_rows.size), book.waiting_s, book.run_rows
    while len(waiting):
        book, taken = book._take(ranks, run_rows, waiting)
        waiting = waiting[taken:]
    return changed(book, run_rows=run_rows)


@lru_cache(maxsize=4)
def _fit_all(book: StepTimeBook) -> dict[str, KindFit]:
    """Fit every kind that has evidence. A book compares by identity, so the newest few keep their fits."""
    fits = {device: fit_kind(book._medians(device)) for device in sorted(set(book.devices))}
    return {device: fit for device, fit in fits.items() if fit is not None}
