"""Where a run keeps what its controller knows, and how the next ``fit`` of the run finds it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from rex_ray.hosting.kept_text import put_text, stored_text, write_whole
from rex_ray.worker.saving.store import Store

__all__ = ["MEMORY_FILE", "earlier_memory", "put_memory", "write_memory"]

logger = logging.getLogger("rex_ray")

MEMORY_FILE: Final = "controller.memory"
"""In a run's ``rex_ray`` folder."""


def write_memory(run_dir: Path, memory: str) -> None:
    """Write it; whoever reads meanwhile, or after a crash, finds the old file or the new one, whole.

    Raises:
        OSError: the disk refuses.
    """
    write_whole(run_dir / MEMORY_FILE, memory)


def put_memory(store: Store, memory: str) -> None:
    """Put it into the storage of a run whose own folder is on the driver's machine alone.

    Raises:
        Exception: the storage's, whatever its client raises.
    """
    put_text(store, MEMORY_FILE, memory)


def earlier_memory(run_dir: Path, store: Store | None = None) -> str | None:
    """Return what the controller of an earlier ``fit`` of the run knew; None where there was none.

    One that cannot be read is said and left alone: the controller learns anew.

    Args:
        run_dir: the run's ``rex_ray`` folder on this machine.
        store: of the run, for a driver that is on another machine than last time.
    """
    own = run_dir / MEMORY_FILE
    try:
        if own.is_file():
            return own.read_text(encoding="utf-8")
        return stored_text(store, MEMORY_FILE)
    except Exception as error:  # noqa: BLE001 - a storage's client raises what it likes
        logger.warning("what the controller knew before is not used: %s; it learns anew", error)
    return None
