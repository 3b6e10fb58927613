"""What rank 0 knows of the controller's allocations, and what it asks next: the judgement of a poller, no thread."""

from __future__ import annotations

from rex_ray.core.types import Allocation
from rex_ray.worker.link import SaveRequest

__all__ = ["Listener"]


class Listener:
    """Keeps the newest allocation and the newest request for a save that were heard of.

    Args:
        known: the allocation that the group joined with; None if nobody answered then.
    """

    def __init__(self, known: Allocation | None) -> None:
        self._known_version = None if known is None else known.version
        self._newest: Allocation | None = None
        self._save: SaveRequest | None = None

    @property
    def known_version(self) -> int | None:
        """What to ask for news beyond; None: the group is still to join."""
        return self._known_version

    @property
    def newest(self) -> Allocation | None:
        """The newest allocation since the group joined, or None; a read of a field."""
        return self._newest

    @property
    def known_save(self) -> int:
        """Number of the newest request for a save that is known."""
        return -1 if self._save is None else self._save.number

    @property
    def save(self) -> SaveRequest | None:
        """The newest request for a save, or None; a read of a field."""
        return self._save

    def hear(self, news: Allocation | SaveRequest | None) -> None:
        """Take an answer in, in whatever order answers come; versions and numbers never fall."""
        if isinstance(news, SaveRequest):
            self._save = news if news.number > self.known_save else self._save
            return
        if news is not None and (self._known_version is None or news.version > self._known_version):
            self._known_version = news.version
            self._newest = news
