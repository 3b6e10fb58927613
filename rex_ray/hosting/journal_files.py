"""The journal's files, and how a driver appends to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from rex_ray.control.journal import Chunk

__all__ = ["JournalFolder", "JournalStore", "append_chunks", "new_journal_dir", "read_files"]


class JournalStore(Protocol):
    """Where a driver keeps its journal."""

    def read(self) -> Mapping[str, bytes]:
        """Return the files of an earlier life by name; nothing if there was none."""
        ...

    def append(self, chunks: Iterable[Chunk]) -> None:
        """Append chunks in order. Whoever is killed in between has written a prefix of their bytes, and no more."""
        ...


class JournalFolder:
    """A journal in a folder that is there.

    Args:
        directory: of the journal's files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self) -> Mapping[str, bytes]:
        """Return the files by name, each read when it is asked for."""
        return _Files(self._directory)

    def append(self, chunks: Iterable[Chunk]) -> None:
        """Append chunks in order."""
        append_chunks(self._directory, chunks)


class _Files(Mapping[str, bytes]):
    """A folder's files by name. After days they hold more than a host should, and it asks for the newest alone."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names = sorted(path.name for path in directory.iterdir() if path.is_file()) if directory.is_dir() else []

    def __getitem__(self, name: str) -> bytes:
        if name not in self._names:
            raise KeyError(name)
        return (self._directory / name).read_bytes()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def new_journal_dir(run_dir: Path) -> Path:
    """Make the directory of a new journal; one of an earlier ``fit`` of the same run steps aside as ``journal-1``, ...

    A journal ends with its run, so a run that is taken up again under its name begins another one.
    """
    journal = run_dir / "journal"
    if journal.exists():
        number = 1
        while (aside := run_dir / f"journal-{number}").exists():
            number += 1
        journal.rename(aside)
    journal.mkdir(parents=True)
    return journal


def append_chunks(directory: Path, chunks: Iterable[Chunk]) -> None:
    """Append chunks to their files, in order, each handed to the operating system before the next."""
    for name, data in chunks:
        with (directory / name).open("ab") as file:
            file.write(data)


def read_files(directory: Path) -> dict[str, bytes]:
    """Return a journal's files by name; nothing if there is no journal."""
    return dict(_Files(directory))
