"""The journal of a run: every event, and what it led to. Encodes and decodes; drivers write and read.

Two kinds of files, both only ever appended to:

``events.jsonl``
    A *header* line per driver (the first one's, and one for each restore), then one line per event that is not a
    complete step, and per step that led to commands or notes::

        {"k": 12, "event": {...}, "commands": [...], "notes": [...], "crc": 305419896}

    The checksum is of what stands before it; lines of older versions have none.

``steps-00001.bin``, ``steps-00002.bin``, ...
    Complete steps in compressed columns (``columns``), ``k`` among them, and snapshots of the controller. Each file
    opens with a snapshot; a new one is begun at the size limit and at a restore. See ``step_files``.

Events are numbered by ``k`` from 0 without gaps. Only the longest gap-free prefix counts: a driver that is killed
loses what it had not written, never the sense of what it had, since commands leave it only after everything up to
their event is written. Steps are written before any line with a later ``k``; their block names the lines that belong
to it, so that a line that was lost with its commands is a gap too.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rex_ray.control.codec import Codec, CodecError
from rex_ray.control.columns import encode_steps
from rex_ray.control.commands import Command
from rex_ray.control.events import Event
from rex_ray.control.notes import Note
from rex_ray.control.phases import ControllerState
from rex_ray.control.step_files import BLOCK, MAGIC, SNAPSHOT, pack_block, pack_record, pack_snapshot, steps_file
from rex_ray.control.vocabulary import CODEC
from rex_ray.core.observations import StepObserved

__all__ = ["EVENTS_FILE", "SCHEMA_VERSION", "Chunk", "Entry", "Header", "Journal", "JournalWriter"]

SCHEMA_VERSION = 1
EVENTS_FILE = "events.jsonl"
CHECKSUM = b',"crc":'

Chunk: TypeAlias = tuple[str, bytes]
"""A file's name and the bytes to append to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Under what a controller ran.

    Attributes:
        seed: seed of every random choice.
        mode: ``"auto"``, ``"advise"`` or ``"off"``.
        policy: the policy's name.
        policy_options: its options.
        environment: versions of numpy, scipy and so on: what the last bits of a figure may depend on.
        first_event: number of the first event under this header; 0 but after a restore.
        driver: how many drivers wrote the journal before.
        schema_version: version of this format.
    """

    seed: int
    mode: str
    policy: str
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    first_event: int = 0
    driver: int = 0
    schema_version: int = SCHEMA_VERSION


_HEADER_CODEC = Codec([Header])


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event, what it led to, and what the controller said about it."""

    number: int
    event: Event
    commands: tuple[Command, ...] = ()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Journal:
    """A journal that was read.

    Attributes:
        headers: one per driver; the first describes the run.
        entries: ``entries[k]`` is event ``k``.
        snapshots: ``(k, state before event k)``, rising.
        ignored: what was left out of the reading (torn ends, events behind a gap), in words.
    """

    headers: tuple[Header, ...]
    entries: tuple[Entry, ...]
    snapshots: tuple[tuple[int, ControllerState], ...]
    ignored: tuple[str, ...] = ()

    @property
    def header(self) -> Header:
        """The first header."""
        return self.headers[0]

    @property
    def events(self) -> tuple[Event, ...]:
        """Every event in order."""
        return tuple(entry.event for entry in self.entries)

    @property
    def notes(self) -> tuple[Note, ...]:
        """Every note in order."""
        return tuple(note for entry in self.entries for note in entry.notes)

    @property
    def commands(self) -> tuple[Command, ...]:
        """Every command in order."""
        return tuple(command for entry in self.entries for command in entry.commands)


