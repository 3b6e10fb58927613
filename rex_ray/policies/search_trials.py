"""What a measured search does to a running group: trials are timed, the best one fights the incumbent, one stays.

Every function takes a state and a step and returns what to ask for with the next state; see ``AxSearch``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from rex_ray.core.errors import ConfigError
from rex_ray.core.observations import StepObserved
from rex_ray.core.search_problem import SearchKind, objective_of
from rex_ray.core.types import FloatArray, StepFlag, read_only
from rex_ray.policies.base import Finding, Proposal, Reallocate, Search, TellTrial
from rex_ray.policies.search_state import (
    Candidate,
    Duel,
    Patience,
    Placing,
    Quest,
    SearchState,
    ShareWatch,
    TimedTrial,
    Vouched,
)

__all__ = [
    "Answer",
    "SearchRules",
    "conclude",
    "disturb",
    "fight",
    "finding",
    "is_clean",
    "place",
    "rank_test",
    "time_trial",
]

Answer: TypeAlias = Search | TellTrial | Reallocate | Finding | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRules:
    """Hyperparameters of a search part. Where no source is named, the value is a choice.

    Attributes:
        measured: whether candidates may be run at all; without it a search asks the curves alone.
        min_gain: what a search on the curves must promise over the present shares.
        num_sigmas: and by how many standard errors of those shares' own steps, as in ``SplineSplit``.
        min_measured_gain: what a measured winner must have saved over the incumbent.
        alpha: and the level of the rank test beside it.
        min_mismatch: relative error of a prediction from which on the curves are taken to be structurally wrong.
        watch_steps: clean steps that a prediction is compared with.
        settle_steps: clean steps of the same shares after which the split counts as settled: its first three reviews.
        trial_steps: clean steps that time a trial, and a leg of the duel.
        num_legs: legs of the duel.
        max_model_trials: candidates of a search on the curves.
        max_measured_trials: candidates of a measured one.
        autocorrelation: assumed lag-1 correlation of own times, as in ``SplineSplit``.
        hopeless: a trial all of whose first steps take this many times as long as the incumbent is given up.
        hopeless_steps: those first steps.
        jump: within a trial no rank's time changes by this factor, unless its speed did; the search ends.
        drift: nor does that of shares which ran before, in the duel.
        budget: fraction of all steps that trials may cost, as steps' worth of time lost against the incumbent.
        payback_steps: on top of it, a search may cost what closing the mismatch would save within so many steps.
        model_distance_steps: least steps between two searches on the curves, however often something happens.
        distance_steps: steps between a search without success and the next, doubled each time
        max_distance_steps: up to this.
        patience_steps: a search or a switch that does not answer is given up after so many steps,
        patience_s: but not before their time comes to this.
        ask_again_steps: until then a search is asked for again so often; the controller knows one that runs.
    """

    measured: bool = True
    min_gain: float = 0.03
    num_sigmas: float = 2.0
    min_measured_gain: float = 0.01
    alpha: float = 0.05
    min_mismatch: float = 0.05
    watch_steps: int = 16
    settle_steps: int = 25
    trial_steps: int = 10
    num_legs: int = 4
    max_model_trials: int = 15
    max_measured_trials: int = 10
    autocorrelation: float = 0.6
    hopeless: float = 1.2
    hopeless_steps: int = 3
    jump: float = 1.3
    drift: float = 1.15
    budget: float = 0.02
    payback_steps: int = 200
    model_distance_steps: int = 64
    distance_steps: int = 256
    max_distance_steps: int = 16_384
    patience_steps: int = 64
    patience_s: float = 30.0
    ask_again_steps: int = 16

    def __post_init__(self) -> None:
        for name in ("min_gain", "min_measured_gain", "min_mismatch", "budget"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"a search's {name} must be a fraction in [0, 1), got {value}")
        if not 0.0 < self.alpha < 0.5:
            raise ConfigError(f"a search's alpha must lie in (0, .5), got {self.alpha}")
        for name in ("trial_steps", "max_model_trials", "max_measured_trials", "distance_steps", "patience_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a search's {name} must be at least 1, got {getattr(self, name)}")
        if self.payback_steps < 0:
            raise ConfigError(f"a search's payback_steps must not be negative, got {self.payback_steps}")

    def allowance(self, step: int, mismatch: float) -> float:
        """Return how many steps' worth of time may have been lost to trials by ``step`` of the run."""
        return self.budget * max(step, 0) + self.payback_steps * min(mismatch, 1.0)

    def is_out_of(self, patience: Patience) -> bool:
        """Whether something has been waited for long enough."""
        return patience.steps >= self.patience_steps and patience.waited_s >= self.patience_s


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
    state = _counted(state, stage.quest, step)
    stage = replace(stage, wait=stage.wait.after(step))
    if rules.is_out_of(stage.wait):
        what = "its next trial" if stage.trial is None else "trial shares to be put in place and run clean"
        return conclude(rules, state, stage.quest, f"given up: waited {stage.wait.steps} steps for {what}")
    if stage.trial is None:
        return None, replace(state, stage=stage)
    if state.sizes != stage.shares:
        return _run(stage.shares, stage.quest, f"trial {stage.trial} of a measured search"), replace(state, stage=stage)
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
    if state.ledger.lost_steps < rules.allowance(state.newest_step, quest.mismatch):
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
        return _put_back(rules, state, quest, f"{reason}; no trial beat the shares before it", evidence)
    duel = Duel(quest=quest, starts=state.sizes != quest.incumbent.shares)
    return _run(duel.shares(), quest, f"{reason}; {_duel_reason(duel)}"), replace(state, stage=duel)


