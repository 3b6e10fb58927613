"""Saves of a session as Ray Train's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

from rex_ray.core.errors import ConfigError
from rex_ray.train.arrow_store import ArrowStore
from rex_ray.worker.saving import archive
from rex_ray.worker.saving.archive import Saved
from rex_ray.worker.saving.manifest import MANIFEST
from rex_ray.worker.saving.patience import asked
from rex_ray.worker.saving.save_names import (
    is_save,
    new_name,
    newest_first,
    newest_number,
    remove_unfinished,
    saves_newest_first,
)
from rex_ray.worker.saving.store import Store, check_storage

__all__ = ["RayReporter"]

# Ray Train has its list at hand when a group starts; this is for one that has not.
_ASK_LIMIT_S = 10.0


class RayReporter:
    """Writes a session's saves into the run's storage, and has Ray Train know of them as its checkpoints.

    Ray Train would upload a checkpoint inside of ``ray.train.report``, where a failure on rank 0 leaves the other ranks
    in a barrier. So a save is written beforehand, and only one that is there whole is reported.

    Args:
        retry_s: how long a save that cannot be read is tried again.
    """

    def __init__(self, retry_s: float) -> None:
        # Read here, on the thread that Ray Train made for the loop.
        storage = ray.train.get_context().get_storage()
        self._rank = ray.train.get_context().get_world_rank()
        self._store = ArrowStore(storage.storage_filesystem, storage.experiment_fs_path)
        self._retry_s = retry_s
        self._newest_number: int | None = None
        self._written: str | None = None
        self._unfinished: tuple[str, ...] = ()

    def check(self) -> None:
        """Try the storage from this worker's machine.

        Raises:
            ConfigError: it cannot be used; names path and cause.
        """
        check_storage(self._store)

    def write(self, state: Mapping[str, Any], on_progress: Callable[[], None]) -> None:
        """Write a save; called on rank 0 only."""
        self._written = None
        if self._newest_number is None:
            self._newest_number = newest_number(self._store)
            remove_unfinished(self._store, self._unfinished)
            self._unfinished = ()
        self._newest_number += 1
        name = new_name(self._newest_number)
        archive.write(self._store, name, state, on_progress)
        self._written = name

    def report(self, metrics: Mapping[str, Any], state: Mapping[str, Any] | None) -> None:
        """Report metrics, on rank 0 with the save that was just written. A barrier over all ranks."""
        name, self._written = self._written, None
        if state is None or name is None:
            ray.train.report(dict(metrics))
            return
        checkpoint = Checkpoint(self._store.path_of(name), filesystem=self._store.filesystem)
        ray.train.report(dict(metrics), checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    def restore(self, on_progress: Callable[[], None]) -> Saved | None:
        """Return the newest whole save of the run, or None at a fresh start; called on rank 0 only.

        Args:
            on_progress: called whenever the storage answered.

        Raises:
            StorageError: there are saves, and none is whole.
            ConfigError: the run's checkpoints were made by something else.
        """
        reported = _reported()
        found, unfinished = asked(lambda: self._found(reported), self._retry_s, on_progress)
        self._unfinished = unfinished
        ours = {name for name in {*found, *reported} if is_save(name)} - {*unfinished}
        if reported and not ours:
            raise ConfigError(
                f"the checkpoint {self._store.path_of(max(reported))} holds no session; it was not made by "
                "session.report, so give this run another name"
            )

        def read(store: Store, name: str) -> Saved:
            return asked(lambda: archive.read(store, name, on_progress), self._retry_s, on_progress)

        return archive.newest_whole(self._store, newest_first(ours), read)

    def _found(self, reported: set[str]) -> tuple[list[str], tuple[str, ...]]:
        """Return the saves that are there, and those of them that a worker was writing when it died."""
        found = saves_newest_first(self._store)
        return found, tuple(name for name in found if name not in reported and not self._store.has(name, MANIFEST))


def _reported() -> set[str]:
    """Names of the checkpoints that Ray Train knows of."""
    known = [reported.checkpoint for reported in ray.train.get_all_reported_checkpoints(timeout_s=_ASK_LIMIT_S)]
    newest = ray.train.get_checkpoint()
    return {checkpoint.path.rsplit("/", 1)[-1] for checkpoint in [*known, *([newest] if newest else [])]}
