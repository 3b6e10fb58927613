"""How a run's saves are called: ``checkpoint_000012-1f0a9c3d``, numbered in the order in which they were made."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable
from typing import Final

from rex_ray.worker.saving.store import Store, cause_of

__all__ = ["is_save", "new_name", "newest_first", "newest_number", "remove_unfinished", "saves_newest_first"]

logger = logging.getLogger("rex_ray")

_SAVE: Final = re.compile(r"checkpoint_(\d{6,})-[0-9a-f]{8}")


def is_save(name: str) -> bool:
    """Whether a folder is called like a save of ours."""
    return _SAVE.fullmatch(name) is not None


def new_name(number: int) -> str:
    """Return a name that no save has."""
    return f"checkpoint_{number:06d}-{uuid.uuid4().hex[:8]}"


def newest_first(names: Iterable[str]) -> list[str]:
    """Return names of saves, the newest first."""
    return sorted(names, key=_number, reverse=True)


def saves_newest_first(store: Store) -> list[str]:
    """Return the names of a run's saves, finished or not."""
    return newest_first(name for name in store.folders() if is_save(name))


def newest_number(store: Store) -> int:
    """Return the highest number of a run's saves, 0 where there are none."""
    return max(map(_number, saves_newest_first(store)), default=0)


def remove_unfinished(store: Store, names: Iterable[str]) -> None:
    """Remove what a worker was writing when it died; it takes room and does nothing else."""
    for name in names:
        path = store.path_of(name)
        try:
            store.remove(name)
            logger.warning("removed %s, a save that was never finished", path)
        except Exception as error:  # noqa: BLE001 - a storage's client raises what it likes
            logger.warning("%s, a save that was never finished, cannot be removed: %s", path, cause_of(error))


def _number(name: str) -> int:
    matched = _SAVE.fullmatch(name)
    assert matched is not None, "only names of saves come here"
    return int(matched[1])
