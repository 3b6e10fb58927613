"""Reads a journal back, whatever moment its driver was killed at: the whole of it, or what the next driver needs."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rex_ray.control.codec import CodecError
from rex_ray.control.events import Event
from rex_ray.control.journal import EVENTS_FILE, Entry, Header, Journal, read_header
from rex_ray.control.notes import Note
from rex_ray.control.parts import Part, end_of, joined, read_lines, read_steps
from rex_ray.control.phases import ControllerState
from rex_ray.control.step_files import SNAPSHOT, payload_at, places, steps_files, unpack_snapshot
from rex_ray.control.vocabulary import CODEC

__all__ = ["Earlier", "Recent", "read_journal", "read_recent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """An event before the snapshot that has a line of its own.

    Attributes:
        number: the event's.
        event: None where it is a complete step, which was not read.
        notes: what the controller said about it.
    """

    number: int
    event: Event | None
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recent:
    """What the next driver needs of a journal. It grows with the run's decisions, not with its steps.

    Attributes:
        headers: one per driver; the first describes the run.
        state: the newest snapshot, None if there is none: then ``entries`` begin with the run.
        entries: every event since.
        earlier: what else has a line, but for ticks that led to nothing.
    """

    headers: tuple[Header, ...]
    state: ControllerState | None
    entries: tuple[Entry, ...]
    earlier: tuple[Earlier, ...] = ()

    @property
    def header(self) -> Header:
        """The first header."""
        return self.headers[0]

    @classmethod
    def of(cls, journal: Journal) -> Recent:
        """Return the same of a journal that was read whole, without what is earlier."""
        first, state = max(journal.snapshots, key=lambda snapshot: snapshot[0], default=(0, None))
        return cls(headers=journal.headers, state=state, entries=journal.entries[first:])


def read_journal(files: Mapping[str, bytes]) -> Journal:
    """Read a journal.

    Args:
        files: contents by name, of ``events.jsonl`` and every ``steps-*.bin``; other names are left aside.

    Raises:
        CodecError: no journal, one of a newer version, or damage other than at an end.
    """
    ignored: list[str] = []
    with _every_fault_named():
        parts = _begun(read_lines(files.get(EVENTS_FILE, b""), ignored))
        for name in steps_files(files):
            read_steps(name, files[name], parts, ignored)
        entries = joined(parts, ignored)
    return Journal(
        headers=tuple(part.header for part in parts),
        entries=entries,
        snapshots=tuple(found for part in parts for found in part.snapshots if found[0] <= len(entries)),
        ignored=tuple(ignored),
    )


def read_recent(files: Mapping[str, bytes]) -> Recent:
    """Read what the next driver needs: lines, the newest snapshot, and complete steps since.

    A snapshot is appended after everything that led to it, so that what comes before need not be read, nor be whole.

    Args:
        files: see ``read_journal``; step files before the newest snapshot are not asked for.

    Raises:
        CodecError: see ``read_journal``; of steps, only damage behind the snapshot.
    """
    ignored: list[str] = []
    with _every_fault_named():
        lines = files.get(EVENTS_FILE, b"")
        newest = _newest_snapshot(files, _headers(lines))
        first = 0 if newest is None else newest.state.num_events
        parts = _begun(read_lines(lines, ignored, quiet_before=first))
        if newest is not None:
            read_steps(newest.name, newest.data, parts, ignored, start=newest.at)
        for name in steps_files(files):
            if newest is None or name > newest.name:
                read_steps(name, files[name], parts, ignored)
        return Recent(
            headers=tuple(part.header for part in parts),
            state=None if newest is None else newest.state,
            entries=joined(parts, ignored, first),
            earlier=tuple(_earlier(parts, first)),
        )


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A snapshot, and where it stands: in which file, at which of its bytes."""

    name: str
    data: bytes
    at: int
    state: ControllerState


def _newest_snapshot(files: Mapping[str, bytes], headers: Sequence[Header]) -> _Snapshot | None:
    drivers = {header.driver for header in headers}
    for name in reversed(steps_files(files)):
        data = files[name]
        for place in reversed([place for place in places(name, data, []) if place.kind == SNAPSHOT]):
            driver, state = unpack_snapshot(payload_at(name, data, place))
            end = end_of(driver, headers)
            if driver in drivers and state is not None and (end is None or state.num_events <= end):
                return _Snapshot(name, data, place.at, state)
    return None


def _headers(lines: bytes) -> list[Header]:
    found = []
    for line in io.BytesIO(lines):
        if line.startswith(b'{"header":'):
            try:
                found.append(read_header(json.loads(line)["header"]))
            except ValueError:  # torn, or damaged; whoever reads the lines one by one says so
                continue
    return found


def _earlier(parts: Sequence[Part], first: int) -> Iterator[Earlier]:
    headers = [part.header for part in parts]
    for part in parts:
        end = end_of(part.header.driver, headers)
        last = first if end is None else min(first, end)
        for number in sorted(number for number in part.lines if number < last):
            line = part.lines[number]
            event = CODEC.decode(line["event"]) if "event" in line else None
            yield Earlier(number=number, event=event, notes=CODEC.decode(line.get("notes", [])))


def _begun(parts: list[Part]) -> list[Part]:
    if not parts:
        raise CodecError(f"{EVENTS_FILE} holds no header: this is no journal, or its driver died at once")
    return parts


@contextmanager
def _every_fault_named() -> Iterator[None]:
    try:
        yield
    except CodecError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error, zlib.error) as error:
        # Whole by its checksums, and still not what this version writes: no file of ours.
        raise CodecError(f"the journal holds what no rex_ray wrote: {error!r}") from error
