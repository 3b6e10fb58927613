"""Ray Train's own list of a run's checkpoints: it is overwritten in place, so a driver that dies may leave half of it.

Ray Train refuses the run's name then. Saves say by themselves which they are, and training goes on from the newest
whole one whatever that list holds; so a list that Ray would refuse is put aside, and Ray begins another one.
"""

from __future__ import annotations

import json
import logging
from typing import Final

from rex_ray.core.errors import ConfigError
from rex_ray.train.arrow_store import ArrowStore
from rex_ray.worker.saving.manifest import MANIFEST
from rex_ray.worker.saving.save_names import saves_newest_first
from rex_ray.worker.saving.store import cause_of

__all__ = ["LIST_FILE", "put_aside_a_damaged_list"]

logger = logging.getLogger("rex_ray")

LIST_FILE: Final = "checkpoint_manager_snapshot.json"
"""In the run's folder; the name is Ray Train's."""

_ASIDE: Final = f"{LIST_FILE}.damaged"


def put_aside_a_damaged_list(store: ArrowStore) -> None:
    """Rename the list if it is torn, or names a checkpoint whose folder is gone.

    Args:
        store: of the run.

    Raises:
        ConfigError: it is damaged, and there is no save to go on from; names the file and the remedy.
    """
    if not store.has("", LIST_FILE):
        return
    path = f"{store.path_of('')}/{LIST_FILE}"
    try:
        damage = _damage_of(store)
        if damage is None:
            return
        if not any(store.has(name, MANIFEST) for name in saves_newest_first(store)):
            raise ConfigError(
                f"Ray Train's list of checkpoints {path} {damage}, and there is no save beside it to go on from: give "
                "RunConfig another name, or remove the folder to begin anew"
            )
        store.filesystem.move(path, f"{store.path_of('')}/{_ASIDE}")
    except OSError as error:
        raise ConfigError(f"Ray Train's list of checkpoints {path} cannot be read: {cause_of(error)}") from error
    logger.warning(
        "%s %s; it is kept as %s, and the run goes on from its newest whole save. Ray Train's num_to_keep counts later "
        "checkpoints only",
        path,
        damage,
        _ASIDE,
    )


def _damage_of(store: ArrowStore) -> str | None:
    """Return why Ray Train would refuse the list, None where it would not."""
    with store.open("", LIST_FILE) as file:
        data = file.read()
    try:
        listed = {str(entry["checkpoint_dir_name"]) for entry in json.loads(data)["checkpoint_results"]}
    except (ValueError, TypeError, LookupError, RecursionError):
        return "is torn"
    gone = sorted(listed - {*store.folders()})
    return f"names checkpoints that are gone ({', '.join(gone)})" if gone else None
