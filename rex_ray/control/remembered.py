"""A policy's memory as text, for the next controller of a run: what one ``fit`` knew, the next one begins with.

Within one ``fit`` a controller that is lost comes back from its journal. A new ``fit`` has a journal of its own, and
its first group brings the memory along: so it stands in that journal, and a replay knows it, too.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from typing import Any, Final

from rex_ray.control.codec import CodecError
from rex_ray.control.journal import SCHEMA_VERSION
from rex_ray.control.vocabulary import CODEC
from rex_ray.policies.base import Policy

__all__ = ["memory_text", "remembered"]

_MOST_BYTES: Final = 2**28


def memory_text(policy: Policy[Any], policy_state: object, reference_rows: int) -> str:
    """Return a policy's memory as text of one line; compressed, about 4 kB per worker.

    Args:
        policy: whose memory it is.
        policy_state: the memory.
        reference_rows: global batch that the run began with, which growth counts from.
    """
    document = {
        "schema": SCHEMA_VERSION,
        "policy": _identity(policy),
        "reference_rows": reference_rows,
        "state": CODEC.encode(policy_state),
    }
    return base64.b64encode(zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 6)).decode()


def remembered(policy: Policy[Any], text: str, reference_rows: int) -> object:
    """Return the memory in a text.

    Args:
        policy: who asks; another one's memory, or one under other options, is of no use to it.
        text: as ``memory_text`` wrote it.
        reference_rows: as in ``memory_text``.

    Raises:
        CodecError: it is none, is of another policy, or was written by another version of rex_ray.
    """
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
        document = json.loads(data) if inflater.eof else None
    except (ValueError, zlib.error, RecursionError) as error:
        raise CodecError(f"it is no controller's memory ({error})") from error
    if not isinstance(document, dict) or document.keys() != {"schema", "policy", "reference_rows", "state"}:
        raise CodecError("it is no controller's memory")
    if document["schema"] != SCHEMA_VERSION:
        raise CodecError(f"it has version {document['schema']!r}, this rex_ray reads {SCHEMA_VERSION}")
    if document["policy"] != _identity(policy):
        raise CodecError(f"it is not of policy {policy.name!r} under these options")
    if document["reference_rows"] != reference_rows:
        raise CodecError(f"it is of a run that began with {document['reference_rows']!r} rows, not {reference_rows}")
    return CODEC.decode(document["state"])


def _identity(policy: Policy[Any]) -> str:
    # A policy is a frozen value of plain ones all the way down: it is what it prints.
    return hashlib.sha256(repr(policy).encode()).hexdigest()
