"""Virtual time, and chance by name: what one kind of fault draws never moves what another one does."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

__all__ = ["Chance", "Clock"]


class Clock:
    """Events in the order of their virtual times; ties in the order of their making."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num_made = 0

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Have something happen so much later."""
        self._num_made += 1
        heapq.heappush(self._due, (self.now_s + delay_s, self._num_made, act))

    def advance(self) -> None:
        """Let the next event happen."""
        self.now_s, _, act = heapq.heappop(self._due)
        self.num_events += 1
        act()


class Chance:
    """Faults by seed. A kind of fault that is switched off never strikes.

    Args:
        seed: of everything.
        without: kinds of fault that are left out.
    """

    def __init__(self, seed: int, without: frozenset[str] = frozenset()) -> None:
        self._seed = seed
        self._streams: dict[str, random.Random] = {}
        self._without = without
        self.is_calm = False
        self.struck: dict[str, int] = {}

    def of(self, name: str) -> random.Random:
        """Return the stream of this name."""
        if name not in self._streams:
            self._streams[name] = random.Random(f"{self._seed}/{name}")
        return self._streams[name]

    def strikes(self, fault: str, probability: float) -> bool:
        """Whether a fault strikes now."""
        if self.of(fault).random() >= probability or self.is_calm or fault in self._without:
            return False
        self.struck[fault] = self.struck.get(fault, 0) + 1
        return True

    def delay_s(self, fault: str, usual_s: float, late_s: float, probability: float = 0.05) -> float:
        """Return how long a message is under way: mostly short, now and then very long."""
        late = self.strikes(fault, probability)
        return self.of(f"{fault} delay").uniform(0.0, late_s if late else usual_s)
