"""What is done about a change of speed: whom it concerns, whether it is worth a move, and what is said about it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri

from rex_ray.core.errors import ConfigError
from rex_ray.core.observations import StepObserved
from rex_ray.core.rank_tests import compare_ranks, one_sided_p
from rex_ray.core.types import BoolArray, FloatArray, frozen
from rex_ray.policies.base import Finding
from rex_ray.policies.seams import Alarm, Model
from rex_ray.policies.trigger.gate import expected_use_steps, stakes
from rex_ray.policies.trigger.levels import Changes
from rex_ray.policies.trigger.memory import LONG, NUM_LENGTHS, SETTLING, SHORT, Past, TriggerState

__all__ = ["Response"]

_SNAP = math.log(1.08)
"""A rank back within this of its first speed is back at it: estimates of a few samples are no better than that."""

_DISAGREEMENT = math.log(1.1)
"""Beyond this the split's model has seen (a part of) the change by itself, and is told the rest."""

_KNOWN_FOR = 40
"""Clean steps of an allocation from which on the model is believed at its sizes: 24 samples and the long window."""

_OVERTAKEN, _LONGEST_LAG = 0.7, 100
"""Shares that arrive within this part of the usual lag after an alarm were not its doing; the longest lag believed."""

_INPUT_BOUND = 0.5
"""Share of the excess that lies in waiting for data from which on a rank is called input-bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """Turns changes into an alarm, or says why not.

    Attributes:
        cooldown_steps: clean steps after an alarm before the next; a recovery must have lasted as long.
        max_hold_steps: most steps that a recovery must have lasted, on a rank that goes back and forth.
        flap_steps: a rank slow again within so many steps of its recovery (or eight times its hold) is flapping.
        switch_cost_steps: what a switch costs by itself, in healthy steps.
        min_lengths: of these, before they are believed.
    """

    cooldown_steps: int = 5
    max_hold_steps: int = 160
    flap_steps: int = 64
    switch_cost_steps: float = 0.5
    min_lengths: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.cooldown_steps <= self.max_hold_steps:
            raise ConfigError(
                f"trigger_cooldown_steps must be at least 1 and at most trigger_max_hold_steps "
                f"({self.max_hold_steps}), got {self.cooldown_steps}"
            )
        if not 0 <= self.switch_cost_steps < math.inf:
            raise ConfigError(f"trigger_switch_cost_steps must not be negative, got {self.switch_cost_steps}")

    def answer(
        self, state: TriggerState, changes: Changes, step: StepObserved, model: Model | None
    ) -> tuple[Alarm | Finding | None, TriggerState]:
        """Answer changes of which at least one is sure."""
        if _is_common(state, changes):
            together = np.full(changes.effect.size, float(np.median(changes.effect)))
            everyone = np.ones(changes.effect.size, dtype=np.bool_)
            return self._alarm(state, replace(changes, effect=together), everyone, step, model, "cluster-wide")
        past = state.past
        flaps = (past.hold > self.cooldown_steps) & changes.moved
        waiting = flaps & (past.level > 0) & (changes.effect < 0) & (state.watch.lasting < past.hold)
        ready = changes.moved & ~waiting
        if not (ready & changes.is_sure).any():
            return self._hold(state, changes, waiting, step, "held: flapping")
        slower = ready & (changes.effect > 0)
        # The recovery of a rank that goes back and forth is held beyond its next slowdown: the move pays again then.
        pause = state.num_clean - state.watch.lasting - past.ended
        for_good = (flaps & slower & (past.hold >= pause)).any()
        if slower.any() and not for_good and not (ready & changes.is_sure & ~slower).any():
            price = self._price(state, changes, slower)
            if price["seen_us"] < price["cost_us"]:
                return self._hold(state, changes, slower, step, "held: cost", price)
        return self._alarm(state, changes, ready, step, model, "slow" if slower.any() else "recovered")

    def review(self, state: TriggerState) -> tuple[Alarm, TriggerState]:
        """Have shares looked at that were decided before the newest alarm: its own re-split was overtaken by them."""
        reason = "shares have arrived that were decided before the newest alarm: are they still right?"
        past = replace(state.past, is_review_due=False)
        return Alarm(factors={}, verdict="review", reason=reason), replace(state, past=past)

    def keep(self, state: TriggerState) -> Finding:
        """Say that nothing has changed."""
        evidence = {
            "num_samples": float(state.num_clean),
            "num_armed": float(state.baseline.is_armed.sum()),
            "limit": float(state.limits.off.max()),
            "spread": float(state.baseline.spread.max()),
        }
        return Finding(part="trigger", verdict="keep", reason="no rank's speed has changed", evidence=evidence)

    def applied(self, past: Past, step: int) -> Past:
        """Take note that shares have arrived."""
        if past.alarm_step < 0:
            return past
        waited = min(max(step - past.alarm_step, 1), _LONGEST_LAG)
        # Shares that come much later were asked for by somebody else; many of them in a row are a longer lag.
        change = (waited - past.lag_steps) / 4 if waited <= 2 * past.lag_steps else past.lag_steps / 20
        return replace(
            past,
            alarm_step=-1,
            is_review_due=waited < _OVERTAKEN * past.lag_steps,
            lag_steps=past.lag_steps + change,
        )

    def _price(self, state: TriggerState, changes: Changes, slower: BoolArray) -> dict[str, float]:
        """Return what a move is expected to save and to cost, in microseconds."""
        assert state.footing is not None
        past, rows = state.past, state.footing.sizes
        healthy = np.exp(state.footing.reference + state.baseline.centre)
        slow = healthy * np.exp(np.where(slower, changes.effect, 0.0))
        some = rows > 0
        at_stake = stakes(rows[some], healthy[some], slow[some])
        age = int(state.watch.lasting[slower].max())
        # Too few events to learn from: what was lost so far is the best guess of what is still to be lost.
        use = float(age)
        if len(past.lengths) >= self.min_lengths:
            use = expected_use_steps(past.lengths, age, past.lag_steps)
        away = past.lag_steps + self.cooldown_steps
        # Where a move saves nothing, the change is told all the same: the split has to know of it.
        cost = self.switch_cost_steps * at_stake.healthy_us + away * at_stake.loss_us
        return {
            "seen_us": use * at_stake.gain_us,
            "cost_us": cost if at_stake.gain_us > 0 else 0.0,
            "gain_us": at_stake.gain_us,
            "loss_us": at_stake.loss_us,
        }

    def _hold(
        self,
        state: TriggerState,
        changes: Changes,
        ranks: BoolArray,
        step: StepObserved,
        verdict: str,
        price: Mapping[str, float] | None = None,
    ) -> tuple[Finding | None, TriggerState]:
        """Hold an answer back and, once in a while, say so."""
        if (state.past.said >= 0 and state.num_clean - state.past.said < SHORT) or not ranks.any():
            return None, state
        evidence = {**_evidence(state, changes, ranks, step), **(price or {})}
        rank, lasting = round(evidence["rank"]), round(evidence["num_lasting"])
        reason = f"rank {rank} has been slow for {lasting} steps, too few for a move to pay that may come too late"
        if price is None:
            reason = f"rank {rank} is back for {lasting} steps; of late it soon was slow again"
        finding = Finding(part="trigger", verdict=verdict, reason=reason, evidence=evidence)
        return finding, replace(state, past=replace(state.past, said=state.num_clean))

    def _alarm(
        self,
        state: TriggerState,
        changes: Changes,
        who: BoolArray,
        step: StepObserved,
        model: Model | None,
        verdict: str,
    ) -> tuple[Alarm, TriggerState]:
        """Raise the alarm, and measure from now on against the new speed."""
        assert state.footing is not None
        past, footing = state.past, state.footing
        is_back = (past.level != 0) & (np.abs(past.level + changes.effect) < _SNAP)
        effect = np.where(who, np.where(is_back & (verdict != "cluster-wide"), -past.level, changes.effect), 0.0)
        told = effect - _seen_by(model, state)
        if verdict == "cluster-wide":
            told = np.full(effect.size, float(np.median(told)))
        evidence = _evidence(state, changes, who, step)
        if verdict == "slow" and evidence["data_share"] > _INPUT_BOUND:
            verdict = "input-bound"
        alarm = Alarm(
            factors={rank: math.exp(told[rank]) for rank in who.nonzero()[0].tolist()},
            verdict=verdict,
            reason=_reason(verdict, evidence),
            evidence=evidence,
        )
        past = _remember(past, effect, who, state.num_clean, int(state.watch.lasting[who].max()), self)
        past = replace(past, alarm_step=step.step, quiet_until=state.num_clean + self.cooldown_steps)
        footing = replace(
            footing,
            reference=frozen(footing.reference + effect),
            unsettled=frozen(np.where(who, SETTLING, footing.unsettled)),
        )
        return alarm, replace(state, footing=footing, watch=state.watch.forget(who), past=past)


def _is_common(state: TriggerState, changes: Changes) -> bool:
    """Return whether all ranks changed alike."""
    effect, n = changes.effect, changes.effect.size
    if n < 2 or not changes.is_known.all() or not (np.sign(effect) == np.sign(effect[0])).all():
        return False
    # The range of as many medians of few samples as there are ranks, had they all moved alike.
    extremes = -2 * float(ndtri(0.25 / n))
    tolerance = max(math.log(1.15), extremes * float(state.baseline.spread.max()))
    return bool(np.ptp(effect) < tolerance and np.abs(effect).min() > _SNAP)


def _seen_by(model: Model | None, state: TriggerState) -> FloatArray:
    """Return what part of the changes (log factor, shape ``[n]``) the split's model knows already."""
    assert state.footing is not None
    # At a new size the model has learnt from the very samples that are in question.
    is_known = state.num_clean - state.footing.since >= _KNOWN_FOR
    expected = model.own_s(state.footing.sizes) if model is not None and is_known else None
    if expected is None:
        return np.zeros(state.past.level.size)
    ahead = np.log(np.maximum(expected, 1e-6) * 1e6) - state.footing.reference - state.baseline.centre
    unseen: FloatArray = np.where(np.abs(ahead) > _DISAGREEMENT, ahead, 0.0)
    return unseen


