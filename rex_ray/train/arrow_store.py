"""The run's storage, as Ray Train reaches it: a local path, a bucket, or a file system of the user's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow.fs

__all__ = ["ArrowStore", "store_of"]

# What is put there appears at once or not at all; and renaming is copying.
_OBJECT_STORES = ("s3", "gcs", "gs", "abfs", "az")


@dataclass(frozen=True, slots=True)
class ArrowStore:
    """A folder of a pyarrow file system; a ``rex_ray.worker.saving.store.Store``.

    Attributes:
        filesystem: any that Ray Train takes.
        root: path of the folder on it.
    """

    filesystem: Any
    root: str

    @contextlib.contextmanager
    def create(self, folder: str, name: str) -> Iterator[IO[bytes]]:
        """See ``Store``."""
        path = f"{self.path_of(folder)}/{name}"
        self.filesystem.create_dir(self.path_of(folder), recursive=True)
        if self._is_object_store():
            with self.filesystem.open_output_stream(path) as file:
                yield file
            return
        unfinished = f"{path}.tmp"
        with self.filesystem.open_output_stream(unfinished) as file:
            yield file
        self._sync(unfinished)
        self.filesystem.move(unfinished, path)

    def open(self, folder: str, name: str) -> Any:
        """See ``Store``."""
        return self.filesystem.open_input_stream(f"{self.path_of(folder)}/{name}")

    def folders(self) -> list[str]:
        """See ``Store``."""
        selector = pyarrow.fs.FileSelector(self.root, allow_not_found=True, recursive=False)
        found = self.filesystem.get_file_info(selector)
        return [info.base_name for info in found if info.type == pyarrow.fs.FileType.Directory]

    def has(self, folder: str, name: str) -> bool:
        """See ``Store``."""
        info = self.filesystem.get_file_info(f"{self.path_of(folder)}/{name}")
        return bool(info.type == pyarrow.fs.FileType.File)

    def remove(self, folder: str) -> None:
        """See ``Store``."""
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_dir(self.path_of(folder))

    def path_of(self, folder: str) -> str:
        """See ``Store``."""
        return f"{self.root}/{folder}" if folder else self.root

    def _is_object_store(self) -> bool:
        return any(kind in self.filesystem.type_name for kind in _OBJECT_STORES)

    def _sync(self, path: str) -> None:
        """Have a local file on disk before it is given its name."""
        if isinstance(self.filesystem, pyarrow.fs.LocalFileSystem):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def store_of(storage_path: Any, filesystem: Any, name: str) -> ArrowStore:
    """Return the store of the run ``name`` from what a ``RunConfig`` says of it.

    Args:
        storage_path: a path or URI.
        filesystem: a pyarrow file system on which it is a path; None: told by the path.
        name: the run's.
    """
    if filesystem is not None:
        return ArrowStore(filesystem, f"{storage_path}/{name}")
    text = os.fspath(storage_path)
    found, path = pyarrow.fs.FileSystem.from_uri(text if "://" in text else str(Path(text).expanduser().absolute()))
    return ArrowStore(found, f"{path}/{name}")
