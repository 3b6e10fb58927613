"""Small texts that a run keeps for the next one: in its own folder, and in its storage where that is elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from rex_ray.worker.saving.store import Store

__all__ = ["put_text", "stored_text", "write_whole"]

_FOLDER: Final = "rex_ray"


def write_whole(path: Path, text: str) -> None:
    """Write a text; whoever reads meanwhile, or after a crash, finds the old one or the new one, whole.

    Raises:
        OSError: the disk refuses.
    """
    torn = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torn.write_text(text, encoding="utf-8")
        torn.replace(path)
    except OSError:
        torn.unlink(missing_ok=True)
        raise


def put_text(store: Store, name: str, text: str) -> None:
    """Put a text into the storage of a run whose own folder is on the driver's machine alone.

    Raises:
        Exception: the storage's, whatever its client raises.
    """
    with store.create(_FOLDER, name) as file:
        file.write(text.encode())


def stored_text(store: Store | None, name: str) -> str | None:
    """Return a text from a run's storage, None where there is none.

    Raises:
        Exception: the storage's, whatever its client raises.
    """
    if store is None or not store.has(_FOLDER, name):
        return None
    with store.open(_FOLDER, name) as file:
        text: str = file.read().decode()
    return text
