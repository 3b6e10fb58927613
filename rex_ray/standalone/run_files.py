"""What a launch finds and leaves in its output folder, beside the saves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rex_ray.core.errors import ConfigError
from rex_ray.hosting.journal_files import new_journal_dir
from rex_ray.hosting.profile_files import write_whole
from rex_ray.worker.saving.store import cause_of

__all__ = ["LAUNCH_FILE", "digest_of", "journal_of_launch", "launch_ended"]

LAUNCH_FILE: Final = "launch.json"
"""In the run's ``rex_ray`` folder: whose journal lies there, as long as it has not ended."""


def digest_of(settings: Mapping[str, Any]) -> str:
    """Return what two equal configurations have in common, and two others have not."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=repr).encode()).hexdigest()


def journal_of_launch(run_dir: Path, identity: str, digest: str) -> Path:
    """Return the directory of the journal to write.

    The ranks that torchrun starts again go on with their journal, as one run; another launch begins a new one.

    Args:
        run_dir: the run's ``rex_ray`` folder.
        identity: of the launch.
        digest: of its configuration.

    Raises:
        ConfigError: the folder cannot be used.
    """
    now = {"launch": identity, "config": digest}
    journal = run_dir / "journal"
    try:
        if journal.is_dir() and _read(run_dir / LAUNCH_FILE) == now:
            return journal
        run_dir.mkdir(parents=True, exist_ok=True)
        journal = new_journal_dir(run_dir)
        write_whole(run_dir / LAUNCH_FILE, json.dumps(now))
    except OSError as error:
        raise ConfigError(
            f"output={run_dir.parent} cannot be used: {cause_of(error)}; give training(output=...) another folder"
        ) from error
    return journal


def launch_ended(run_dir: Path) -> None:
    """Remember that the journal has its end, so that nobody goes on with it."""
    (run_dir / LAUNCH_FILE).unlink(missing_ok=True)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
