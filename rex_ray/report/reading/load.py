"""Finds a run's journal on disk and reads it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from rex_ray.control.codec import CodecError
from rex_ray.control.events import GroupStarted
from rex_ray.control.journal import EVENTS_FILE, Journal
from rex_ray.control.reading import read_journal
from rex_ray.core.errors import ConfigError
from rex_ray.hosting.journal_files import read_files
from rex_ray.report.reading.build import build_run
from rex_ray.report.reading.schema import RunData

__all__ = ["find_journal", "load_journal", "load_run", "run_name", "run_of"]

_INSIDE = (Path(), Path("journal"), Path("rex_ray") / "journal")


def find_journal(run: Path) -> Path:
    """Return the journal's folder.

    Args:
        run: a run's storage folder, the ``rex_ray`` folder inside it, or the ``journal`` folder inside that.

    Raises:
        ConfigError: nothing there, no journal in it, or several runs to choose from, which are named.
    """
    if not run.is_dir():
        raise ConfigError(f"{run} is no folder; give a run's storage folder (<storage_path>/<name>)")
    for inside in _INSIDE:
        if (run / inside / EVENTS_FILE).is_file():
            return run / inside
    runs = sorted(path.parents[2] for path in run.glob(f"*/rex_ray/journal/{EVENTS_FILE}"))
    if len(runs) == 1:
        return runs[0] / "rex_ray" / "journal"
    if runs:
        raise ConfigError(f"{run} holds {len(runs)} runs, give one of them: {', '.join(map(str, runs))}")
    raise ConfigError(f"{run} holds no journal (rex_ray/journal/{EVENTS_FILE}); give a run's storage folder")


def run_name(journal_dir: Path) -> str:
    """Return the run's name, that of its storage folder; an earlier journal that stepped aside is told apart.

    It goes into pages and documents, so bytes of a folder's name that are no text are shown as their numbers.
    """
    folder = journal_dir.resolve()
    if folder.parent.name != "rex_ray":
        return _as_text(folder.name)
    name = _as_text(folder.parent.parent.name)
    return name if folder.name == "journal" else f"{name} ({folder.name})"


def load_journal(run: Path) -> Journal:
    """Read a run's journal; see ``find_journal`` for what ``run`` may be.

    Raises:
        ConfigError: no journal is found, or it may not be read.
        CodecError: it is damaged, or newer than this rex_ray; names the folder.
    """
    folder = find_journal(run)
    try:
        files = read_files(folder)
    except OSError as error:
        raise ConfigError(f"cannot read the journal {folder}: {error.strerror}") from error
    try:
        return read_journal(files)
    except CodecError as error:
        raise CodecError(f"{folder}: {error}") from error


def load_run(run: Path) -> RunData:
    """Read a run for its report; see ``load_journal``."""
    return run_of(run, load_journal(run))


def run_of(run: Path, journal: Journal) -> RunData:
    """Return the run that a journal tells of, named after the folder that it was read from."""
    data = build_run(run_name(find_journal(run)), journal.header.policy, _settings(journal), journal.entries)
    return replace(data, notices=data.notices + tuple(f"not read: {what}" for what in journal.ignored))


def _as_text(name: str) -> str:
    return os.fsencode(name).decode("utf-8", errors="backslashreplace")


def _settings(journal: Journal) -> dict[str, str]:
    header = journal.header
    options = ", ".join(f"{name} = {value}" for name, value in header.policy_options.items())
    settings = {"policy": header.policy, "policy options": options or "defaults", "mode": header.mode}
    settings["seed"] = str(header.seed)
    group = next((event for event in journal.events if isinstance(event, GroupStarted)), None)
    if group is not None:
        problem = group.problem
        settings["global batch"] = f"{problem.global_batch_size:,} rows, at most {problem.max_global_batch_size:,}"
        rows = problem.dataset_size
        settings["data set"] = "streams of unknown length" if rows is None else f"{rows:,} rows"
        settings["generation"] = group.generation
    settings["journal"] = f"{len(journal.entries):,} events, version {header.schema_version}"
    if len(journal.headers) > 1:
        settings["controller restored"] = f"{len(journal.headers) - 1} times"
    return settings | dict(header.environment)
