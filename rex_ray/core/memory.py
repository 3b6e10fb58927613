"""How many rows fit a device: an affine law of peak allocated bytes, learnt per kind of device while training runs.

Activations grow with the rows and everything else (weights, optimizer state, buckets) does not, so two sizes tell
both. A limit is only ever a reason *not* to give a rank rows, so every doubt is settled on the side of fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rex_ray.core.types import IntArray, WorkerSpec, read_only

__all__ = ["FILL", "UNLIMITED", "KindMemory", "MemoryBook"]

FILL = 0.85
"""Share of a device's memory that may be filled by allocations: the rest is the context, fragmentation, the largest
temporary of a kernel that is tried out, and other processes (a choice; the allocated peak knows of none of them)."""

UNLIMITED = 2**40

_EXTRAPOLATION = 2
"""Never more than this multiple of the largest size that was run: an allocator's peak is affine, a kernel's is not."""

_MAX_SIZES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KindMemory:
    """One kind's peaks: the highest seen at up to 8 sizes, sizes increasing."""

    device: str
    num_rows: tuple[int, ...]
    peak_bytes: tuple[int, ...]

    def with_peak(self, num_rows: int, peak_bytes: int) -> KindMemory:
        """Return it with one more observation; of many sizes the outermost and the highest peaks are kept."""
        peaks = dict(zip(self.num_rows, self.peak_bytes, strict=True))
        if peaks.get(num_rows, -1) >= peak_bytes:
            return self
        peaks[num_rows] = peak_bytes
        sizes = sorted(peaks)
        if len(sizes) > _MAX_SIZES:
            # Of the two nearest neighbours the inner one is redundant.
            gaps = np.diff(np.log(sizes))
            at = int(np.argmin(gaps))
            del peaks[sizes[at + 1] if at == 0 else sizes[at]]
            sizes = sorted(peaks)
        return replace(self, num_rows=tuple(sizes), peak_bytes=tuple(peaks[size] for size in sizes))

    def law(self) -> tuple[float, float]:
        """Return ``(fixed, per_row)`` bytes with ``fixed + per_row * rows`` at or above every peak seen.

        One size gives the law without a fixed part, which promises the fewest rows beyond it. More give the least
        squares line, both parts at least 0, lifted to the highest peak.
        """
        rows, peaks = np.array(self.num_rows, dtype=np.float64), np.array(self.peak_bytes, dtype=np.float64)
        if rows.size == 1:
            return 0.0, float(peaks[0] / rows[0])
        centred = rows - rows.mean()
        per_row = max(float(centred @ peaks / (centred @ centred)), 0.0)
        fixed = max(float((peaks - per_row * rows).mean()), 0.0)
        # Through the origin where the line would start below it: then all of it is per row.
        if fixed == 0.0:
            per_row = float((peaks / rows).max())
        return fixed + max(float((peaks - fixed - per_row * rows).max()), 0.0), per_row

    def most_rows(self, memory_bytes: int | None) -> int:
        """Return the most rows that fit so much memory; without it, twice the largest size run."""
        largest = self.num_rows[-1]
        most = _EXTRAPOLATION * largest
        if memory_bytes is None:
            return most
        fixed, per_row = self.law()
        if per_row > 0:
            most = min(most, int((FILL * memory_bytes - fixed) / per_row))
        # What ran fits, whatever a margin says.
        return max(most, largest)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryBook:
    """Peaks per kind, as one immutable value; cheap to show a step that teaches nothing new.

    Attributes:
        devices: kind of device per rank.
        kinds: what is known, sorted by kind.
        last_rows: rows of the newest step that was looked at, shape ``[n]``.
        last_peaks: the highest peaks seen at those rows, shape ``[n]``.
    """

    devices: tuple[str, ...]
    kinds: tuple[KindMemory, ...] = ()
    last_rows: IntArray
    last_peaks: IntArray

    @classmethod
    def empty(cls, devices: Sequence[str], prior: MemoryBook | None = None) -> MemoryBook:
        """Return the book of a new group; peaks of an earlier one are kept per kind."""
        blank = read_only([-1] * len(devices), np.int64)
        kinds = prior.kinds if prior else ()
        return cls(devices=tuple(devices), kinds=kinds, last_rows=blank, last_peaks=blank)

    def observe(self, num_rows: IntArray, peak_bytes: IntArray | None) -> MemoryBook:
        """Return a book that also knows one step's peaks, shape ``[n]``, -1 where unknown; None: all unknown."""
        if peak_bytes is None:
            return self
        same = num_rows == self.last_rows
        if (same & (peak_bytes <= self.last_peaks)).all():
            return self
        news = (num_rows > 0) & (peak_bytes > 0) & ~(same & (peak_bytes <= self.last_peaks))
        kinds = {kind.device: kind for kind in self.kinds}
        for rank in news.nonzero()[0]:
            device = self.devices[rank]
            kind = kinds.get(device, KindMemory(device=device, num_rows=(), peak_bytes=()))
            kinds[device] = kind.with_peak(int(num_rows[rank]), int(peak_bytes[rank]))
        return MemoryBook(
            devices=self.devices,
            kinds=tuple(kinds[device] for device in sorted(kinds)),
            last_rows=read_only(num_rows, np.int64),
            last_peaks=read_only(np.where(same, np.maximum(peak_bytes, self.last_peaks), peak_bytes), np.int64),
        )

    def max_rows(self, workers: Sequence[WorkerSpec]) -> IntArray | None:
        """Return the most rows that fit each rank, shape ``[n]``, ``UNLIMITED`` where nothing is known of its kind.

        None where nothing is known of any, as on CPUs.
        """
        if not self.kinds:
            return None
        known = {kind.device: kind for kind in self.kinds}
        limits: dict[tuple[str, int | None], int] = {}
        for worker in workers:
            key = (worker.device, worker.memory_bytes)
            if key not in limits:
                kind = known.get(worker.device)
                limits[key] = UNLIMITED if kind is None else kind.most_rows(worker.memory_bytes)
        return read_only([limits[worker.device, worker.memory_bytes] for worker in workers], np.int64)
