"""When shares are searched for beyond the exact split, and what is believed of the answer.

The exact split is optimal on the curves, so a search *on the curves* can only confirm it, and says so. Where a
prediction and what came of it differ for good, the curves lack a structure (tiles, contention, a loader's limit), and
only measured candidates can tell more: they cost time, and are run within a budget.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace

import numpy as np

from rex_ray.core.observations import AllocationApplied, SearchResult, StepObserved, TrialRequested
from rex_ray.core.types import Problem, read_only
from rex_ray.policies.base import Finding, Proposal, Reallocate, TellTrial
from rex_ray.policies.seams import Model, SearchView
from rex_ray.policies.search.asking import fruitless, limits, rest, wait_for_answer
from rex_ray.policies.search.duel import fight
from rex_ray.policies.search.rules import SearchRules
from rex_ray.policies.search.state import (
    AskedSearch,
    Candidate,
    Duel,
    Patience,
    Placing,
    Quest,
    SearchLedger,
    SearchState,
    ShareWatch,
    Stage,
    TimedTrial,
)
from rex_ray.policies.search.trials import (
    Answer,
    conclude,
    disturb,
    finding,
    no_steps,
    place,
    time_trial,
)

__all__ = ["AxSearch"]

_VOUCH_DRIFT = 1.15
"""Shares that take this many times what they took in the duel run in another world than the one that it judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxSearch:
    """Asks for searches on the curves after a start, a change of batch or an event; for measured ones where curves err.

    A measured search proposes one candidate at a time. Each is put in place, timed, and told back; the fastest then
    runs in turn with the shares before it, and stays only if it is faster beyond doubt. An alarm, another batch or
    another group ends a search at once. Whoever wins by measurement is vouched for: the split's predictions do not
    move it unless they promise more than the curves have erred by.

    Attributes:
        rules: the hyperparameters.
    """

    rules: SearchRules = field(default_factory=SearchRules)

    def init(self, problem: Problem, prior: SearchState | None) -> SearchState:
        """Begin with a worker group; costs and pacing are carried over."""
        ledger = prior.ledger if prior else SearchLedger(distance=self.rules.distance_steps)
        return SearchState(problem=problem, ledger=ledger)

    def busy(self, state: SearchState) -> bool:
        """Whether trials or a duel are under way, or their outcome is being put in place."""
        stage = state.stage
        return isinstance(stage, TimedTrial | Duel) or (isinstance(stage, Placing) and not stage.yields)

    def doubts(self, state: SearchState) -> bool:
        """Whether the curves were far off lately, or measured shares run because they were."""
        return state.doubts or state.vouched is not None

    def holds(self, state: SearchState, offer: Reallocate) -> Finding | None:
        """Say why an offer of the split is held back: it promises less than what runs would have to be wrong by."""
        vouched = state.vouched
        planned_s = offer.evidence.get("planned_step_time_s")
        if vouched is None or state.sizes != vouched.measured.shares or planned_s is None:
            return None
        now_s = statistics.median(vouched.recent_s) if len(vouched.recent_s) >= self.rules.trial_steps else None
        now_s = vouched.measured.slowest_s if now_s is None else now_s
        if now_s > _VOUCH_DRIFT * vouched.measured.slowest_s or planned_s < (1 - vouched.margin) * now_s:
            return None
        return finding(
            "measured shares stay",
            f"the curves promise {planned_s:.4g} s and were off by {vouched.margin:.0%}; what runs takes {now_s:.4g} s",
            {"planned_step_time_s": planned_s, "measured_step_time_s": now_s, "margin": vouched.margin},
        )

    def observe(
        self, state: SearchState, step: StepObserved, model: Model | None, look: SearchView
    ) -> tuple[Answer, SearchState]:
        """Judge a step; see ``SearchPart.observe``."""
        if look.alarm is not None:
            return self._disturbed(state, step)
        if state.news is not None:
            return state.news, replace(state, news=None)
        match state.stage:
            case None:
                return rest(self.rules, state, step, model, look)
            case AskedSearch() as asked:
                return wait_for_answer(self.rules, state, asked, step, model)
            case TimedTrial() as trial:
                return time_trial(self.rules, state, trial, step)
            case Duel() as duel:
                return fight(self.rules, state, duel, step)
            case Placing() as placing:
                return place(self.rules, state, placing, step)

    def trial(
        self, state: SearchState, requested: TrialRequested, model: Model | None
    ) -> tuple[Reallocate | TellTrial | Finding, SearchState]:
        """Run a candidate; refuse one that nobody waits for or that does not fit the workers."""
        quest = self._quest_of(state, requested.search_id)
        fault = "no search waits for trials" if quest is None else _fault_of(state, requested.local_batch_sizes, model)
        if quest is None or fault is not None:
            refused = TellTrial(
                search_id=requested.search_id,
                trial=requested.trial,
                objective=math.inf,
                reason=f"trial {requested.trial} is refused: {fault}",
            )
            return refused, state
        shares = requested.local_batch_sizes
        stage = TimedTrial(quest=quest, trial=requested.trial, shares=shares, own_s=no_steps(state.problem.num_workers))
        reason = f"trial {requested.trial} of a measured search"
        if shares == state.sizes:
            return finding(f"trial {requested.trial}", f"{reason}: these shares run already"), replace(
                state, stage=stage
            )
        run = Reallocate(proposal=Proposal(local_batch_sizes=shares), reason=reason, search_id=requested.search_id)
        return run, replace(state, stage=stage)

    def answer(
        self, state: SearchState, result: SearchResult, model: Model | None
    ) -> tuple[Reallocate | Finding | str, SearchState]:
        """Judge what a search ended with."""
        stage = state.stage
        if isinstance(stage, TimedTrial) and stage.quest.search_id == result.search_id:
            return conclude(self.rules, state, stage.quest, result.reason)
        if not isinstance(stage, AskedSearch):
            return "a search ended that nobody waits for", state
        if result.local_batch_sizes is None or stage.kind == "measured":
            return fruitless(self.rules, state, stage.kind, result.reason)
        ledger = replace(state.ledger, next_model_step=state.newest_step + self.rules.model_distance_steps)
        return self._weigh(replace(state, stage=None, wants_model=False, ledger=ledger), result, model)

    def applied(self, state: SearchState, applied: AllocationApplied, model: Model | None) -> SearchState:
        """Take note of what the group now runs, and of what the curves say of it beforehand."""
        shares = applied.allocation.local_batch_sizes
        if shares == state.sizes:
            return state
        own_s = None if model is None else model.own_s(shares)
        watch = ShareWatch(predicted_own_s=None if own_s is None else read_only(own_s, np.float64))
        state, old = replace(state, sizes=shares, watch=watch), state
        if old.sizes is None or sum(old.sizes) != sum(shares):
            ended = _ended(old.stage, "the global batch changed") if old.sizes is not None else None
            return replace(state, stage=None, vouched=None, wants_model=True, news=ended)
        stage = _after_switch(old.stage, shares)
        keeps = state.vouched is not None and (stage is not None or state.vouched.measured.shares == shares)
        lost = isinstance(old.stage, AskedSearch) and old.stage.kind == "model"
        return replace(
            state, stage=stage, vouched=state.vouched if keeps else None, wants_model=state.wants_model or lost
        )

    def _weigh(
        self, state: SearchState, result: SearchResult, model: Model | None
    ) -> tuple[Reallocate | Finding | str, SearchState]:
        """Compare a search's candidate with the present shares on today's curves."""
        shares = result.local_batch_sizes
        assert shares is not None
        now_s = None if model is None or state.sizes is None else model.own_s(state.sizes)
        fault = _fault_of(state, shares, model)
        if model is None or now_s is None or fault is not None:
            return finding("candidate refused", f"the search's candidate does not fit: {fault}"), state
        then_s = model.own_s(shares)
        gain = 1.0 - float(then_s.max()) / float(now_s.max()) if then_s is not None else 0.0
        needed = max(self.rules.min_gain, self.rules.num_sigmas * state.watch.doubt)
        evidence = {"gain": gain, "needed_gain": needed, "step_time_s": float(now_s.max())}
        if result.objective is not None and math.isfinite(result.objective):
            evidence["objective"] = result.objective
        if gain <= needed:
            said = f"the exact split stands: the search found {max(gain, 0.0):.1%} of {float(now_s.max()):.4g} s"
            return finding("exact split stands", said, evidence), state
        placing = Placing(
            shares=shares,
            reason=f"a search on the curves saves {gain:.1%} of {float(now_s.max()):.4g} s",
            search_id=result.search_id,
            predicted_gain=gain,
            evidence=evidence,
        )
        move = Reallocate(
            proposal=Proposal(local_batch_sizes=shares),
            reason=placing.reason,
            predicted_gain=gain,
            evidence=evidence,
            search_id=result.search_id,
        )
        # Nobody takes advice up: waiting for that would hold the split's own back and blind the trigger meanwhile.
        return move, replace(state, stage=placing if self.rules.acts else None)

    def _disturbed(self, state: SearchState, step: StepObserved) -> tuple[Answer, SearchState]:
        """A rank's speed changed: what was measured before is void, and so is what is being measured."""
        state = replace(state, newest_step=step.step)
        if isinstance(state.stage, TimedTrial | Duel):
            return disturb(state, state.stage.quest, "a change of speed")
        return None, replace(state, stage=None, vouched=None, wants_model=True, watch=ShareWatch(), news=None)

    def _quest_of(self, state: SearchState, search_id: str) -> Quest | None:
        """Return the search that waits for this trial, begun by its first; None if none does."""
        stage = state.stage
        if isinstance(stage, TimedTrial) and stage.trial is None and stage.quest.search_id == search_id:
            return stage.quest
        if not isinstance(stage, AskedSearch) or stage.kind != "measured" or state.sizes is None:
            return None
        if state.watch.slowest_s is None:
            return None
        incumbent = Candidate(shares=state.sizes, slowest_s=state.watch.slowest_s)
        mismatch = state.watch.mismatch or 0.0
        return Quest(search_id=search_id, incumbent=incumbent, mismatch=mismatch, worth=stage.worth)