def fight(rules: SearchRules, state: SearchState, duel: Duel, step: StepObserved) -> tuple[Answer, SearchState]:
    """Run the challenger and the incumbent in turn, the same number of clean steps each, and judge."""
    state = _counted(state, duel.quest, step)
    duel = replace(duel, wait=duel.wait.after(step))
    if rules.is_out_of(duel.wait):
        return _put_back(rules, state, duel.quest, f"the duel waited {duel.wait.steps} steps for a leg; given up", {})
    shares = duel.shares()
    if state.sizes != shares:
        return _run(shares, duel.quest, _duel_reason(duel)), replace(state, stage=duel)
    if not is_clean(step, shares):
        return None, replace(state, stage=duel)
    current = (*duel.current, float(step.own_us.max()) * 1e-6)
    if len(current) < rules.trial_steps:
        return None, replace(state, stage=replace(duel, current=current, wait=Patience()))
    duel = replace(duel, legs=(*duel.legs, current), current=(), wait=Patience())
    if _has_drifted(rules, duel):
        return disturb(state, duel.quest, "shares take much longer or shorter than when they ran before")
    if len(duel.legs) == rules.num_legs:
        return _judge(rules, state, duel)
    return _run(duel.shares(), duel.quest, _duel_reason(duel)), replace(state, stage=duel)


def _judge(rules: SearchRules, state: SearchState, duel: Duel) -> tuple[Reallocate | Finding, SearchState]:
    quest = duel.quest
    assert quest.best is not None
    challenger = [time_s for leg in duel.legs[0 if duel.starts else 1 :: 2] for time_s in leg]
    incumbent = [time_s for leg in duel.legs[1 if duel.starts else 0 :: 2] for time_s in leg]
    won_s, kept_s = float(np.median(challenger)), float(np.median(incumbent))
    gain = 1.0 - won_s / kept_s
    p_value, effect = rank_test(incumbent, challenger, rules.autocorrelation)
    evidence = {
        "measured_gain": gain,
        "p_value": p_value,
        "effect": effect,
        "num_samples": float(len(challenger) + len(incumbent)),
        "incumbent_s": kept_s,
        "challenger_s": won_s,
        "lost_steps": state.ledger.lost_steps,
    }
    said = f"measured in turn the challenger saves {gain:.1%} of {kept_s:.4g} s (p = {p_value:.2g})"
    if gain <= rules.min_measured_gain or p_value >= rules.alpha:
        return _put_back(rules, state, quest, f"{said}: not enough", evidence)
    winner = Candidate(shares=quest.best.shares, slowest_s=won_s)
    ledger = replace(
        state.ledger,
        distance=rules.distance_steps,
        next_measured_step=state.newest_step + rules.distance_steps,
    )
    # A curve that has been off by so much must promise more than that before its word moves what was measured.
    vouched = Vouched(measured=winner, margin=min(max(rules.min_gain, quest.mismatch), 0.5))
    state = replace(state, ledger=ledger, vouched=vouched, stage=None)
    found = finding("winner adopted", said, evidence)
    if state.sizes == winner.shares:
        return found, state
    placing = Placing(
        shares=winner.shares, reason=said, search_id=quest.search_id, predicted_gain=gain, evidence=evidence
    )
    return replace(_asked(placing), findings=(found,)), replace(state, stage=placing)


