"""What is done about a change of speed: whom it concerns, whether it is worth a move, and what is said about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri

from rex_ray.core.errors import ConfigError
from rex_ray.core.observations import StepObserved
from rex_ray.core.rank_tests import compare_ranks, one_sided_p
from rex_ray.policies.base import Finding
from rex_ray.policies.seams import Alarm, Model
from rex_ray.policies.trigger_gate import expected_use_steps, stakes
from rex_ray.policies.trigger_memory import LONG, NUM_LENGTHS, SHORT, Past, TriggerState, frozen

__all__ = ["Change", "Response"]

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
class Change:
    """One rank's change of speed: the log factor ``effect``, from the median of ``num_samples``.

    ``is_sure``: a test raised it for this rank; ``joins``: or it moved along with one that was.
    """

    rank: int
    effect: float
    num_samples: int
    is_sure: bool
    joins: bool


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
        self, state: TriggerState, changes: Sequence[Change], step: StepObserved, model: Model | None
    ) -> tuple[Alarm | Finding | None, TriggerState]:
        """Answer changes of which at least one is sure."""
        common = _common_effect(state, changes)
        if common is not None:
            return self._alarm(
                state, [replace(change, effect=common) for change in changes], step, model, "cluster-wide"
            )
        moving = [change for change in changes if change.is_sure or change.joins]
        ready = [change for change in moving if not self._is_flapping(state, change)]
        if not any(change.is_sure for change in ready):
            held = _evidence(state, moving, step)
            reason = (
                f"rank {moving[0].rank} is back for {held['num_lasting']:.0f} steps; it soon was slow again of late"
            )
            return self._hold(state, "held: flapping", reason, held)
        slower = [change for change in ready if change.effect > 0]
        # A rank that goes back and forth is moved for good: its recoveries are held, so the move pays again each time.
        flaps = any(state.past.hold[change.rank] > self.cooldown_steps for change in slower)
        if slower and not flaps and not any(change.effect < 0 and change.is_sure for change in ready):
            refusal = self._too_dear(state, slower, step)
            if refusal is not None:
                return refusal
        verdict = "slow" if slower else "recovered"
        return self._alarm(state, ready, step, model, verdict)

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
        overtaken = waited < _OVERTAKEN * past.lag_steps
        return replace(
            past, alarm_step=-1, is_review_due=overtaken, lag_steps=past.lag_steps + (waited - past.lag_steps) / 4
        )

    def _is_flapping(self, state: TriggerState, change: Change) -> bool:
        past, rank = state.past, change.rank
        return bool(
            past.level[rank] > 0
            and change.effect < 0
            and state.watch.lasting[rank] < past.hold[rank]
            and past.hold[rank] > self.cooldown_steps
        )

    def _too_dear(
        self, state: TriggerState, slower: Sequence[Change], step: StepObserved
    ) -> tuple[Finding | None, TriggerState] | None:
        """Return a refusal where the slow steps seen so far do not yet justify a move."""
        assert state.footing is not None
        healthy = np.exp(state.footing.reference + state.baseline.centre)
        factor = np.ones(healthy.size)
        for change in slower:
            factor[change.rank] = math.exp(change.effect)
        rows = state.footing.sizes
        some = rows > 0
        at_stake = stakes(rows[some], healthy[some], (healthy * factor)[some])
        age = max(int(state.watch.lasting[change.rank]) for change in slower)
        past = state.past
        away = past.lag_steps + self.cooldown_steps
        cost = self.switch_cost_steps * at_stake.healthy_us + away * at_stake.loss_us
        # Too few events to learn from: what was lost so far is the best guess of what is still to be lost.
        use = float(age)
        if len(past.lengths) >= self.min_lengths:
            use = expected_use_steps(past.lengths, age, past.lag_steps)
        seen = use * at_stake.gain_us
        if at_stake.gain_us <= 0 or seen >= cost:
            return None
        evidence = {
            **_evidence(state, slower, step),
            "seen_us": seen,
            "cost_us": cost,
            "gain_us": at_stake.gain_us,
            "loss_us": at_stake.loss_us,
        }
        reason = f"rank {slower[0].rank} has been slow for {age} steps, which cost less than a move that comes too late"
        return self._hold(state, "held: cost", reason, evidence)

    def _hold(
        self, state: TriggerState, verdict: str, reason: str, evidence: dict[str, float]
    ) -> tuple[Finding | None, TriggerState]:
        if state.num_clean - state.past.said < SHORT and state.past.said >= 0:
            return None, state
        finding = Finding(part="trigger", verdict=verdict, reason=reason, evidence=evidence)
        return finding, replace(state, past=replace(state.past, said=state.num_clean))

    def _alarm(
        self, state: TriggerState, changes: Sequence[Change], step: StepObserved, model: Model | None, verdict: str
    ) -> tuple[Alarm, TriggerState]:
        """Raise the alarm, and measure from now on against the new speed."""
        assert state.footing is not None
        past, footing = state.past, state.footing
        n = past.level.size
        effect, who = np.zeros(n), np.zeros(n, dtype=np.bool_)
        for change in changes:
            back = abs(past.level[change.rank] + change.effect) < _SNAP and past.level[change.rank] != 0
            effect[change.rank] = -past.level[change.rank] if back else change.effect
            who[change.rank] = True
        told = effect - _seen_by(model, state)
        evidence = _evidence(state, changes, step)
        shown = max(changes, key=lambda change: (change.is_sure, abs(change.effect)))
        if verdict == "slow" and evidence["data_share"] > _INPUT_BOUND:
            verdict = "input-bound"
        age = max(int(state.watch.lasting[change.rank]) for change in changes)
        alarm = Alarm(
            factors={int(rank): math.exp(told[rank]) for rank in who.nonzero()[0]},
            verdict=verdict,
            reason=_reason(verdict, shown, changes),
            evidence=evidence,
        )
        past = _remember(past, effect, who, state.num_clean, age, self)
        past = replace(
            past,
            alarm_step=step.step,
            quiet_until=state.num_clean + self.cooldown_steps,
        )
        footing = replace(
            footing,
            reference=frozen(footing.reference + effect),
            unsettled=frozen(np.where(who, SHORT, footing.unsettled)),
        )
        return alarm, replace(state, footing=footing, watch=state.watch.forget(who), past=past)


def _common_effect(state: TriggerState, changes: Sequence[Change]) -> float | None:
    """Return the effect that all ranks share, or None where some moved and others did not."""
    effects = np.array([change.effect for change in changes])
    if len(changes) < state.past.level.size or len(changes) < 2:
        return None
    # The range of as many medians of few samples as there are ranks, had they all moved alike.
    extremes = -2 * float(ndtri(0.25 / len(changes)))
    tolerance = max(math.log(1.15), extremes * float(state.baseline.spread.max()))
    alike = (
        np.ptp(effects) < tolerance and np.abs(effects).min() > _SNAP and abs(np.sign(effects).sum()) == effects.size
    )
    return float(np.median(effects)) if alike else None


def _seen_by(model: Model | None, state: TriggerState) -> np.ndarray:
    """Return what part of the changes (log factor, shape ``[n]``) the split's model knows already."""
    assert state.footing is not None
    # At a new size the model has learnt from the very samples that are in question.
    is_known = state.num_clean - state.footing.since >= _KNOWN_FOR
    expected = model.own_s(state.footing.sizes) if model is not None and is_known else None
    if expected is None:
        return np.zeros(state.past.level.size)
    ahead = np.log(np.maximum(expected, 1e-6) * 1e6) - state.footing.reference - state.baseline.centre
    return np.where(np.abs(ahead) > _DISAGREEMENT, ahead, 0.0)


