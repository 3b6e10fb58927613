"""Frames: a length in four bytes, then so many bytes of JSON. No pickle: whoever reaches the port sends anything."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from typing import Final

from rex_ray.control.codec import CodecError, Json
from rex_ray.core.errors import RexError

__all__ = [
    "FIRST_FRAME_BYTES",
    "MOST_FRAME_BYTES",
    "FrameError",
    "frame",
    "parsed",
    "read_frame",
    "receive_frame",
    "send_bytes",
]

MOST_FRAME_BYTES: Final = 16 * 2**20
"""A full outbox, 4096 step records, takes less than one of these 16 MiB; the rest is room for texts."""

FIRST_FRAME_BYTES: Final = 1024
"""So much is read from somebody who has not shown the token."""

_HEAD: Final = struct.Struct(">I")
_CHUNK_BYTES: Final = 2**16


class FrameError(RexError):
    """The peer's: what it sends is no frame of ours. Where the next one begins is not known, so the connection ends."""


def frame(document: Json) -> bytes:
    """Return a document as a frame.

    Raises:
        FrameError: it is too large to be sent.
    """
    data = json.dumps(document, separators=(",", ":")).encode()
    if len(data) > MOST_FRAME_BYTES:
        raise FrameError(f"a message of {len(data)} bytes is above the limit of {MOST_FRAME_BYTES}")
    return _HEAD.pack(len(data)) + data


def parsed(data: bytes) -> Json:
    """Return the document in a frame's bytes.

    Raises:
        CodecError: they are no JSON text.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"a frame holds no JSON text: {error}") from error


async def read_frame(
    reader: asyncio.StreamReader, limit_s: float, idle_s: float | None = None, most_bytes: int = MOST_FRAME_BYTES
) -> bytes:
    """Return the next frame's bytes.

    Args:
        reader: the connection.
        limit_s: of a frame that has begun.
        idle_s: how long it may take to begin; default: the same.
        most_bytes: a larger one is refused before any of it is read.

    Raises:
        TimeoutError: a limit passed.
        FrameError: it is too large.
        asyncio.IncompleteReadError: the peer has left.
    """
    first = await asyncio.wait_for(reader.readexactly(1), limit_s if idle_s is None else idle_s)
    async with asyncio.timeout(limit_s):
        num_bytes = _length(first + await reader.readexactly(_HEAD.size - 1), most_bytes)
        return await reader.readexactly(num_bytes)


def receive_frame(connection: socket.socket, limit_s: float, most_bytes: int = MOST_FRAME_BYTES) -> bytes:
    """Return the next frame's bytes, from a blocking socket.

    Raises:
        TimeoutError: it was not there, whole, within the limit.
        FrameError: it is too large.
        OSError: the connection broke; ``ConnectionError`` where the peer has left.
    """
    deadline = time.monotonic() + limit_s
    num_bytes = _length(_receive(connection, _HEAD.size, deadline), most_bytes)
    return _receive(connection, num_bytes, deadline)


def send_bytes(connection: socket.socket, data: bytes, limit_s: float) -> None:
    """Send all of them within the limit.

    Raises:
        TimeoutError: the peer takes no more.
        OSError: the connection broke.
    """
    connection.settimeout(limit_s)
    connection.sendall(data)


def _length(head: bytes, most_bytes: int) -> int:
    (num_bytes,) = _HEAD.unpack(head)
    if num_bytes > most_bytes:
        raise FrameError(f"a frame of {num_bytes} bytes was announced, and {most_bytes} are the most taken here")
    return int(num_bytes)


def _receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Return so many bytes; memory is taken as they come, not as they are announced."""
    data = bytearray()
    while len(data) < num_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the peer did not answer in time")
        connection.settimeout(left_s)
        chunk = connection.recv(min(num_bytes - len(data), _CHUNK_BYTES))
        if not chunk:
            raise ConnectionError("the peer has closed the connection")
        data += chunk
    return bytes(data)
