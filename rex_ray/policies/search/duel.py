"""The last word of a measured search: its best candidate and the incumbent run in turn, and one of them stays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rex_ray.core.observations import StepObserved
from rex_ray.core.rank_tests import compare_ranks, one_sided_p
from rex_ray.policies.base import Finding, Reallocate
from rex_ray.policies.search.rules import SearchRules
from rex_ray.policies.search.state import Candidate, Duel, Patience, Placing, SearchState, Vouched
from rex_ray.policies.search.trials import (
    Answer,
    asked,
    counted,
    disturb,
    duel_reason,
    finding,
    is_clean,
    put_back,
    run,
)

__all__ = ["fight", "rank_test"]


def fight(rules: SearchRules, state: SearchState, duel: Duel, step: StepObserved) -> tuple[Answer, SearchState]:
    """Run the challenger and the incumbent in turn, the same number of clean steps each, and judge."""
    state = counted(state, duel.quest, step)
    duel = replace(duel, wait=duel.wait.after(step))
    if rules.is_out_of(duel.wait):
        return put_back(rules, state, duel.quest, f"the duel waited {duel.wait.steps} steps for a leg; given up", {})
    shares = duel.shares()
    if state.sizes != shares:
        return run(shares, duel.quest, duel_reason(duel)), replace(state, stage=duel)
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
    return run(duel.shares(), duel.quest, duel_reason(duel)), replace(state, stage=duel)


def rank_test(slow: Sequence[float], fast: Sequence[float], autocorrelation: float) -> tuple[float, float]:
    """Return the one-sided p of ``fast`` being faster (Mann-Whitney, normal form with ties) and Cliff's delta.

    Steps that remember each other are fewer than they look: ``z`` is divided by ``sqrt((1 + rho) / (1 - rho))``, the
    factor on the standard error of a mean of AR(1) samples, which for four separate legs errs on the safe side.
    """
    test = compare_ranks([slow], [fast])
    z = float(test.z[0]) * math.sqrt((1 - autocorrelation) / (1 + autocorrelation))
    p_value = one_sided_p(z)
    return (p_value if z > 0 else 1.0 - p_value), float(test.cliffs_delta[0])


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
        return put_back(rules, state, quest, f"{said}: not enough", evidence)
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
    return replace(asked(placing), findings=(found,)), replace(state, stage=placing)


def _has_drifted(rules: SearchRules, duel: Duel) -> bool:
    """Whether the leg just finished differs from what the same shares took before."""
    assert duel.quest.best is not None
    challenger = duel.starts ^ (len(duel.legs) % 2 == 0)
    before_s = duel.quest.best.slowest_s if challenger else duel.quest.incumbent.slowest_s
    ratio = float(np.median(duel.legs[-1])) / before_s
    return max(ratio, 1.0 / ratio) > rules.drift
