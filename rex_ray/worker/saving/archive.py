"""One save as files: written so that it is whole or no save at all, and read so that nothing else is taken for one."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any, Final, cast

import torch

from rex_ray.core.errors import StorageError, first_line
from rex_ray.worker.saving.checking import checked
from rex_ray.worker.saving.manifest import MANIFEST, FileFacts, Manifest, decode, encode
from rex_ray.worker.saving.state import position_of
from rex_ray.worker.saving.store import Store, cause_of

__all__ = ["STATE", "Saved", "newest_whole", "read", "read_manifest", "state_of", "write"]

STATE: Final = "state.pt"
_CHUNK_BYTES: Final = 16 * 2**20
_MOST_MANIFEST_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """A save that was read and found whole.

    Attributes:
        data: its state as it was written; ``state_of`` makes a state of it.
        step: next optimizer step.
        where: what a person calls the place.
        troubles: newer saves that were passed over, and why, one sentence part each.
    """

    data: bytearray
    step: int
    where: str
    troubles: tuple[str, ...] = ()


class _Measured(io.RawIOBase):
    """Passes on what is written, and keeps its size and digest."""

    def __init__(self, file: IO[bytes], on_progress: Callable[[], None]) -> None:
        self._file = file
        self._on_progress = on_progress
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: Any) -> int:
        """Pass on and measure."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            self._file.write(chunk)
            self._digest.update(chunk)
            self._on_progress()
        self._num_bytes += len(view)
        return len(view)

    @property
    def facts(self) -> FileFacts:
        """What was written so far."""
        return FileFacts(num_bytes=self._num_bytes, sha256=self._digest.hexdigest())


def write(store: Store, name: str, state: Mapping[str, Any], on_progress: Callable[[], None] = lambda: None) -> None:
    """Write a state as the save ``name``; its manifest comes last.

    Args:
        store: where to.
        name: of its folder, new in this storage.
        state: what ``Saves`` collected.
        on_progress: called whenever bytes were taken, so that somebody can tell slow from stuck.

    Raises:
        OSError: the storage's; what was written of the save is removed as far as it lets itself.
    """
    try:
        with store.create(name, STATE) as file:
            measured = _Measured(file, on_progress)
            torch.save(dict(state), cast("IO[bytes]", measured))
        position = position_of(state)
        manifest = Manifest(
            name=name,
            generation=state["generation"],
            num_ranks=len(state["rng"]["cpu"]),
            epoch=position.epoch,
            cursor=position.cursor,
            step=position.step,
            parts=tuple(sorted(part for part, value in state.items() if value is not None)),
            files={STATE: measured.facts},
        )
        with store.create(name, MANIFEST) as file:
            file.write(encode(manifest))
    except BaseException:
        _remove_quietly(store, name)
        raise


def read_manifest(store: Store, name: str) -> Manifest:
    """Return the manifest of the save ``name``.

    Raises:
        StorageError: it has none that is whole, or it is the manifest of another save.
        OSError: the storage's.
    """
    try:
        with store.open(name, MANIFEST) as file:
            data = file.read(_MOST_MANIFEST_BYTES)
    except FileNotFoundError:
        raise StorageError(f"its {MANIFEST} is missing, so it was never finished, or was damaged later") from None
    manifest = decode(data)
    if manifest.name != name:
        raise StorageError(f"its {MANIFEST} belongs to {manifest.name}")
    return manifest


def read(store: Store, name: str, on_progress: Callable[[], None] = lambda: None) -> Saved:
    """Read the save ``name`` and check all of it.

    Args:
        store: where it lies.
        name: of its folder.
        on_progress: called whenever bytes came, so that somebody can tell slow from stuck.

    Raises:
        StorageError: it is not whole; the message says what is wrong, not where.
        OSError: the storage's.
    """
    manifest = read_manifest(store, name)
    facts = manifest.files.get(STATE)
    if facts is None:
        raise StorageError(f"its {MANIFEST} names no {STATE}")
    data, digest = bytearray(), hashlib.sha256()
    try:
        with store.open(name, STATE) as file:
            # No more than it may hold: a file of any size may lie there.
            while len(data) <= facts.num_bytes and (chunk := file.read(_CHUNK_BYTES)):
                digest.update(chunk)
                data += chunk
                on_progress()
    except FileNotFoundError:
        raise StorageError(f"its {STATE} is missing") from None
    if len(data) != facts.num_bytes:
        size = f"{len(data)}" if len(data) < facts.num_bytes else f"more than {facts.num_bytes}"
        raise StorageError(f"its {STATE} has {size} bytes where the manifest says {facts.num_bytes}")
    if digest.hexdigest() != facts.sha256:
        raise StorageError(f"its {STATE} has {facts.num_bytes} bytes as it should, but not the ones that were written")
    position = position_of(state_of(data))
    if (position.epoch, position.cursor, position.step) != (manifest.epoch, manifest.cursor, manifest.step):
        raise StorageError(f"its {MANIFEST} and its {STATE} disagree about where training stands")
    return Saved(data=data, step=manifest.step, where=store.path_of(name))


def state_of(data: bytearray) -> dict[str, Any]:
    """Return the state that was written, on the CPU. Runs no code that the data bring along.

    Raises:
        StorageError: the data are no state of a session.
    """
    try:
        state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # what lies there may be anything, and so may what reading it raises
        raise StorageError(f"its {STATE} cannot be read as tensors and plain values: {first_line(error)}") from error
    return checked(state)


def newest_whole(store: Store, names: Iterable[str], read_one: Callable[[Store, str], Saved] = read) -> Saved | None:
    """Return the first of the named saves that is whole.

    Args:
        store: where they lie.
        names: newest first.
        read_one: reads one, perhaps with patience.

    Returns:
        The save, with what was wrong with those before it; None if nothing was named.

    Raises:
        StorageError: some were named, and none is whole.
    """
    troubles: list[str] = []
    for name in names:
        try:
            saved = read_one(store, name)
        except Exception as error:  # noqa: BLE001 - a storage's client raises what it likes
            troubles.append(f"{store.path_of(name)}: {cause_of(error)}")
        else:
            return replace(saved, troubles=tuple(troubles))
    if not troubles:
        return None
    raise StorageError(
        "no save of this run can be read, and training does not begin anew by itself; repair one of them, or give the "
        f"run another name to begin anew: {'; '.join(troubles)}"
    )


def _remove_quietly(store: Store, name: str) -> None:
    """Without a manifest it counts as no save anyway, and the error that is under way says what is wrong."""
    try:
        store.remove(name)
    except Exception:  # noqa: BLE001 - a storage's client raises what it likes
        return
