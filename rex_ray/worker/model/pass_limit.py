"""How many rows one forward and backward pass may have on this worker, learnt from passes that ran out of memory."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["PassLimit"]

MARGIN = 0.9
"""No pass is tried above this part of what failed: what is free is not the same at every step."""

PATIENCE_STEPS = 128
"""Clean steps before a pass is tried that would save one, whose failure costs one slow step."""


@dataclass(slots=True, kw_only=True)
class PassLimit:
    """Cuts a share into passes that fit.

    Attributes:
        fewest: rows that a pass should have at least, where the share has them.
        most: rows that a pass may have; None: nothing ever failed.
        fails_at: fewest rows at which a pass ran out of memory.
    """

    fewest: int = 1
    most: int | None = None
    fails_at: int | None = None
    _ran: int = field(default=0, repr=False)
    _num_clean: int = field(default=0, repr=False)

    def bounds(self, num_rows: int, start: int = 0) -> list[int]:
        """Return where rows ``start`` to ``num_rows`` are cut: nearly equal passes, as few as fit; one for no rows."""
        rows = num_rows - start
        count = 1 if self.most is None else max(min(-(-rows // self.most), rows // self.fewest), 1)
        return [start + rows * i // count for i in range(count + 1)]

    def ran(self, num_rows: int, num_passes: int, longest: int) -> None:
        """A share of ``num_rows`` rows went well, the longest of its passes being ``longest`` rows."""
        if self.most is None or self.fails_at is None:
            return
        self._ran = max(self._ran, longest)
        self._num_clean += 1
        if num_passes > 1 and self._num_clean >= PATIENCE_STEPS:
            longer = -(-num_rows // (num_passes - 1))
            if longer <= MARGIN * self.fails_at:
                self.most, self._num_clean = max(self.most, longer), 0

    def failed(self, num_rows: int) -> bool:
        """A pass of ``num_rows`` rows ran out of memory; return whether it can be cut smaller."""
        self.fails_at = num_rows if self.fails_at is None else min(self.fails_at, num_rows)
        self._num_clean = 0
        if self._ran >= num_rows:
            self._ran = 0
        # Back to what is known to run, else by half: each further failure would have the other ranks wait again.
        self.most = max(self._ran, num_rows // 2, 1)
        return num_rows >= 2 * self.fewest
