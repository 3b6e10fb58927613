"""A journal's parts, one per driver that wrote it, as far as they were read."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rex_ray.control.codec import CodecError
from rex_ray.control.columns import decode_steps
from rex_ray.control.journal import CHECKSUM, EVENTS_FILE, Entry, Header, read_header
from rex_ray.control.phases import ControllerState
from rex_ray.control.step_files import SNAPSHOT, payload_at, places, unpack_block, unpack_snapshot
from rex_ray.control.vocabulary import CODEC
from rex_ray.core.observations import StepObserved

__all__ = ["Part", "end_of", "joined", "read_lines", "read_steps"]

# How the line of a tick begins after its number, and what none holds that led to something.
_TICK, _NOTES = b'"event":{"$":"Ticked"', b'"notes":'


@dataclass(slots=True)
class Part:
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


def end_of(driver: int, headers: Sequence[Header]) -> int | None:
    """Return where a driver's events end, None if they go on.

    What an earlier driver left behind the event from which a later one was restored never happened.
    """
    return min((later.first_event for later in headers if later.driver > driver), default=None)


def read_lines(data: bytes, ignored: list[str], quiet_before: int = 0) -> list[Part]:
    """Read ``events.jsonl``; each header in it begins a part.

    Args:
        data: its bytes.
        ignored: told what was left out.
        quiet_before: ticks that led to nothing are left out before this event: two a second of a run of days.

    Raises:
        CodecError: damage that no driver's death explains.
    """
    parts: list[Part] = []
    torn: int | None = None
    for number, line in enumerate(map(bytes.rstrip, io.BytesIO(data)), start=1):
        if not line:
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
            parts.append(Part(read_header(record["header"])))
            torn = None
        elif torn is not None:
            raise CodecError(f"{EVENTS_FILE} is damaged: line {torn} is no JSON, but its driver went on writing")
        elif parts:
            event = _number_of(record, number)
            if event >= quiet_before or _TICK not in line or _NOTES in line:
                parts[-1].lines[event] = record
    return parts


def read_steps(name: str, data: bytes, parts: Sequence[Part], ignored: list[str], start: int = 0) -> None:
    """Read a step file's blocks and snapshots into the parts of their drivers.

    Args:
        name: of the file.
        data: its bytes.
        parts: of the journal.
        ignored: told what was left out.
        start: records before this byte are left aside; one that is not must be a snapshot, which says whose it is.

    Raises:
        CodecError: damage that no driver's death explains.
    """
    part: Part | None = None
    for place in places(name, data, ignored):
        if place.at < start:
            continue
        payload = payload_at(name, data, place)
        if place.kind == SNAPSHOT:
            driver, state = unpack_snapshot(payload)
            part = next((p for p in parts if p.header.driver == driver), None)
            if state is None:
                ignored.append(f"a snapshot in {name}: this version of rex_ray has another memory")
            elif part is not None:
                part.snapshots.append((state.num_events, state))
        elif part is not None:
            noted, steps = unpack_block(payload)
            part.noted.update(noted)
            part.steps.update(decode_steps(steps))


def joined(parts: Sequence[Part], ignored: list[str], first: int = 0) -> tuple[Entry, ...]:
    """Return the events of all drivers in order, up to the first that is not whole.

    Args:
        parts: of the journal.
        ignored: told what was left out.
        first: number of the first event that is wanted.

    Raises:
        CodecError: events are missing before a later driver's.
    """
    headers = [part.header for part in parts]
    entries: list[Entry] = []
    for part in parts:
        at, end = first + len(entries), end_of(part.header.driver, headers)
        if at < part.header.first_event:
            raise CodecError(f"events {at} to {part.header.first_event - 1} are missing from the journal")
        while end is None or at < end:
            entry = part.entry(at)
            if entry is None:
                break
            entries.append(entry)
            at += 1
        known = {number for number in (*part.lines, *part.steps) if number >= at}
        if known:
            ignored.append(f"{len(known)} events from {min(known)} on, behind a gap or a restore")
    return tuple(entries)


def _is_unharmed(line: bytes, record: Mapping[str, Any]) -> bool:
    """Whether a line that is JSON is the one that was written; lines of older versions do not tell."""
    return "crc" not in record or record["crc"] == zlib.crc32(line.rpartition(CHECKSUM)[0])


def _number_of(record: dict[str, Any], line: int) -> int:
    if not isinstance(record.get("k"), int):
        raise CodecError(f"{EVENTS_FILE} is damaged: line {line} does not number its event")
    return int(record["k"])
