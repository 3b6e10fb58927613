"""The journal as proof and as memory: the same events give the same commands, and a lost controller comes back."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rex_ray.control.codec import CodecError, Json
from rex_ray.control.controller import Controller
from rex_ray.control.journal import Entry, Header, Journal
from rex_ray.control.outcome import Mode
from rex_ray.control.reading import Recent
from rex_ray.control.vocabulary import CODEC
from rex_ray.core.errors import ConfigError, nearest_name_hint
from rex_ray.policies.base import Policy
from rex_ray.policies.registry import make_policy

__all__ = ["Difference", "ReplayReport", "controller_for", "find_difference", "replay", "restore"]

TOLERANCE = 1e-9
"""Relative: figures within it are the same, whatever machine computed their last bits."""

_MODES: Mapping[str, Mode] = {"auto": "auto", "advise": "advise", "off": "off"}

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The replay of one event led to something else than the journal says."""

    number: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What came of a replay.

    Attributes:
        num_events: events replayed.
        num_commands: commands that the journal holds.
        differences: where commands or notes differ; empty if the journal is true.
        remarks: what may explain a difference or qualify the proof: other versions, ignored ends.
    """

    num_events: int
    num_commands: int
    differences: tuple[Difference, ...]
    remarks: tuple[str, ...]

    @property
    def is_identical(self) -> bool:
        """Whether every command and note came out the same."""
        return not self.differences


def controller_for(header: Header, policy: Policy[Any] | None = None) -> Controller:
    """Build a fresh controller as a header describes it.

    Args:
        header: names policy, seed and mode.
        policy: to use instead of the registered one of that name.

    Raises:
        ConfigError: no such mode, or no policy of that name or with those options.
    """
    if header.mode not in _MODES:
        raise ConfigError(f"unknown mode {header.mode!r}{nearest_name_hint(header.mode, _MODES)}")
    chosen = policy if policy is not None else make_policy(header.policy, header.policy_options)
    return Controller(chosen, seed=header.seed, mode=_MODES[header.mode])


def replay(
    journal: Journal, policy: Policy[Any] | None = None, environment: Mapping[str, str] | None = None
) -> ReplayReport:
    """Run a fresh controller over a journal's events and compare what it commands and notes.

    Integers and names must agree exactly, figures to 1e-9 (relative).

    Args:
        journal: what was recorded.
        policy: see ``controller_for``.
        environment: versions here, to name those that differ from the recorded ones.
    """
    controller = controller_for(journal.header, policy)
    differences: list[Difference] = []
    for entry in journal.entries:
        commands = controller.handle(entry.event)
        notes = controller.take_notes()
        for what, told, recorded in (("commands", commands, entry.commands), ("notes", notes, entry.notes)):
            found = find_difference(CODEC.encode(recorded), CODEC.encode(told), what)
            if found is not None:
                differences.append(Difference(number=entry.number, what=found))
    return ReplayReport(
        num_events=len(journal.entries),
        num_commands=len(journal.commands),
        differences=tuple(differences),
        remarks=(*_other_versions(journal, environment or {}), *(f"ignored: {what}" for what in journal.ignored)),
    )


def restore(recent: Recent, policy: Policy[Any] | None = None, *, must_agree: bool = False) -> Controller:
    """Bring a controller back: its last snapshot, and the events since folded over it.

    What it had published and not seen applied is in ``Controller.unacknowledged``.

    Args:
        recent: what was recorded last.
        policy: see ``controller_for``.
        must_agree: refuse a journal whose last events lead to other commands than they did: whoever goes on from it
            would give versions a second meaning.

    Raises:
        CodecError: an event since the snapshot cannot be handled again, or does not agree.
    """
    controller = controller_for(recent.header, policy)
    if recent.state is not None:
        controller.restore(recent.state)
    for entry in recent.entries:
        _again(controller, entry, must_agree)
    controller.take_notes()
    return controller


def _again(controller: Controller, entry: Entry, must_agree: bool) -> None:
    try:
        commands = controller.handle(entry.event)
    except Exception as error:
        raise CodecError(f"event {entry.number} of the journal cannot be handled again: {error}") from error
    if must_agree and commands != entry.commands:
        found = find_difference(CODEC.encode(entry.commands), CODEC.encode(commands), "commands")
        if found is not None:
            raise CodecError(f"event {entry.number} of the journal does not lead to what it led to: {found}")


def find_difference(recorded: Json, told: Json, path: str) -> str | None:
    """Return where two encoded values differ by more than the tolerance, in words, or None."""
    if isinstance(recorded, dict) and isinstance(told, dict) and recorded.keys() == told.keys():
        pairs = [(recorded[key], told[key], f"{path}.{key}") for key in recorded]
    elif isinstance(recorded, list) and isinstance(told, list) and len(recorded) == len(told):
        pairs = [(old, new, f"{path}[{i}]") for i, (old, new) in enumerate(zip(recorded, told, strict=True))]
    elif _is_same_leaf(recorded, told):
        return None
    else:
        return f"{path}: recorded {_short(recorded)}, now {_short(told)}"
    return next((found for pair in pairs if (found := find_difference(*pair)) is not None), None)


def _is_same_leaf(recorded: Json, told: Json) -> bool:
    if isinstance(recorded, float) and isinstance(told, float):
        return math.isclose(recorded, told, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(recorded, str) and isinstance(told, str) and recorded != told:
        if _NUMBER.sub("#", recorded) != _NUMBER.sub("#", told):
            return False
        numbers = zip(_NUMBER.findall(recorded), _NUMBER.findall(told), strict=True)
        return all(math.isclose(float(a), float(b), rel_tol=TOLERANCE) for a, b in numbers)
    return type(recorded) is type(told) and bool(recorded == told)


def _short(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."


def _other_versions(journal: Journal, here: Mapping[str, str]) -> tuple[str, ...]:
    remarks = []
    for header in journal.headers:
        for name, version in header.environment.items():
            if name in here and here[name] != version:
                remarks.append(f"recorded with {name} {version}, replayed with {here[name]}")
    return tuple(dict.fromkeys(remarks))