def _after_switch(stage: Stage, shares: tuple[int, ...]) -> Stage:
    """Return the stage after other shares of the same batch were put in place.

    Whoever put in place what was not asked for (a switch that came late, a wrapper), the stage goes on asking; only a
    search that has not answered yet is over, since what it was asked is no longer the question.
    """
    match stage:
        case TimedTrial():
            return replace(stage, own_s=no_steps(len(shares)), wait=Patience())
        case Duel():
            return replace(stage, current=(), wait=Patience())
        case Placing() if stage.shares != shares:
            return stage
        case _:
            return None


def _ended(stage: Stage, why: str) -> Finding | None:
    if not isinstance(stage, TimedTrial | Duel):
        return None
    return finding("search ended", f"{why} while candidates were measured")


def _fault_of(state: SearchState, shares: tuple[int, ...], model: Model | None) -> str | None:
    """Say why the group cannot run these shares, or None."""
    if state.sizes is None or len(shares) != state.problem.num_workers or sum(shares) != sum(state.sizes):
        return "its shares are not those of the present batch"
    lower, upper = limits(state.problem, sum(shares), model)
    rows = np.asarray(shares, dtype=np.int64)
    if (rows % state.problem.local_batch_multiple).any():
        return f"its shares are no multiples of {state.problem.local_batch_multiple}"
    if (rows < lower).any():
        return f"rank {int(np.argmax(rows < lower))} has too few rows"
    if (rows > upper).any():
        return f"rank {int(np.argmax(rows > upper))} cannot hold {int(rows[np.argmax(rows > upper)])} rows"
    return None
