"""A save's manifest: what belongs to the save, and how to tell that it is whole.

It is written last, so a save without one was never finished. It holds the size and the SHA-256 of every other file, and
a checksum of itself. That finds what a crash, a full disk or a careless copy did; it is no signature: whoever can
write to the storage can make a save that is accepted, but not one that runs code (``torch.load(weights_only=True)``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from rex_ray.core.errors import StorageError

__all__ = ["FORMAT", "MANIFEST", "FileFacts", "Manifest", "decode", "encode"]

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """What a file of a save must be.

    Attributes:
        num_bytes: its size.
        sha256: its digest, in hex.
    """

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a save says of itself.

    Attributes:
        name: of its folder; a folder under another name is not this save.
        generation: the group that made it.
        num_ranks: size of that group.
        epoch: epoch to go on in.
        cursor: samples of it that are consumed.
        step: next optimizer step.
        parts: what the state holds, e.g. ``("allocation", "model", "optimizer")``.
        files: every other file of the save by its name.
    """

    name: str
    generation: str
    num_ranks: int
    epoch: int
    cursor: int
    step: int
    parts: tuple[str, ...]
    files: Mapping[str, FileFacts]


def encode(manifest: Manifest) -> bytes:
    """Return the manifest's text."""
    document = {"format": FORMAT, **asdict(manifest), "parts": list(manifest.parts)}
    return json.dumps({**document, "checksum": _checksum(document)}, indent=1).encode()


def decode(data: bytes) -> Manifest:
    """Read a manifest's text back.

    Raises:
        StorageError: it is not a whole manifest of this format; the message says why.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"its {MANIFEST} is no JSON text") from error
    if not isinstance(document, dict):
        raise StorageError(f"its {MANIFEST} holds no mapping")
    checksum = document.pop("checksum", None)
    if checksum is None or checksum != _checksum(document):
        raise StorageError(f"its {MANIFEST} does not agree with its own checksum")
    if (found := document.pop("format", None)) != FORMAT:
        raise StorageError(f"it has format {found!r}, and this version of rex_ray reads format {FORMAT}")
    return _manifest(document)


def _manifest(document: dict[str, Any]) -> Manifest:
    texts = {name: document.pop(name, None) for name in ("name", "generation")}
    counts = {name: document.pop(name, None) for name in ("num_ranks", "epoch", "cursor", "step")}
    parts, files = document.pop("parts", None), document.pop("files", None)
    sound = (
        not document
        and all(isinstance(text, str) for text in texts.values())
        and all(_is_count(count) for count in counts.values())
        and isinstance(parts, list)
        and all(isinstance(part, str) for part in parts)
        and isinstance(files, dict)
        and all(_are_facts(facts) for facts in files.values())
    )
    if not sound:
        raise StorageError(f"the fields of its {MANIFEST} are not those of a manifest")
    return Manifest(
        **texts, **counts, parts=tuple(parts), files={name: FileFacts(**facts) for name, facts in files.items()}
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_facts(facts: object) -> bool:
    return (
        isinstance(facts, dict)
        and set(facts) == {"num_bytes", "sha256"}
        and _is_count(facts["num_bytes"])
        and isinstance(facts["sha256"], str)
    )


def _checksum(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
