"""What a measured search does to a running group: candidates are put in place, timed, and told; the incumbent returns.

Every function takes a state and a step and returns what to ask for with the next state; see ``AxSearch``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import numpy as np

from rex_ray.core.observations import StepObserved
from rex_ray.core.search_problem import SearchKind, objective_of
from rex_ray.core.types import FloatArray, StepFlag, read_only
from rex_ray.policies.base import Finding, Proposal, Reallocate, Search, TellTrial
from rex_ray.policies.search.rules import SearchRules
from rex_ray.policies.search.state import (
    Candidate,
    Duel,
    Patience,
    Placing,
    Quest,
    SearchState,
    ShareWatch,
    TimedTrial,
)

__all__ = [
    "Answer",
    "asked",
    "conclude",
    "counted",
    "disturb",
    "duel_reason",
    "finding",
    "is_clean",
    "no_steps",
    "place",
    "put_back",
    "run",
    "time_trial",
]

Answer: TypeAlias = Search | TellTrial | Reallocate | Finding | None


def finding(verdict: str, reason: str, evidence: dict[str, float] | None = None) -> Finding:
    """Return a finding of the search part."""
    return Finding(part="search", verdict=verdict, reason=reason, evidence=evidence or {})


def is_clean(step: StepObserved, shares: tuple[int, ...]) -> bool:
    """Whether a step is evidence about these shares."""
    return step.flags == StepFlag.NONE and tuple(step.num_rows.tolist()) == shares


def time_trial(
    rules: SearchRules, state: SearchState, stage: TimedTrial, step: StepObserved
) -> tuple[Answer, SearchState]:
    """Put a candidate in place, take its clean steps, and tell the search what they say."""
    state = counted(state, stage.quest, step)
    stage = replace(stage, wait=stage.wait.after(step))
    if rules.is_out_of(stage.wait):
        what = "its next trial" if stage.trial is None else "trial shares to be put in place and run clean"
        return conclude(rules, state, stage.quest, f"given up: waited {stage.wait.steps} steps for {what}")
    if stage.trial is None:
        return None, replace(state, stage=stage)
    if state.sizes != stage.shares:
        return run(stage.shares, stage.quest, f"trial {stage.trial} of a measured search"), replace(state, stage=stage)
    if not is_clean(step, stage.shares):
        return None, replace(state, stage=stage)
    own_s = read_only(np.concatenate([stage.own_s, step.own_us[None] * 1e-6]), np.float64)
    if _has_jumped(rules, own_s):
        return disturb(state, stage.quest, "a rank's speed changed within a trial")
    if len(own_s) < rules.trial_steps and not _is_hopeless(rules, own_s, stage.quest.incumbent.slowest_s):
        return None, replace(state, stage=replace(stage, own_s=own_s, wait=Patience()))
    return _told(rules, state, stage, own_s)


def _told(rules: SearchRules, state: SearchState, stage: TimedTrial, own_s: FloatArray) -> tuple[Answer, SearchState]:
    """Tell the search of a timed trial; end it here when there is nothing left to spend."""
    assert stage.trial is not None
    quest = stage.quest
    typical = np.median(own_s, axis=0)
    slowest_s = float(np.median(own_s.max(axis=1)))
    if quest.best is None or slowest_s < quest.best.slowest_s:
        quest = replace(quest, best=Candidate(shares=stage.shares, slowest_s=slowest_s))
    change = 1.0 - slowest_s / quest.incumbent.slowest_s
    evidence = {
        "trial": float(stage.trial),
        "slowest_s": slowest_s,
        "measured_gain": change,
        "num_samples": float(len(own_s)),
        "lost_steps": state.ledger.lost_steps,
    }
    verb = "saves" if change >= 0 else "costs"
    reason = f"trial {stage.trial} {verb} {abs(change):.1%} of the incumbent's {quest.incumbent.slowest_s:.4g} s"
    tell = TellTrial(
        search_id=quest.search_id,
        trial=stage.trial,
        objective=objective_of(typical),
        own_s=tuple(typical.tolist()),
        reason=reason,
        findings=(finding(f"trial {stage.trial}", reason, evidence),),
    )
    if state.ledger.lost_steps < rules.allowance(state.newest_step, quest.worth):
        blank = no_steps(own_s.shape[1])
        waiting = TimedTrial(quest=quest, trial=None, shares=stage.shares, own_s=blank)
        return tell, replace(state, stage=waiting)
    # The answer is owed all the same; what it leads to is refused, and the search ends by itself.
    outcome, after = conclude(rules, state, quest, "the budget of trials is spent")
    more = (outcome,) if isinstance(outcome, Finding) else outcome.findings
    return replace(tell, findings=(*tell.findings, *more)), after


def conclude(
    rules: SearchRules, state: SearchState, quest: Quest, reason: str
) -> tuple[Reallocate | Finding, SearchState]:
    """End the trials: the best of them fights the incumbent, unless it is hardly faster by its own trial."""
    best = quest.best
    enough = (1 - rules.min_measured_gain) * quest.incumbent.slowest_s
    if best is None or best.shares == quest.incumbent.shares or best.slowest_s > enough:
        evidence = {"incumbent_s": quest.incumbent.slowest_s, "lost_steps": state.ledger.lost_steps}
        if best is not None:
            evidence["best_trial_s"] = best.slowest_s
        return put_back(rules, state, quest, f"{reason}; no trial beat the shares before it", evidence)
    duel = Duel(quest=quest, starts=state.sizes != quest.incumbent.shares)
    return run(duel.shares(), quest, f"{reason}; {duel_reason(duel)}"), replace(state, stage=duel)


def place(rules: SearchRules, state: SearchState, placing: Placing, step: StepObserved) -> tuple[Answer, SearchState]:
    """Ask for a search's last word until the group runs it."""
    placing = replace(placing, wait=placing.wait.after(step))
    if rules.is_out_of(placing.wait):
        reason = f"the shares that a search ended with were not taken up within {placing.wait.steps} steps"
        return finding("not taken up", reason), replace(state, stage=None, vouched=None)
    return asked(placing), replace(state, stage=placing)


