"""Where saves lie: folders of files, each of which appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol

from rex_ray.core.errors import ConfigError, first_line

__all__ = ["LocalStore", "Store", "cause_of", "check_storage"]

_PROBE_BYTES: Final = 4096
_CAUSES: Final = {
    errno.EROFS: "the file system is read-only",
    errno.ENOSPC: "no space is left",
    errno.EDQUOT: "the quota is used up",
    errno.EACCES: "permission is missing",
    errno.EPERM: "permission is missing",
    errno.ENOTDIR: "a part of the path is no folder",
}


class Store(Protocol):
    """A storage, seen from the folder that holds the saves. Every method may raise ``OSError``."""

    def create(self, folder: str, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a new file for writing; it appears under its name when the block ends well, on disk where possible."""
        ...

    def open(self, folder: str, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file for reading."""
        ...

    def folders(self) -> list[str]:
        """Return the names of the folders; none where the storage's own folder is not there yet."""
        ...

    def has(self, folder: str, name: str) -> bool:
        """Whether the file is there."""
        ...

    def remove(self, folder: str) -> None:
        """Remove a folder and what is in it; one that is not there is none."""
        ...

    def path_of(self, folder: str) -> str:
        """Return what a person calls the folder."""
        ...


@dataclass(frozen=True, slots=True)
class LocalStore:
    """A folder of this machine.

    Attributes:
        root: the folder; made with the first save, for nobody else to read.
    """

    root: Path

    @contextlib.contextmanager
    def create(self, folder: str, name: str) -> Iterator[IO[bytes]]:
        """See ``Store``."""
        directory = self.root / folder
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = directory / f"{name}.tmp"
        try:
            with unfinished.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(directory / name)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def open(self, folder: str, name: str) -> IO[bytes]:
        """See ``Store``."""
        return (self.root / folder / name).open("rb")

    def folders(self) -> list[str]:
        """See ``Store``."""
        return [path.name for path in self.root.iterdir() if path.is_dir()] if self.root.is_dir() else []

    def has(self, folder: str, name: str) -> bool:
        """See ``Store``."""
        return (self.root / folder / name).is_file()

    def remove(self, folder: str) -> None:
        """See ``Store``."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.root / folder)

    def path_of(self, folder: str) -> str:
        """See ``Store``."""
        return str(self.root / folder)


def check_storage(store: Store) -> None:
    """Write a small file, read it back and remove it.

    Raises:
        ConfigError: one of these failed; names the path and the cause.
    """
    folder, name, sent = f"rex_ray-probe-{uuid.uuid4().hex[:12]}", "probe", os.urandom(_PROBE_BYTES)
    try:
        try:
            with store.create(folder, name) as file:
                file.write(sent)
            with store.open(folder, name) as file:
                came = file.read()
        finally:
            store.remove(folder)
    except Exception as error:
        raise ConfigError(
            f"the storage {store.path_of('')} cannot be used: {cause_of(error)}; correct it, or give "
            "RunConfig(storage_path=...) another one"
        ) from error
    if came != sent:
        raise ConfigError(
            f"the storage {store.path_of('')} cannot be used: it gives back other bytes than were written; give "
            "RunConfig(storage_path=...) another one"
        )


def cause_of(error: BaseException) -> str:
    """Return what went wrong with a storage, in words where its code is known."""
    code: Any = getattr(error, "errno", None)
    first = first_line(error)
    return f"{_CAUSES[code]} ({first})" if code in _CAUSES else first
