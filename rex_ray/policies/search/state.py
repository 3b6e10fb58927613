"""What a search part remembers: where a search stands, what searches have cost, which shares were proven."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rex_ray.core.observations import StepObserved
from rex_ray.core.search_problem import SearchKind
from rex_ray.core.types import FloatArray, Problem
from rex_ray.policies.base import Finding

__all__ = [
    "AskedSearch",
    "Candidate",
    "Duel",
    "Patience",
    "Placing",
    "Quest",
    "SearchLedger",
    "SearchState",
    "ShareWatch",
    "Stage",
    "TimedTrial",
    "Vouched",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long something has been waited for, in steps and in their time."""

    steps: int = 0
    waited_s: float = 0.0

    def after(self, step: StepObserved) -> Patience:
        """Return it one step later."""
        return Patience(steps=self.steps + 1, waited_s=self.waited_s + float(step.step_us.max()) * 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShareWatch:
    """How the present shares compare with what the curves promised when they were put in place.

    Attributes:
        predicted_own_s: every rank's own time as predicted before the first step under them, shape ``[n]``; None:
            unknown.
        num_clean: clean steps so far, no further than a judgement needs.
        own_s: own times of the first of them, shape ``[k, n]``, until they are judged; None afterwards and before.
        slowest_s: median own time of the slowest rank, once judged.
        typical_s: every rank's median own time, shape ``[n]``, once judged.
        doubt: standard error of a rank's median, relative, once judged.
        mismatch: relative error of the predicted step time, once judged.
        distortion: largest relative error of any rank's prediction, once judged.
    """

    predicted_own_s: FloatArray | None = None
    num_clean: int = 0
    own_s: FloatArray | None = None
    slowest_s: float | None = None
    typical_s: FloatArray | None = None
    doubt: float = 1.0
    mismatch: float | None = None
    distortion: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Shares with the median own time of their slowest rank."""

    shares: tuple[int, ...]
    slowest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quest:
    """What a measured search is measured against.

    Attributes:
        search_id: whose trials these are.
        incumbent: the shares before it, with their time: what is put back when nothing better is found.
        best: the fastest trial so far.
        mismatch: relative error of the curves.
        worth: what a search may hope for, a fraction of the step time: it limits what trials may cost.
    """

    search_id: str
    incumbent: Candidate
    mismatch: float
    worth: float
    best: Candidate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSearch:
    """A search was asked for, and none of its answers has come; ``worth`` as in ``Quest``."""

    kind: SearchKind
    worth: float = 0.0
    wait: Patience = field(default_factory=Patience)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedTrial:
    """A candidate is put in place and timed; ``trial`` is None while the next one is awaited.

    ``own_s`` holds its clean steps so far, shape ``[k, n]``.
    """

    quest: Quest
    trial: int | None
    shares: tuple[int, ...]
    own_s: FloatArray
    wait: Patience = field(default_factory=Patience)


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """The best candidate and the incumbent run in turn; each finished leg is a tuple of slowest own times.

    Attributes:
        quest: what it is about; ``best`` is the challenger.
        starts: which of the two ran first, ``True`` for the challenger.
        legs: finished legs, in order.
        current: the leg under way.
        wait: how long its shares have not been in place.
    """

    quest: Quest
    starts: bool
    legs: tuple[tuple[float, ...], ...] = ()
    current: tuple[float, ...] = ()
    wait: Patience = field(default_factory=Patience)

    def shares(self) -> tuple[int, ...]:
        """Return what the leg under way runs."""
        assert self.quest.best is not None
        challenger = self.starts ^ (len(self.legs) % 2 == 1)
        return self.quest.best.shares if challenger else self.quest.incumbent.shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Shares that a search ended with are asked for until the group runs them; ``yields``: the split goes first."""

    shares: tuple[int, ...]
    reason: str
    yields: bool = False
    search_id: str | None = None
    predicted_gain: float | None = None
    evidence: Mapping[str, float] = field(default_factory=dict)
    wait: Patience = field(default_factory=Patience)


Stage: TypeAlias = AskedSearch | TimedTrial | Duel | Placing | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vouched:
    """Shares that won by measurement where the curves erred: a prediction alone does not move them.

    Attributes:
        measured: shares and time in the duel.
        margin: fraction by which a prediction must undercut what is measured: as much as the curves have erred.
        recent_s: slowest own times of the newest clean steps.
    """

    measured: Candidate
    margin: float
    recent_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLedger:
    """What searches have cost and when the next may begin. Survives changes of batch and of group.

    Attributes:
        lost_steps: steps' worth of time lost to trials slower than the incumbent.
        next_model_step: first step that may ask for a search on the curves.
        next_measured_step: first step that may ask for a measured one.
        distance: steps to wait after the next search without success; doubles with each.
    """

    lost_steps: float = 0.0
    next_model_step: int = 0
    next_measured_step: int = 0
    distance: int

    def failed(self, kind: SearchKind, step: int, longest: int) -> SearchLedger:
        """Return the ledger after a search that brought nothing: the next one of its kind comes later each time."""
        after = replace(self, distance=min(2 * self.distance, longest))
        if kind == "model":
            return replace(after, next_model_step=step + self.distance)
        return replace(after, next_measured_step=step + self.distance)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchState:
    """A search part's whole memory.

    Attributes:
        problem: the group and its limits.
        ledger: costs and pacing.
        sizes: shares that the group is known to run; None before its first step.
        newest_step: newest step at which something was noted here.
        wants_model: a start, a change of batch or an event has not been followed by a search on the curves yet.
        watch: how the present shares do.
        stage: what is going on; None: nothing.
        vouched: present shares that a measurement speaks for.
        doubts: the curves were far off when they were last compared with what came of them.
        news: a finding that waits for the next step to be told.
    """

    problem: Problem
    ledger: SearchLedger
    sizes: tuple[int, ...] | None = None
    newest_step: int = -1
    wants_model: bool = True
    watch: ShareWatch = field(default_factory=ShareWatch)
    stage: Stage = None
    vouched: Vouched | None = None
    doubts: bool = False
    news: Finding | None = None