def _remember(past: Past, effect: FloatArray, who: BoolArray, now: int, age: int, response: Response) -> Past:
    """Return the past with these changes in it: levels, when they began and ended, and how long a recovery is held."""
    level = np.where(who, past.level + effect, past.level)
    level[np.abs(level) < 1e-9] = 0.0
    began, ended, hold = past.began.copy(), past.ended.copy(), past.hold.copy()
    lengths = past.lengths
    for rank in who.nonzero()[0]:
        if level[rank] > 0 and past.level[rank] <= 0:
            began[rank] = now - age
            gap = began[rank] - ended[rank]
            if ended[rank] >= 0 and gap <= max(response.flap_steps, 8 * hold[rank]):
                hold[rank] = min(2 * hold[rank], response.max_hold_steps)
            else:
                hold[rank] = max(hold[rank] // 2, response.cooldown_steps)
        elif level[rank] <= 0 and past.level[rank] > 0:
            ended[rank] = now - age
            lengths = (*lengths, max(int(now - age - began[rank]), 1))
    return replace(
        past,
        level=frozen(level),
        began=frozen(began),
        ended=frozen(ended),
        hold=frozen(hold),
        lengths=lengths[-NUM_LENGTHS:],
    )


def _evidence(state: TriggerState, changes: Changes, ranks: BoolArray, step: StepObserved) -> dict[str, float]:
    """Return the figures behind the clearest of these ranks' changes."""
    rank, watch = changes.clearest(ranks), state.watch
    effect, count = float(changes.effect[rank]), int(changes.num_samples[rank])
    window = state.baseline.window(rank)[None]
    short = watch.recent[-min(SHORT, max(count, 1)) :, :, rank]
    long = watch.recent[-max(min(LONG, int(watch.num_recent[rank])), 1) :, 0, rank]
    first, second = compare_ranks(short[None, :, 0], window), compare_ranks(long[None], window)
    sign = 1.0 if effect > 0 else -1.0
    excess_us = float(step.own_us[rank]) * (1 - math.exp(-effect))
    data_excess_us = float(np.median(short[:, 1])) - float(state.baseline.data_us[rank])
    return {
        "rank": float(rank),
        "effect": effect,
        "num_samples": float(count),
        "num_ranks": float(np.count_nonzero(ranks)),
        "num_lasting": float(watch.lasting[rank]),
        "z_short": float(first.z[0]),
        "z_long": float(second.z[0]),
        "p_value": one_sided_p(sign * max(sign * float(first.z[0]), 0.0)),
        "cliffs_delta": float(first.cliffs_delta[0]),
        "data_share": min(max(data_excess_us / excess_us, 0.0), 1.0) if excess_us > 0 else 0.0,
    }


def _reason(verdict: str, evidence: Mapping[str, float]) -> str:
    factor, others = math.exp(evidence["effect"]), round(evidence["num_ranks"]) - 1
    who = f"rank {evidence['rank']:.0f}" + (f" (with {others} more)" if others else "")
    match verdict:
        case "cluster-wide":
            return f"all ranks take {factor:.2f} times as long as before: no split is better for that"
        case "recovered":
            return f"{who} takes {factor:.2f} times as long as before: it has become faster"
        case "input-bound":
            return f"{who} waits for data: its steps take {factor:.2f} times as long as before"
        case _:
            return f"{who} takes {factor:.2f} times as long as before in its own computation"
