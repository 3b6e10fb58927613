"""What a controller can ask its driver to do. A closed union."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rex_ray.core.search_problem import SearchProblem
from rex_ray.core.types import Allocation

__all__ = [
    "ApplyAllocation",
    "CancelSearch",
    "Command",
    "RequestCheckpoint",
    "RequestWorldSize",
    "StartSearch",
    "TellTrial",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyAllocation:
    """Publish an allocation to the workers of ``generation``; publishing the same one again is harmless."""

    generation: str
    allocation: Allocation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSearch:
    """Start a search for a better split. ``search_id`` carries generation, version, batch and kind."""

    search_id: str
    seed: int
    problem: SearchProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class TellTrial:
    """Give a search the measured objective of one of its candidates, and every rank's own time where measured."""

    search_id: str
    trial: int
    objective: float
    own_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelSearch:
    """The search's premise is gone (other batch, other group)."""

    search_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestWorldSize:
    """Ask for another number of workers."""

    num_workers: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCheckpoint:
    """Ask the group to save at its next step boundary.

    ``number`` rises over the whole run, also past a restart of the driver: a request heard twice is one save.
    """

    generation: str
    number: int
    reason: str


Command: TypeAlias = ApplyAllocation | StartSearch | TellTrial | CancelSearch | RequestWorldSize | RequestCheckpoint
