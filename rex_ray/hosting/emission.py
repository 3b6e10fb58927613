"""Carries commands out: allocations to whoever listens, searches to the helper, wishes to the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

from rex_ray.control.commands import (
    ApplyAllocation,
    CancelSearch,
    Command,
    RequestCheckpoint,
    RequestWorldSize,
    StartSearch,
    TellTrial,
)
from rex_ray.core.search_problem import SearchProblem
from rex_ray.core.types import Allocation
from rex_ray.search.protocol import Reply
from rex_ray.worker.link import SaveRequest

__all__ = ["Emission", "Searching"]

logger = logging.getLogger("rex_ray")


class Searching(Protocol):
    """Who carries searches out, and never has anybody wait: see ``SearchHelper``."""

    def start(self, search_id: str, seed: int, problem: SearchProblem) -> None:
        """Begin a search."""
        ...

    def tell(self, search_id: str, trial: int, objective: float, own_s: Sequence[float] = ()) -> None:
        """Give a search the objective of a trial that it asked for."""
        ...

    def cancel(self, search_id: str) -> None:
        """Call a search off."""
        ...

    def poll(self) -> list[Reply]:
        """Return what was said since the last call."""
        ...

    def close(self) -> None:
        """Have no process left."""
        ...


class Emission:
    """Emits commands, each after everything up to its event is in the journal.

    Args:
        on_news: called with every allocation that is published, also with one that was published before.
        make_helper: called when the first search is asked for.
        on_save: called when a save is asked for.
    """

    def __init__(
        self,
        on_news: Callable[[Allocation], None],
        make_helper: Callable[[], Searching],
        on_save: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_news = on_news
        self._on_save = on_save
        self._save: RequestCheckpoint | None = None
        self._make_helper = make_helper
        self._helper: Searching | None = None
        self._newest: ApplyAllocation | None = None

    @property
    def published(self) -> Allocation | None:
        """The allocation that was published last."""
        return None if self._newest is None else self._newest.allocation

    def newer(self, generation: str, version: int) -> Allocation | None:
        """Return what was published last, if it is meant for ``generation`` and newer than ``version``."""
        newest = self._newest
        if newest is None or newest.generation != generation or newest.allocation.version <= version:
            return None
        return newest.allocation

    def newer_save(self, generation: str, number: int) -> SaveRequest | None:
        """Return the newest request for a save, if ``generation`` is asked and it is newer than ``number``."""
        save = self._save
        if save is None or save.generation != generation or save.number <= number:
            return None
        return SaveRequest(number=save.number, reason=save.reason)

    def emit(self, command: Command) -> None:
        """Carry a command out; returns at once."""
        match command:
            case ApplyAllocation(allocation=allocation):
                self._newest = command
                self._on_news(allocation)
            case StartSearch(search_id=search_id, seed=seed, problem=problem):
                self._helper = self._helper or self._make_helper()
                self._helper.start(search_id, seed, problem)
            case TellTrial(search_id=search_id, trial=trial, objective=objective, own_s=own_s):
                if self._helper is not None:
                    self._helper.tell(search_id, trial, objective, own_s)
            case CancelSearch(search_id=search_id):
                if self._helper is not None:
                    self._helper.cancel(search_id)
            case RequestWorldSize(num_workers=num_workers, reason=reason):
                logger.warning("the policy asks for %d workers (%s); resizing is up to you", num_workers, reason)
            case RequestCheckpoint(reason=reason):
                logger.info("a save is asked for: %s", reason)
                self._save = command
                self._on_save()
            case unknown:
                assert_never(unknown)

    def replies(self) -> list[Reply]:
        """Return what searches said since the last call; their limits run out here, too."""
        return [] if self._helper is None else self._helper.poll()

    def dismiss_helper(self) -> None:
        """Have no process left."""
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()