@dataclass(slots=True)
class JournalWriter:
    """Turns events and what they led to into chunks for the driver to append.

    Args:
        header: under what the controller runs.
        state: the controller's state before the first event; the first step file opens with it.
        num_files: step files that exist already.
        max_file_bytes: a step file beyond this size is followed by a new one.
        max_block_steps: so many waiting steps are worth a block.
        snapshot_steps: steps between two snapshots: what a restore has to fold at most.
    """

    header: Header
    state: ControllerState
    num_files: int = 0
    max_file_bytes: int = 32 * 2**20
    max_block_steps: int = 512
    snapshot_steps: int = 4096
    _numbers: list[int] = field(default_factory=list, init=False)
    _steps: list[StepObserved] = field(default_factory=list, init=False)
    _noted: list[int] = field(default_factory=list, init=False)
    _lines: list[bytes] = field(default_factory=list, init=False)
    _ready: list[Chunk] = field(default_factory=list, init=False)
    _file_bytes: int = field(default=0, init=False)
    _steps_since_snapshot: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        line = _json_line({"header": _HEADER_CODEC.encode(self.header)})
        # A torn last line of an earlier driver must not swallow this one.
        self._ready.append((EVENTS_FILE, (b"\n" if self.header.driver else b"") + line))

    def record(self, entry: Entry) -> None:
        """Take in an event and what it led to; nothing is lost by not flushing but the driver's memory."""
        event = entry.event
        if isinstance(event, StepObserved):
            if self._steps and not _same_group(self._steps[0], event):
                self._close_block()
            self._numbers.append(entry.number)
            self._steps.append(event)
            if entry.commands or entry.notes:
                self._noted.append(entry.number)
                self._lines.append(_entry_line(entry, with_event=False))
        else:
            self._lines.append(_entry_line(entry, with_event=True))

    @property
    def is_full(self) -> bool:
        """Whether so many steps wait that they should be flushed."""
        return len(self._steps) >= self.max_block_steps

    def flush(self, state: ControllerState) -> tuple[Chunk, ...]:
        """Return everything taken in so far, to be appended in this order before any command leaves the driver.

        Args:
            state: the controller's state now, for the snapshots.
        """
        self._close_block()
        if self._lines:
            self._ready.append((EVENTS_FILE, b"".join(self._lines)))
            self._lines.clear()
        if self._file_bytes >= self.max_file_bytes:
            self._file_bytes = 0
        elif self._file_bytes and self._steps_since_snapshot >= self.snapshot_steps:
            self._append(SNAPSHOT, pack_snapshot(self.header.driver, state))
            self._steps_since_snapshot = 0
        self.state = state
        chunks = tuple(self._ready)
        self._ready.clear()
        return chunks

    def _close_block(self) -> None:
        if not self._steps:
            return
        block = pack_block(self._noted, encode_steps(self._numbers, self._steps))
        if self._file_bytes == 0:
            self.num_files += 1
            self._append_raw(MAGIC)
            self._append(SNAPSHOT, pack_snapshot(self.header.driver, self.state))
            self._steps_since_snapshot = 0
        self._append(BLOCK, block)
        self._steps_since_snapshot += len(self._steps)
        # Lines up to this block's last step follow it; those of later events wait for their own block.
        self._ready.append((EVENTS_FILE, b"".join(self._lines)))
        self._lines.clear()
        self._numbers.clear()
        self._steps.clear()
        self._noted.clear()

    def _append(self, kind: bytes, payload: bytes) -> None:
        self._append_raw(pack_record(kind, payload))

    def _append_raw(self, data: bytes) -> None:
        self._ready.append((steps_file(self.num_files), data))
        self._file_bytes += len(data)


def read_header(data: object) -> Header:
    """Read a header back.

    Raises:
        CodecError: it is none, or a version that this rex_ray does not know.
    """
    header = _HEADER_CODEC.decode(data)
    if not isinstance(header, Header) or header.schema_version > SCHEMA_VERSION:
        version = getattr(header, "schema_version", "?")
        raise CodecError(f"the journal has version {version}, this rex_ray reads up to {SCHEMA_VERSION}: upgrade it")
    return header


def _same_group(first: StepObserved, step: StepObserved) -> bool:
    return first.generation == step.generation and len(first.num_rows) == len(step.num_rows)


def _json_line(data: Mapping[str, object]) -> bytes:
    body = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return body + CHECKSUM + str(zlib.crc32(body)).encode() + b"}\n"


def _entry_line(entry: Entry, *, with_event: bool) -> bytes:
    data: dict[str, object] = {"k": entry.number}
    if with_event:
        data["event"] = CODEC.encode(entry.event)
    if entry.commands:
        data["commands"] = CODEC.encode(entry.commands)
    if entry.notes:
        data["notes"] = CODEC.encode(entry.notes)
    return _json_line(data)
