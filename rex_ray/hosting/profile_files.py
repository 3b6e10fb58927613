"""Where a run keeps its profiles of device kinds, and how the next one finds them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rex_ray.core.errors import ConfigError
from rex_ray.core.kind_profiles import profiles_from_json, profiles_to_json
from rex_ray.core.types import LearntShape
from rex_ray.hosting.kept_text import put_text, stored_text, write_whole
from rex_ray.worker.saving.store import Store

__all__ = ["PROFILES_FILE", "profiles_to_begin_with", "put_profiles", "read_profiles", "write_profiles"]

logger = logging.getLogger("rex_ray")

PROFILES_FILE: Final = "profiles.json"
"""In a run's ``rex_ray`` folder."""


def write_profiles(path: Path, shapes: Iterable[LearntShape]) -> None:
    """Write profiles; whoever reads meanwhile, or after a crash, finds the old file or the new one, whole.

    Raises:
        OSError: the disk refuses.
    """
    write_whole(path, profiles_to_json(shapes))


def put_profiles(store: Store, shapes: Iterable[LearntShape]) -> None:
    """Put profiles into the storage of a run whose own folder is on the driver's machine alone.

    Args:
        store: of the run.
        shapes: what was learnt.

    Raises:
        Exception: the storage's, whatever its client raises.
    """
    put_text(store, PROFILES_FILE, profiles_to_json(shapes))


def read_profiles(source: str | Path) -> tuple[LearntShape, ...]:
    """Read the profiles of a past run.

    Args:
        source: the file, the run's folder, its ``rex_ray`` folder, or one of its journals.

    Raises:
        ConfigError: there are none, or they cannot be read; says where was looked.
    """
    given = Path(source).expanduser()
    places = [given, given / PROFILES_FILE, given / "rex_ray" / PROFILES_FILE, given.parent / PROFILES_FILE]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ConfigError(
            f"learn_from={str(source)!r} holds no profiles: there is neither {places[2]} nor {places[1]}. Give the "
            "folder of a run that has trained under a policy that learns curves, such as 'rex', or leave it out"
        )
    try:
        return profiles_from_json(found.read_bytes())
    except (OSError, ConfigError) as error:
        raise ConfigError(f"learn_from: {found}: {error}") from None


def profiles_to_begin_with(
    learn_from: str | None, run_dir: Path, store: Store | None = None
) -> tuple[LearntShape, ...]:
    """Return what a run knows of kinds of device before its first step.

    A run that is taken up again under its name goes on from its own, if nothing else is asked for; should these be
    unreadable, it says so and learns anew.

    Args:
        learn_from: the user's; None: the run's own.
        run_dir: the run's folder on this machine.
        store: of the run, for a driver that is on another machine than last time.

    Raises:
        ConfigError: what ``learn_from`` names cannot be read.
    """
    if learn_from is not None:
        return read_profiles(learn_from)
    own = run_dir / PROFILES_FILE
    try:
        if own.is_file():
            return read_profiles(own)
        if (stored := stored_text(store, PROFILES_FILE)) is not None:
            return profiles_from_json(stored)
    except Exception as error:  # noqa: BLE001 - a storage's client raises what it likes
        logger.warning("the run's own profiles are not used: %s", error)
    return ()
