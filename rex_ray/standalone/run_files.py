"""What a launch finds and leaves in its output folder, beside the saves."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rex_ray.core.errors import ConfigError
from rex_ray.hosting.journal_files import new_journal_dir
from rex_ray.hosting.kept_text import write_whole
from rex_ray.worker.saving.store import cause_of

__all__ = ["LAUNCH_FILE", "LaunchJournal", "digest_of", "journal_of_launch", "launch_ended"]

logger = logging.getLogger("rex_ray")

LAUNCH_FILE: Final = "launch.json"
"""In the run's ``rex_ray`` folder: whose journal lies there, as long as it has not ended."""


def digest_of(settings: Mapping[str, Any]) -> str:
    """Return what two equal configurations have in common, and two others have not."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=repr).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJournal:
    """The journal that a launch writes.

    Attributes:
        directory: of its files.
        run: identity of the run that it tells of: of all lives that write to it, and of no other. The launch's own may
            come again, since the user may name it; what a dead run left in memory must not be taken for another's.
    """

    directory: Path
    run: str


def journal_of_launch(run_dir: Path, identity: str, digest: str) -> LaunchJournal:
    """Return the journal to write.

    The ranks that torchrun starts again go on with their journal, as one run; another launch begins a new one.

    Args:
        run_dir: the run's ``rex_ray`` folder.
        identity: of the launch.
        digest: of its configuration.

    Raises:
        ConfigError: the folder cannot be used.
    """
    now = {"launch": identity, "config": digest}
    try:
        known = _read(run_dir / LAUNCH_FILE)
        run = known.pop("run", None) if isinstance(known, dict) else None
        if known == now and isinstance(run, str) and (run_dir / "journal").is_dir():
            return LaunchJournal(directory=run_dir / "journal", run=run)
        run_dir.mkdir(parents=True, exist_ok=True)
        directory, run = new_journal_dir(run_dir), f"{identity}-{secrets.token_hex(4)}"
        write_whole(run_dir / LAUNCH_FILE, json.dumps({**now, "run": run}))
    except OSError as error:
        raise ConfigError(
            f"output={run_dir.parent} cannot be used: {cause_of(error)}; give training(output=...) another folder"
        ) from error
    return LaunchJournal(directory=directory, run=run)


def launch_ended(run_dir: Path) -> None:
    """Remember that the journal has its end, so that nobody goes on with it. A run that is over cannot fail by it."""
    try:
        (run_dir / LAUNCH_FILE).unlink(missing_ok=True)
    except OSError as error:
        logger.warning(
            "%s cannot be removed (%s); remove it before the same torchrun goes on with this folder",
            run_dir / LAUNCH_FILE,
            cause_of(error),
        )


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
