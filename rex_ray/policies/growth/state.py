"""What growth remembers of a group, and how that changes with what is applied, tried and left again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rex_ray.core.changed import changed
from rex_ray.core.types import FloatArray, Problem, read_only
from rex_ray.policies.growth.blocks import NoiseBlocks, rows_text
from rex_ray.policies.growth.egmd import BET
from rex_ray.policies.growth.health import Health
from rex_ray.policies.growth.pace import BatchTimes, BatchTrial, Pace
from rex_ray.policies.seams import BatchPlan

__all__ = [
    "GrowthState",
    "at_another_batch",
    "figures",
    "is_banned",
    "known",
    "left",
    "trial_of",
    "tried",
    "with_fresh_forecast",
    "without_bets",
]

WORSE = 0.02
"""A new batch is worse when it loses this fraction of measured goodput in two windows of steps: noise hardly does."""

BAN_LOOKS, LONGEST_BAN_LOOKS = 16, 256
"""Looks for which a batch that was left is not tried again; doubled every time."""


FORECAST_LOOKS = 24
"""Looks for which forecast times stand, 384 steps with norms at every fourth: other shares or another batch end them
sooner, and exact splits of a dozen batches cost more than all else that growth does in so many steps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GrowthState:
    """What is known of the noise, the times and the present batch.

    Attributes:
        problem: the group and its limits.
        num_rows: global batch that the group is known to run.
        lr_factor: its learning-rate factor.
        blocks: evidence of the noise.
        health: evidence that training suffers.
        pace: measured times of the present shares.
        shares: these shares.
        wealth: the anytime-valid test's, read-only.
        num_bets: looks behind it.
        trial: a larger batch that is yet to prove itself.
        plan: what the last look asked for; stands until applied or judged again.
        num_looks: ends of blocks so far.
        lr_look: look at which the learning-rate factor last changed.
        banned_rows: batches from this one on are not to be tried.
        banned_until: look from which it may be.
        num_bans: batches that were left.
        retreat_rows: batch to go back to, until it is applied; 0: none.
        retreat_reason: why.
        epoch: epoch of the last look that could judge.
        forecast: own times of batches as the curves had them at look ``forecast_look``, by their rows; None: beyond.
        forecast_look: see there.
        largest_run: the largest batch that was ever run.
    """

    problem: Problem
    num_rows: int
    lr_factor: float
    blocks: NoiseBlocks = field(default_factory=NoiseBlocks)
    health: Health = field(default_factory=Health)
    pace: Pace = field(default_factory=Pace)
    shares: tuple[int, ...] = ()
    wealth: FloatArray = field(default_factory=lambda: read_only(BET.begin(), float))
    num_bets: int = 0
    trial: BatchTrial | None = None
    plan: BatchPlan | None = None
    num_looks: int = 0
    lr_look: int = 0
    banned_rows: int = 0
    banned_until: int = 0
    num_bans: int = 0
    retreat_rows: int = 0
    retreat_reason: str = ""
    epoch: int = -1
    forecast: Mapping[int, float | None] = field(default_factory=dict)
    forecast_look: int = 0
    largest_run: int = 0


def trial_of(state: GrowthState, num_rows: int) -> BatchTrial | None:
    """Return what a larger batch has to beat from now on, by the clock; None for a smaller one, and while unknown."""
    expected_s = state.forecast.get(state.num_rows) or None
    before_s = state.pace.step_s if state.pace.is_known else None
    if before_s is None and expected_s is not None:
        before_s = expected_s + state.pace.sync_s
    if num_rows <= state.num_rows or before_s is None:
        return None
    plan = state.plan
    gain = plan.predicted_gain if plan is not None and plan.global_batch_size == num_rows else None
    return BatchTrial(before_rows=state.num_rows, before_s=before_s, expected_s=expected_s, predicted_gain=gain)


