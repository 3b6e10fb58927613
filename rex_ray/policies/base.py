"""The shape of every policy: hyperparameters in the object, memory in the state, observations in, a decision out.

A decision is a *proposal*. A wrapper or the controller may veto or delay it, so nothing in a policy's state may
presume that it was applied until an ``AllocationApplied`` observation says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from rex_ray.core.observations import Observation
from rex_ray.core.search_problem import SearchProblem
from rex_ray.core.types import Allocation, Problem

__all__ = [
    "ChangeGlobalBatch",
    "Decision",
    "Finding",
    "Keep",
    "Part",
    "Policy",
    "Proposal",
    "Reallocate",
    "RequestWorldSize",
    "Search",
    "TellTrial",
]

StateT = TypeVar("StateT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """An allocation that has no version yet; the controller gives it one when it publishes it."""

    local_batch_sizes: tuple[int, ...]
    lr_factor: float = 1.0

    @property
    def global_batch_size(self) -> int:
        """Rows per optimizer step."""
        return sum(self.local_batch_sizes)


Part: TypeAlias = Literal["growth", "split", "trigger", "search"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one part of a method found out and what came of it: for the journal; nobody acts on it.

    Every judgement leaves one, "keep" as well. A part that only advises leaves what it would have done.

    Attributes:
        part: who judged.
        verdict: the outcome in a word or two, stable over repetitions, e.g. ``"keep"`` or ``"noise scale unknown"``:
            the controller notes a finding when its part's verdict changes, and then ever more rarely.
        reason: one plain sentence.
        evidence: named figures: ``p_value``, ``effect``, ``num_samples``, ``noise_scale``, ...
        proposal: what an advising part would have asked for.
        predicted_gain: what that would have saved.
    """

    part: Part
    verdict: str
    reason: str
    evidence: dict[str, float] = field(default_factory=dict)
    proposal: Proposal | None = None
    predicted_gain: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Change nothing, and say why."""

    reason: str
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reallocate:
    """Split the same global batch differently.

    Attributes:
        proposal: the new shares; their sum is the present global batch size.
        reason: one plain sentence.
        predicted_gain: fraction of step time saved, ``1 - T_new / T_now``; None where nothing is predicted.
        evidence: named figures behind the decision (test statistics, predicted times, ...).
        search_id: the search whose trial or result this is. A switch to any other shares ends every search, since
            what it was asked is no longer the question.
        findings: what the parts found out at this observation.
    """

    proposal: Proposal
    reason: str
    predicted_gain: float | None = None
    evidence: dict[str, float] = field(default_factory=dict)
    search_id: str | None = None
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeGlobalBatch:
    """Change the global batch size, and with it the shares and the learning-rate factor; see ``Reallocate``."""

    proposal: Proposal
    reason: str
    predicted_gain: float | None = None
    evidence: dict[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Start a search for better shares."""

    problem: SearchProblem
    reason: str
    evidence: dict[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TellTrial:
    """Give a search the measured objective of one of its trials: log seconds, see ``objective_of``.

    ``own_s``, every rank's own time in seconds, lets the search correct its curves; empty where it was not measured.
    """

    search_id: str
    trial: int
    objective: float
    reason: str
    own_s: tuple[float, ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestWorldSize:
    """Ask for another number of workers."""

    num_workers: int
    reason: str
    findings: tuple[Finding, ...] = ()


Decision: TypeAlias = Keep | Reallocate | ChangeGlobalBatch | Search | TellTrial | RequestWorldSize


class Policy(Protocol, Generic[StateT]):
    """What a controller drives. Implementations are frozen dataclasses of hyperparameters.

    States are frozen dataclasses of plain values, tuples, mappings and read-only arrays, so that a snapshot can be
    written without pickle.
    """

    @property
    def name(self) -> str:
        """The name under which it is configured and journalled, e.g. ``"rex"``."""
        ...

    def init(
        self, problem: Problem, prior: StateT | None = None, current: Allocation | None = None
    ) -> tuple[Proposal, StateT]:
        """Begin with a (new) worker group.

        Args:
            problem: the group and its limits.
            prior: state learnt with an earlier group; what was learnt per device *kind* is carried over, what
                was learnt per *rank* is dropped.
            current: the allocation that training resumes from; its global batch size is kept where the
                group can run it.

        Returns:
            The first shares and the first state.
        """
        ...

    def decide(self, state: StateT, observation: Observation, rng: np.random.Generator) -> tuple[Decision, StateT]:
        """Judge one observation. Pure: the same arguments give the same answer."""
        ...