def _remember(past: Past, effect: np.ndarray, who: np.ndarray, now: int, age: int, response: Response) -> Past:
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


def _evidence(state: TriggerState, changes: Sequence[Change], step: StepObserved) -> dict[str, float]:
    """Return the figures behind the clearest change."""
    shown = max(changes, key=lambda change: (change.is_sure, abs(change.effect)))
    rank, watch = shown.rank, state.watch
    window = state.baseline.window(rank)[None]
    short = watch.recent[-min(SHORT, max(shown.num_samples, 1)) :, :, rank]
    long = watch.recent[-max(min(LONG, int(watch.num_recent[rank])), 1) :, 0, rank]
    first, second = compare_ranks(short[None, :, 0], window), compare_ranks(long[None], window)
    sign = 1.0 if shown.effect > 0 else -1.0
    data_excess = float(np.median(short[:, 1])) - float(state.baseline.data_us[rank])
    own_us = float(step.own_us[rank])
    excess = own_us * (1 - math.exp(-shown.effect))
    return {
        "rank": float(rank),
        "effect": shown.effect,
        "num_samples": float(shown.num_samples),
        "num_ranks": float(len(changes)),
        "z_short": float(first.z[0]),
        "z_long": float(second.z[0]),
        "p_value": one_sided_p(sign * max(sign * float(first.z[0]), 0.0)),
        "cliffs_delta": float(first.cliffs_delta[0]),
        "data_share": min(max(data_excess / excess, 0.0), 1.0) if sign > 0 and excess > 0 else 0.0,
        "num_lasting": float(watch.lasting[rank]),
    }


def _reason(verdict: str, shown: Change, changes: Sequence[Change]) -> str:
    factor = math.exp(shown.effect)
    others = f" (with {len(changes) - 1} others)" if len(changes) > 1 else ""
    match verdict:
        case "cluster-wide":
            return f"all ranks take {factor:.2f} times as long as before: no split is better for that"
        case "recovered":
            return f"rank {shown.rank}{others} takes {factor:.2f} times as long as before: it has become faster"
        case "input-bound":
            return f"rank {shown.rank}{others} waits for data: its steps take {factor:.2f} times as long as before"
        case _:
            return f"rank {shown.rank}{others} takes {factor:.2f} times as long as before in its own computation"
