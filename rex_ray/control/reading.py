"""Reads a journal back, whatever moment its driver was killed at."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rex_ray.control.codec import CodecError
from rex_ray.control.columns import decode_steps
from rex_ray.control.journal import (
    BLOCK,
    CHECKSUM,
    EVENTS_FILE,
    MAGIC,
    RECORD,
    SNAPSHOT,
    Entry,
    Header,
    Journal,
    read_header,
    unpack_block,
    unpack_snapshot,
)
from rex_ray.control.phases import ControllerState
from rex_ray.control.vocabulary import CODEC
from rex_ray.core.observations import StepObserved

__all__ = ["newest_steps_file", "read_journal"]

_STEPS_FILE = re.compile(r"steps-(\d+)\.bin")


@dataclass(slots=True)
class _Part:
    """What one driver left: its lines and steps by event number, and which lines its steps are owed."""

    header: Header
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    steps: dict[int, StepObserved] = field(default_factory=dict)
    noted: set[int] = field(default_factory=set)
    snapshots: list[tuple[int, ControllerState]] = field(default_factory=list)

    def entry(self, number: int) -> Entry | None:
        """Return an event if it is whole, else None."""
        line = self.lines.get(number, {})
        event = CODEC.decode(line["event"]) if "event" in line else self.steps.get(number)
        if event is None or (number in self.noted and not line):
            return None
        commands, notes = CODEC.decode(line.get("commands", [])), CODEC.decode(line.get("notes", []))
        return Entry(number=number, event=event, commands=commands, notes=notes)


def read_journal(files: Mapping[str, bytes]) -> Journal:
    """Read a journal.

    Args:
        files: contents by name, of ``events.jsonl`` and every ``steps-*.bin``; other names are left aside.

    Raises:
        CodecError: no journal, one of a newer version, or damage other than at an end.
    """
    try:
        return _read(files)
    except CodecError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error, zlib.error) as error:
        # Whole by its checksums, and still not what this version writes: no file of ours.
        raise CodecError(f"the journal holds what no rex_ray wrote: {error!r}") from error


def _read(files: Mapping[str, bytes]) -> Journal:
    ignored: list[str] = []
    parts = _read_lines(files.get(EVENTS_FILE, b""), ignored)
    if not parts:
        raise CodecError(f"{EVENTS_FILE} holds no header: this is no journal, or its driver died at once")
    for name in sorted(name for name in files if _STEPS_FILE.fullmatch(name)):
        _read_steps(name, files[name], parts, ignored)
    entries: list[Entry] = []
    snapshots: list[tuple[int, ControllerState]] = []
    for index, part in enumerate(parts):
        # What an earlier driver left behind the event from which a later one was restored never happened.
        end = min((later.header.first_event for later in parts[index + 1 :]), default=None)
        if len(entries) != part.header.first_event:
            raise CodecError(f"events {len(entries)} to {part.header.first_event - 1} are missing from the journal")
        while end is None or len(entries) < end:
            entry = part.entry(len(entries))
            if entry is None:
                break
            entries.append(entry)
        known = {number for number in (*part.lines, *part.steps) if number >= len(entries)}
        if known:
            ignored.append(f"{len(known)} events from {min(known)} on, behind a gap or a restore")
        snapshots.extend(snapshot for snapshot in part.snapshots if snapshot[0] <= len(entries))
    return Journal(
        headers=tuple(part.header for part in parts),
        entries=tuple(entries),
        snapshots=tuple(snapshots),
        ignored=tuple(ignored),
    )


def _read_lines(data: bytes, ignored: list[str]) -> list[_Part]:
    parts: list[_Part] = []
    torn: int | None = None
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            torn = number
            ignored.append(f"line {number} of {EVENTS_FILE}, torn by the end of its driver")
            continue
        if not isinstance(record, dict):
            raise CodecError(f"{EVENTS_FILE} is damaged: line {number} is no object")
        if not _is_unharmed(line, record):
            raise CodecError(f"{EVENTS_FILE} is damaged: line {number} does not match its checksum")
        if "header" in record:
            parts.append(_Part(read_header(record["header"])))
            torn = None
        elif torn is not None:
            raise CodecError(f"{EVENTS_FILE} is damaged: line {torn} is no JSON, but its driver went on writing")
        elif parts:
            parts[-1].lines[_number_of(record, number)] = record
    return parts


def _is_unharmed(line: bytes, record: Mapping[str, Any]) -> bool:
    """Whether a line that is JSON is the one that was written; lines of older versions do not tell."""
    return "crc" not in record or record["crc"] == zlib.crc32(line.rpartition(CHECKSUM)[0])


def newest_steps_file(files: Iterable[str]) -> int:
    """Return the highest number of a step file among these names, 0 without any: the next driver begins behind it."""
    return max((int(match[1]) for name in files if (match := _STEPS_FILE.fullmatch(name))), default=0)


def _number_of(record: dict[str, Any], line: int) -> int:
    if not isinstance(record.get("k"), int):
        raise CodecError(f"{EVENTS_FILE} is damaged: line {line} does not number its event")
    return int(record["k"])


def _read_steps(name: str, data: bytes, parts: list[_Part], ignored: list[str]) -> None:
    part: _Part | None = None
    for kind, payload in _records(name, data, ignored):
        if kind == SNAPSHOT:
            driver, state = unpack_snapshot(payload)
            part = next((p for p in parts if p.header.driver == driver), None)
            if state is None:
                ignored.append(f"a snapshot in {name}: this version of rex_ray has another memory")
            elif part is not None:
                part.snapshots.append((state.num_events, state))
        elif kind == BLOCK and part is not None:
            noted, steps = unpack_block(payload)
            part.noted.update(noted)
            part.steps.update(decode_steps(steps))


def _records(name: str, data: bytes, ignored: list[str]) -> Iterator[tuple[bytes, bytes]]:
    at = len(MAGIC)
    if not data.startswith(MAGIC):
        if not MAGIC.startswith(data):
            raise CodecError(f"{name} is no step file of a journal")
        at = len(data)
    while at < len(data):
        if at + RECORD.size > len(data):
            break
        kind, length, crc = RECORD.unpack_from(data, at)
        payload = data[at + RECORD.size : at + RECORD.size + length]
        if len(payload) < length:
            break
        if zlib.crc32(payload) != crc:
            raise CodecError(f"{name} is damaged at byte {at}: its checksum does not match")
        yield kind, payload
        at += RECORD.size + length
    if at < len(data):
        ignored.append(f"the last {len(data) - at} bytes of {name}, torn by the end of its driver")