def disturb(state: SearchState, quest: Quest, reason: str) -> tuple[Finding, SearchState]:
    """End a measured search whose world changed under it: what was measured is void, and nobody is to blame."""
    ledger = replace(state.ledger, next_measured_step=state.newest_step + state.ledger.distance)
    stage = None
    if state.sizes != quest.incumbent.shares:
        stage = Placing(shares=quest.incumbent.shares, reason=f"{reason}; the incumbent is put back", yields=True)
    after = replace(state, stage=stage, vouched=None, wants_model=True, watch=ShareWatch(), ledger=ledger, news=None)
    return finding("search ended", f"{reason}: the measured search ends", {"lost_steps": ledger.lost_steps}), after


def no_steps(num_workers: int) -> FloatArray:
    """Return the times of no steps yet."""
    return read_only(np.zeros((0, num_workers)), np.float64)


def put_back(
    rules: SearchRules, state: SearchState, quest: Quest, reason: str, evidence: dict[str, float]
) -> tuple[Reallocate | Finding, SearchState]:
    """End a search without success: the incumbent runs again, and the next search comes later."""
    kind: SearchKind = "measured"
    ledger = state.ledger.failed(kind, state.newest_step, rules.max_distance_steps)
    found = finding("incumbent stands", reason, evidence)
    if state.sizes == quest.incumbent.shares:
        return found, replace(state, ledger=ledger, stage=None)
    placing = Placing(shares=quest.incumbent.shares, reason=reason, search_id=quest.search_id, evidence=evidence)
    return replace(asked(placing), findings=(found,)), replace(state, ledger=ledger, stage=placing)


def counted(state: SearchState, quest: Quest, step: StepObserved) -> SearchState:
    """Book what a step under other shares than the incumbent's has cost."""
    if state.sizes == quest.incumbent.shares:
        return replace(state, newest_step=step.step)
    lost = max(float(step.own_us.max()) * 1e-6 / quest.incumbent.slowest_s - 1.0, 0.0)
    ledger = replace(state.ledger, lost_steps=state.ledger.lost_steps + lost)
    return replace(state, newest_step=step.step, ledger=ledger)


def _is_hopeless(rules: SearchRules, own_s: FloatArray, incumbent_s: float) -> bool:
    if len(own_s) < rules.hopeless_steps:
        return False
    return bool(own_s.max(axis=1).min() > rules.hopeless * incumbent_s)


def _has_jumped(rules: SearchRules, own_s: FloatArray) -> bool:
    """Whether some rank's last three steps of a trial differ from its first three by a change of speed."""
    if len(own_s) < 6:
        return False
    ratio = np.median(own_s[-3:], axis=0) / np.maximum(np.median(own_s[:3], axis=0), 1e-6)
    return bool((ratio > rules.jump).any() or (ratio * rules.jump < 1.0)[own_s[0] > 0].any())


def run(shares: tuple[int, ...], quest: Quest, reason: str) -> Reallocate:
    """Return the wish to run shares for a search's sake."""
    return Reallocate(proposal=Proposal(local_batch_sizes=shares), reason=reason, search_id=quest.search_id)


def asked(placing: Placing) -> Reallocate:
    """Return the wish to run what a search ended with."""
    return Reallocate(
        proposal=Proposal(local_batch_sizes=placing.shares),
        reason=placing.reason,
        predicted_gain=placing.predicted_gain,
        evidence=dict(placing.evidence),
        search_id=placing.search_id,
    )


def duel_reason(duel: Duel) -> str:
    """Say whose turn it is."""
    who = "the incumbent" if duel.shares() == duel.quest.incumbent.shares else "the challenger"
    return f"leg {len(duel.legs) + 1} of a duel of measured shares: {who}"
