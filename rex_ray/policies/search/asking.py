"""When a search is asked for, and how long its answer is waited for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rex_ray.core.observations import StepObserved
from rex_ray.core.search_problem import SearchKind
from rex_ray.core.types import IntArray, Problem, StepFlag
from rex_ray.policies.base import Finding, Search
from rex_ray.policies.limits import share_bounds
from rex_ray.policies.seams import Model, SearchView
from rex_ray.policies.search.rules import SearchRules
from rex_ray.policies.search.state import AskedSearch, SearchState
from rex_ray.policies.search.trials import Answer, finding, is_clean
from rex_ray.policies.search.watch import hope, watched

__all__ = ["fruitless", "limits", "rest", "wait_for_answer"]

_VOUCH_WINDOW = 32


def rest(
    rules: SearchRules, state: SearchState, step: StepObserved, model: Model | None, look: SearchView
) -> tuple[Answer, SearchState]:
    """Nothing is going on: compare the present shares with their prediction, and ask where it is time."""
    if state.sizes is None or step.flags != StepFlag.NONE:
        return None, state
    sizes = state.sizes
    if state.vouched is not None and is_clean(step, sizes):
        recent = (*state.vouched.recent_s[1 - _VOUCH_WINDOW :], float(step.own_us.max()) * 1e-6)
        state = replace(state, vouched=replace(state.vouched, recent_s=recent))
    watch = state.watch
    if watch.num_clean < rules.settle_steps:
        if not is_clean(step, sizes):
            return None, state
        watch = watched(rules, watch, step)
        doubts = state.doubts if watch.distortion is None else watch.distortion > rules.max_distortion
        return None, replace(state, watch=watch, doubts=doubts)
    if look.offer is not None or model is None or state.problem.num_workers < 2:
        return None, state
    if state.wants_model:
        if step.step < state.ledger.next_model_step:
            return None, state
        return _ask_curves(rules, replace(state, newest_step=step.step), model)
    if not _errs(rules, state, step.step) or not look.is_quiet:
        return None, state
    state = replace(state, newest_step=step.step)
    worth = min(_hope_of(state, sizes, model), state.watch.mismatch or 0.0)
    if worth > rules.min_mismatch and state.ledger.lost_steps < rules.allowance(step.step, worth):
        return _ask(rules, state, AskedSearch(kind="measured", worth=worth), model)
    return None, _later(rules, state, "measured")


def wait_for_answer(
    rules: SearchRules, state: SearchState, asked: AskedSearch, step: StepObserved, model: Model | None
) -> tuple[Answer, SearchState]:
    """Count the steps; ask once more now and then, and give a search up that says nothing."""
    asked = replace(asked, wait=asked.wait.after(step))
    state = replace(state, stage=asked, newest_step=step.step)
    if rules.is_out_of(asked.wait):
        return fruitless(rules, state, asked.kind, f"no answer within {asked.wait.steps} steps")
    # The controller starts none during a switch, and says nothing; one that runs already is not started twice.
    if model is not None and asked.wait.steps % rules.ask_again_steps == 0:
        return _ask(rules, state, asked, model)
    return None, state


def fruitless(rules: SearchRules, state: SearchState, kind: SearchKind, reason: str) -> tuple[Finding, SearchState]:
    """End a search that brought no answer; the next one comes later."""
    ledger = state.ledger.failed(kind, state.newest_step, rules.max_distance_steps)
    wait = state.ledger.distance
    said = f"{reason}; the exact split stands, and is asked about again in {wait} steps"
    return finding("search lost", said, {"wait_steps": float(wait)}), replace(state, stage=None, ledger=ledger)


def _errs(rules: SearchRules, state: SearchState, step: int) -> bool:
    """Whether the curves erred about what runs, and a measured search may be asked for again."""
    mismatch = state.watch.mismatch
    if not rules.measured or state.vouched is not None or step < state.ledger.next_measured_step:
        return False
    # The slowest of many medians errs upwards by itself, by up to two standard errors for sixteen ranks.
    needed = max(rules.min_mismatch, (1 + rules.num_sigmas) * state.watch.doubt)
    return mismatch is not None and mismatch > needed


def _hope_of(state: SearchState, sizes: tuple[int, ...], model: Model) -> float:
    typical_s = state.watch.typical_s
    lower, upper = limits(state.problem, sum(sizes), model)
    return 0.0 if typical_s is None else hope(typical_s, np.array(sizes), lower, upper)


def _later(rules: SearchRules, state: SearchState, kind: SearchKind) -> SearchState:
    """Look again in a while."""
    step = state.newest_step + rules.ask_again_steps
    if kind == "model":
        return replace(state, ledger=replace(state.ledger, next_model_step=step))
    return replace(state, ledger=replace(state.ledger, next_measured_step=step))


def _ask_curves(rules: SearchRules, state: SearchState, model: Model) -> tuple[Answer, SearchState]:
    """Ask for a search on the curves, unless nothing but the exact split would be looked at: that costs a process."""
    asked, after = _ask(rules, state, AskedSearch(kind="model"), model)
    if not isinstance(asked, Search) or asked.problem.groups().any():
        return asked, after
    ledger = replace(state.ledger, next_model_step=state.newest_step + rules.model_distance_steps)
    said = "the exact split stands: all workers are of one speed, so that there is nothing to search on their curves"
    return finding("exact split stands", said), replace(state, wants_model=False, ledger=ledger)


def _ask(rules: SearchRules, state: SearchState, asked: AskedSearch, model: Model) -> tuple[Answer, SearchState]:
    assert state.sizes is not None
    most = rules.max_model_trials if asked.kind == "model" else rules.max_measured_trials
    problem = model.search_problem(asked.kind, state.sizes, most)
    if problem is None:
        return None, _later(rules, replace(state, stage=None), asked.kind)
    evidence = {"num_trials": float(most)}
    reason = "a search on the curves, beside the exact split"
    if asked.kind == "measured":
        off = state.watch.mismatch or 0.0
        evidence |= {
            "mismatch": off,
            "doubt": state.watch.doubt,
            "worth": asked.worth,
            "lost_steps": state.ledger.lost_steps,
        }
        reason = f"steps take {off:.1%} else than predicted and no other split is promised: candidates are run"
    return Search(problem=problem, reason=reason, evidence=evidence), replace(state, stage=asked)


def limits(problem: Problem, num_rows: int, model: Model | None) -> tuple[IntArray, IntArray]:
    """Return the fewest and the most rows per rank, within what memory is known to hold."""
    lower, upper = share_bounds(problem, num_rows)
    fits = None if model is None else model.max_rows()
    if fits is None:
        return lower, upper
    multiple = problem.local_batch_multiple
    return lower, np.maximum(np.minimum(upper, fits // multiple * multiple), lower)
