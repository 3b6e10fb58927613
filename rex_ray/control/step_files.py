"""The journal's step files: after the magic word follow records of kind, length and CRC-32 of a payload, payload.

A record holds a block of complete steps (``columns``), or a snapshot of the controller and which driver's it is.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from rex_ray.control.codec import CodecError
from rex_ray.control.phases import ControllerState
from rex_ray.control.vocabulary import CODEC

__all__ = [
    "BLOCK",
    "MAGIC",
    "SNAPSHOT",
    "Place",
    "newest_steps_file",
    "pack_block",
    "pack_record",
    "pack_snapshot",
    "payload_at",
    "places",
    "steps_file",
    "steps_files",
    "unpack_block",
    "unpack_snapshot",
]

MAGIC = b"rex_ray steps 1\n"
BLOCK, SNAPSHOT = b"B", b"S"

_HEAD = struct.Struct("<cII")
_NAME = re.compile(r"steps-(\d+)\.bin")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record stands in its file.

    Attributes:
        kind: ``BLOCK`` or ``SNAPSHOT``.
        at: its first byte.
        end: the byte behind its last.
        crc: what its payload's checksum should be.
    """

    kind: bytes
    at: int
    end: int
    crc: int


def steps_file(number: int) -> str:
    """Return the name of the step file with this number, from 1."""
    return f"steps-{number:05d}.bin"


def steps_files(names: Iterable[str]) -> list[str]:
    """Return the step files among these names, oldest first."""
    return sorted(name for name in names if _NAME.fullmatch(name))


def newest_steps_file(names: Iterable[str]) -> int:
    """Return the highest number of a step file among these names, 0 without any: the next driver begins behind it."""
    return max((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), default=0)


def pack_record(kind: bytes, payload: bytes) -> bytes:
    """Write a record."""
    return _HEAD.pack(kind, len(payload), zlib.crc32(payload)) + payload


def places(name: str, data: bytes, ignored: list[str]) -> list[Place]:
    """Return where a file's whole records stand, without reading them; a torn end is told in ``ignored``.

    Raises:
        CodecError: this is no step file.
    """
    found: list[Place] = []
    at = len(MAGIC)
    if not data.startswith(MAGIC):
        if not MAGIC.startswith(data):
            raise CodecError(f"{name} is no step file of a journal")
        at = len(data)
    while at + _HEAD.size <= len(data):
        kind, length, crc = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + length
        if end > len(data):
            break
        found.append(Place(kind, at, end, crc))
        at = end
    if at < len(data):
        ignored.append(f"the last {len(data) - at} bytes of {name}, torn by the end of its driver")
    return found


def payload_at(name: str, data: bytes, place: Place) -> bytes:
    """Return a record's payload.

    Raises:
        CodecError: it is not what was written.
    """
    payload = data[place.at + _HEAD.size : place.end]
    if zlib.crc32(payload) != place.crc:
        raise CodecError(f"{name} is damaged at byte {place.at}: its checksum does not match")
    return payload


def pack_block(noted: list[int], steps: bytes) -> bytes:
    """Put the numbers of the events that have a line before the steps themselves."""
    numbers = json.dumps(noted).encode()
    return struct.pack("<I", len(numbers)) + numbers + steps


def unpack_block(payload: bytes) -> tuple[list[int], bytes]:
    """Undo ``pack_block``."""
    (length,) = struct.unpack_from("<I", payload)
    return json.loads(payload[4 : 4 + length]), payload[4 + length :]


def pack_snapshot(driver: int, state: ControllerState) -> bytes:
    """Write a state, and which driver's it is."""
    snapshot = {"driver": driver, "state": CODEC.encode(state)}
    return zlib.compress(json.dumps(snapshot, separators=(",", ":")).encode(), 6)


def unpack_snapshot(payload: bytes) -> tuple[int, ControllerState | None]:
    """Undo ``pack_snapshot``; None for a state that another version of rex_ray wrote, which needs its code."""
    snapshot = json.loads(zlib.decompress(payload))
    try:
        state = CODEC.decode(snapshot["state"])
    except CodecError:  # its bytes are whole: the checksum was compared
        state = None
    if state is not None and not isinstance(state, ControllerState):
        raise CodecError(f"a snapshot holds a {type(state).__name__} instead of a controller's state")
    return int(snapshot["driver"]), state
