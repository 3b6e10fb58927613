"""Writes the journal of a simulated run, by the very writer that a live driver uses."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rex_ray.control.events import Event
from rex_ray.control.journal import Entry, Header, JournalWriter
from rex_ray.control.replay import controller_for
from rex_ray.core.errors import ConfigError
from rex_ray.hosting.journal_files import append_chunks, new_journal_dir

__all__ = ["make_folder", "write_journal"]


def make_folder(folder: Path) -> None:
    """Make the folder of several runs' journals, before any of them has cost its time.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(f"cannot write journals to {folder}: {why}; choose another --journal") from error


def write_journal(run: Path, header: Header, events: Iterable[Event]) -> Path:
    """Write a run's events with what a fresh controller makes of them: that of the run, since it is deterministic.

    Args:
        run: the run's storage folder; an earlier journal in it steps aside, as a live one would.
        header: under what the controller ran.
        events: every event that it was given, in order.

    Returns:
        The journal's folder.

    Raises:
        ConfigError: the folder cannot be written.
    """
    controller = controller_for(header)
    writer = JournalWriter(header=header, state=controller.state)
    try:
        folder = new_journal_dir(run / "rex_ray")
        append_chunks(folder, writer.flush(controller.state))
        for event in events:
            number = controller.state.num_events
            commands = controller.handle(event)
            writer.record(Entry(number=number, event=event, commands=commands, notes=controller.take_notes()))
            if writer.is_full:
                append_chunks(folder, writer.flush(controller.state))
        append_chunks(folder, writer.flush(controller.state))
    except OSError as error:
        raise ConfigError(f"cannot write the journal {run}: {error.strerror}; choose another --journal") from error
    return folder
