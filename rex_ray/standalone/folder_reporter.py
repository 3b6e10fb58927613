"""Saves of a session in a folder that every machine which may hold rank 0 sees."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rex_ray.core.errors import ConfigError
from rex_ray.worker.saving import archive
from rex_ray.worker.saving.archive import Saved
from rex_ray.worker.saving.manifest import MANIFEST
from rex_ray.worker.saving.patience import asked
from rex_ray.worker.saving.save_names import new_name, newest_number, remove_unfinished, saves_newest_first
from rex_ray.worker.saving.store import LocalStore, Store, cause_of, check_storage

__all__ = ["FolderReporter"]

logger = logging.getLogger("rex_ray")


class FolderReporter:
    """Writes a session's saves into a folder and keeps the newest ones; a ``rex_ray.worker.saving.reporter.Reporter``.

    Args:
        output: the folder.
        num_to_keep: so many of the newest saves are kept; None: all.
        retry_s: how long a save that cannot be read is tried again.
    """

    def __init__(self, output: Path, num_to_keep: int | None, retry_s: float) -> None:
        if num_to_keep is not None and num_to_keep < 1:
            raise ConfigError(f"num_to_keep={num_to_keep} keeps no save to go on from; use 1 or more, or None for all")
        self._store = LocalStore(output)
        self._num_to_keep = num_to_keep
        self._retry_s = retry_s
        self._newest_number: int | None = None
        self._has_written = False
        self._unfinished: tuple[str, ...] = ()

    def check(self) -> None:
        """Try the folder.

        Raises:
            ConfigError: it cannot be used; names path and cause.
        """
        try:
            check_storage(self._store)
        except ConfigError as error:
            cause = cause_of(error.__cause__) if error.__cause__ is not None else "it gives back other bytes"
            raise ConfigError(
                f"output={self._store.path_of('')} cannot be used: {cause}; give training(output=...) another folder"
            ) from error

    def write(self, state: Mapping[str, Any], on_progress: Callable[[], None]) -> None:
        """Write a save; called on rank 0 only."""
        self._has_written = False
        if self._newest_number is None:
            self._newest_number = newest_number(self._store)
            remove_unfinished(self._store, self._unfinished)
            self._unfinished = ()
        self._newest_number += 1
        archive.write(self._store, new_name(self._newest_number), state, on_progress)
        self._has_written = True

    def report(self, metrics: Mapping[str, Any], state: Mapping[str, Any] | None) -> None:
        """Let go of old saves; metrics stand in the journal. No barrier: the ranks have agreed on the save before."""
        del metrics, state
        if self._has_written:
            self._has_written = False
            self._prune()

    def restore(self, on_progress: Callable[[], None]) -> Saved | None:
        """Return the newest whole save, or None at a fresh start; called on rank 0 only.

        Raises:
            StorageError: there are saves, and none is whole.
        """

        def read(store: Store, name: str) -> Saved:
            return asked(lambda: archive.read(store, name, on_progress), self._retry_s, on_progress)

        finished, self._unfinished = asked(self._found, self._retry_s, on_progress)
        return archive.newest_whole(self._store, finished, read)

    def _found(self) -> tuple[list[str], tuple[str, ...]]:
        """Return the saves, newest first, and those that a worker was writing when it died."""
        found = saves_newest_first(self._store)
        unfinished = tuple(name for name in found if not self._store.has(name, MANIFEST))
        return [name for name in found if name not in unfinished], unfinished

    def _prune(self) -> None:
        if self._num_to_keep is None:
            return
        try:
            for name in self._found()[0][self._num_to_keep :]:
                self._store.remove(name)
        except OSError as error:
            logger.warning("old saves in %s cannot be removed: %s", self._store.path_of(""), cause_of(error))
