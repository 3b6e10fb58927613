"""Where metrics and saves go to, and come back from: what a session needs of a training framework's storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rex_ray.worker.saving.archive import Saved

__all__ = ["Reporter"]


class Reporter(Protocol):
    """What ``session.report`` delivers to; in Ray Train this is ``ray.train.report`` and the run's storage.

    Rank 0 alone writes and reads, and the ranks agree on what came of it, so that none of them waits in ``report``
    for one whose storage failed.
    """

    def check(self) -> None:
        """Try the storage; called on rank 0 at a fresh start, before anything is trained.

        Raises:
            ConfigError: it cannot be used; names path and cause.
        """
        ...

    def write(self, state: Mapping[str, Any], on_progress: Callable[[], None]) -> None:
        """Write a save, whole or not at all; called on rank 0, on any thread, and again where it failed.

        Args:
            state: tensors and plain values.
            on_progress: called whenever the storage took something.

        Raises:
            Exception: the storage's, whatever its client raises.
        """
        ...

    def report(self, metrics: Mapping[str, Any], state: Mapping[str, Any] | None) -> None:
        """Deliver metrics, with the save that ``write`` just made of ``state``, if any. A barrier over all ranks."""
        ...

    def restore(self, on_progress: Callable[[], None]) -> Saved | None:
        """Return the newest whole save, or None at a fresh start; called on rank 0, on any thread.

        Args:
            on_progress: called whenever the storage gave something.

        Raises:
            StorageError: there are saves, and none is whole.
            ConfigError: what is there was made by something else.
        """
        ...