def place(rules: SearchRules, state: SearchState, placing: Placing, step: StepObserved) -> tuple[Answer, SearchState]:
    """Ask for a search's last word until the group runs it."""
    placing = replace(placing, wait=placing.wait.after(step))
    if rules.is_out_of(placing.wait):
        reason = f"the shares that a search ended with were not taken up within {placing.wait.steps} steps"
        return finding("not taken up", reason), replace(state, stage=None, vouched=None)
    return _asked(placing), replace(state, stage=placing)


def disturb(state: SearchState, quest: Quest, reason: str) -> tuple[Finding, SearchState]:
    """End a measured search whose world changed under it: what was measured is void, and nobody is to blame."""
    ledger = replace(state.ledger, next_measured_step=state.newest_step + state.ledger.distance)
    stage = None
    if state.sizes != quest.incumbent.shares:
        stage = Placing(shares=quest.incumbent.shares, reason=f"{reason}; the incumbent is put back", yields=True)
    after = replace(state, stage=stage, vouched=None, wants_model=True, watch=ShareWatch(), ledger=ledger, news=None)
    return finding("search ended", f"{reason}: the measured search ends", {"lost_steps": ledger.lost_steps}), after


def rank_test(slow: Sequence[float], fast: Sequence[float], autocorrelation: float) -> tuple[float, float]:
    """Return the one-sided p of ``fast`` being faster (Mann-Whitney, normal form with ties) and Cliff's delta.

    Steps that remember each other are fewer than they look: ``z`` is divided by ``sqrt((1 + rho) / (1 - rho))``, the
    factor on the standard error of a mean of AR(1) samples, which for four separate legs errs on the safe side.
    """
    a, b = np.asarray(slow, dtype=np.float64), np.asarray(fast, dtype=np.float64)
    effect = float(np.sign(a[:, None] - b[None]).mean())
    total = a.size + b.size
    _, ties = np.unique(np.concatenate([a, b]), return_counts=True)
    tied = float((ties.astype(np.float64) ** 3 - ties).sum()) / (total * (total - 1))
    variance = a.size * b.size / 12.0 * (total + 1 - tied)
    if variance <= 0:
        return 1.0, effect
    z = 0.5 * effect * a.size * b.size / math.sqrt(variance)
    z *= math.sqrt((1 - autocorrelation) / (1 + autocorrelation))
    return 0.5 * math.erfc(z / math.sqrt(2.0)), effect


def no_steps(num_workers: int) -> FloatArray:
    """Return the times of no steps yet."""
    return read_only(np.zeros((0, num_workers)), np.float64)


def _put_back(
    rules: SearchRules, state: SearchState, quest: Quest, reason: str, evidence: dict[str, float]
) -> tuple[Reallocate | Finding, SearchState]:
    kind: SearchKind = "measured"
    ledger = state.ledger.failed(kind, state.newest_step, rules.max_distance_steps)
    found = finding("incumbent stands", reason, evidence)
    if state.sizes == quest.incumbent.shares:
        return found, replace(state, ledger=ledger, stage=None)
    placing = Placing(shares=quest.incumbent.shares, reason=reason, search_id=quest.search_id, evidence=evidence)
    return replace(_asked(placing), findings=(found,)), replace(state, ledger=ledger, stage=placing)


def _counted(state: SearchState, quest: Quest, step: StepObserved) -> SearchState:
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


def _has_drifted(rules: SearchRules, duel: Duel) -> bool:
    """Whether the leg just finished differs from what the same shares took before."""
    assert duel.quest.best is not None
    challenger = duel.starts ^ (len(duel.legs) % 2 == 0)
    before_s = duel.quest.best.slowest_s if challenger else duel.quest.incumbent.slowest_s
    ratio = float(np.median(duel.legs[-1])) / before_s
    return max(ratio, 1.0 / ratio) > rules.drift


def _run(shares: tuple[int, ...], quest: Quest, reason: str) -> Reallocate:
    return Reallocate(proposal=Proposal(local_batch_sizes=shares), reason=reason, search_id=quest.search_id)


def _asked(placing: Placing) -> Reallocate:
    return Reallocate(
        proposal=Proposal(local_batch_sizes=placing.shares),
        reason=placing.reason,
        predicted_gain=placing.predicted_gain,
        evidence=dict(placing.evidence),
        search_id=placing.search_id,
    )


def _duel_reason(duel: Duel) -> str:
    who = "the incumbent" if duel.shares() == duel.quest.incumbent.shares else "the challenger"
    return f"leg {len(duel.legs) + 1} of a duel of measured shares: {who}"