def at_another_batch(
    state: GrowthState, num_rows: int, shares: tuple[int, ...], trial: BatchTrial | None
) -> GrowthState:
    """The group runs another batch: evidence begins anew."""
    return changed(
        without_bets(state),
        num_rows=num_rows,
        largest_run=max(num_rows, state.largest_run),
        shares=shares,
        blocks=state.blocks.after_change(),
        health=state.health.recovered(),
        pace=Pace(sync_us=state.pace.sync_us),
        trial=trial,
        plan=None,
        forecast={},
        retreat_rows=0,
        retreat_reason="",
    )


def without_bets(state: GrowthState) -> GrowthState:
    """Return the wealth that was won on norms of another batch, or of other parameters: it says nothing of these."""
    return changed(state, wealth=read_only(BET.begin(), float), num_bets=0)


def with_fresh_forecast(state: GrowthState) -> GrowthState:
    """Drop forecast times that are too old, or that were made before any curve was known."""
    is_old = state.num_looks - state.forecast_look >= FORECAST_LOOKS
    if is_old or all(own_s is None for own_s in state.forecast.values()):
        return changed(state, forecast={}, forecast_look=state.num_looks)
    return state


def tried(state: GrowthState, times: BatchTimes) -> tuple[GrowthState, dict[str, float]]:
    """Compare a new batch with what was before it, once there are enough steps; twice worse, and it is left."""
    trial, step_s = state.trial, state.pace.step_s
    phi = state.blocks.noise_scale
    if trial is None or phi is None or step_s is None or not state.pace.is_known:
        return state, {}
    reference = state.problem.global_batch_size
    gain = trial.measured_gain(state.num_rows, times, step_s, reference, phi)
    evidence = {"measured_gain": gain} | (
        {} if trial.predicted_gain is None else {"predicted_gain": trial.predicted_gain}
    )
    if gain >= -WORSE:
        return changed(state, trial=None), evidence
    if trial.num_worse == 0:
        return changed(state, trial=trial.found_worse(), pace=Pace()), evidence
    reason = (
        f"measured goodput is {-gain:.1%} worse than at {trial.before_rows} rows, in two windows of steps; "
        f"{0.0 if trial.predicted_gain is None else trial.predicted_gain:.1%} better was predicted"
    )
    return left(changed(state, trial=None), trial.before_rows, reason), evidence


def left(state: GrowthState, retreat_rows: int, reason: str) -> GrowthState:
    """Ask for a smaller batch until it is applied, and ban the present one, longer every time."""
    looks = min(BAN_LOOKS * 2**state.num_bans, LONGEST_BAN_LOOKS)
    return changed(
        state,
        retreat_rows=retreat_rows,
        retreat_reason=reason,
        # Batches little smaller than one that was left are hardly better: from its half on, none is tried.
        banned_rows=max(retreat_rows, state.num_rows // 2) + 1,
        banned_until=state.num_looks + looks,
        num_bans=min(state.num_bans + 1, 16),
    )


def is_banned(state: GrowthState, num_rows: int) -> bool:
    """Whether ``num_rows`` would be a batch that was left not long ago, or an even larger one."""
    return state.num_looks < state.banned_until and num_rows >= state.banned_rows and num_rows > state.num_rows


def known(state: GrowthState) -> str:
    """Say what the noise scale is thought to be."""
    phi = state.blocks.noise_scale
    if phi is None:
        return "noise scale unknown"
    size = "beyond measure" if math.isinf(phi) else f"{rows_text(phi)} rows"
    return f"noise scale {size} from {state.blocks.num_pooled} blocks"


def figures(state: GrowthState) -> dict[str, float]:
    """Return the figures that belong to every judgement."""
    blocks = state.blocks
    counts = {"num_blocks": float(blocks.num_blocks), "num_dropped": float(blocks.num_dropped)}
    phi = blocks.noise_scale
    return counts if phi is None or math.isinf(phi) else counts | {"noise_scale": phi}
