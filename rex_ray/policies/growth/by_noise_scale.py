"""Growth of the global batch by the gradient noise scale: what is remembered, when it is judged, what is asked for.

Workers measure gradient norms on some steps only; between them nothing happens here. Four measured steps are a
block, and at the end of each block the rule is asked. Norms of warm-up steps count, since only *times* warm up;
those of partial and skipped steps do not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from rex_ray.core.changed import changed
from rex_ray.core.errors import ConfigError
from rex_ray.core.lr_scaling import LRRule, lr_factor
from rex_ray.core.noise_scale import read_moments
from rex_ray.core.observations import AllocationApplied, StepObserved
from rex_ray.core.types import Allocation, Problem, StepFlag, read_only
from rex_ray.policies.base import Finding
from rex_ray.policies.growth.blocks import BLOCK_STEPS, NoiseBlocks, block_statistic
from rex_ray.policies.growth.egmd import BET, Egmd
from rex_ray.policies.growth.limits import largest_batch, most_rows, smallest_batch
from rex_ray.policies.growth.pace import BatchTimes, Pace
from rex_ray.policies.growth.rules import (
    UNKNOWN,
    UNTIMED,
    WITHIN_EPOCH,
    GoodputOptimal,
    GrowTenPercent,
    GrowthRule,
    GrowthView,
    Hold,
    Target,
)
from rex_ray.policies.growth.state import (
    GrowthState,
    at_another_batch,
    figures,
    is_banned,
    known,
    left,
    trial_of,
    tried,
    with_fresh_forecast,
    without_bets,
)
from rex_ray.policies.limits import whole_rows
from rex_ray.policies.seams import BatchPlan, Model

__all__ = ["LRChoice", "NoiseScaleGrowth", "RuleName", "make_growth"]

LRChoice: TypeAlias = Literal["auto", "adascale", "linear", "sqrt", "adam", "none"]

RuleName: TypeAlias = Literal["egmd", "growth10", "goodput"]

_OFF_STEPS = 64

LR_REST_LOOKS = 2
"""Looks from one change of the learning rate to the next: a switch takes most of the first one to arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScaleGrowth:
    """A rule, asked at the end of every block of measured steps, and the learning rate that goes with its batch.

    Attributes:
        rule: names the batch.
        lr_rule: how the learning rate follows; ``"auto"``: AdaScale for SGD, its root for the Adam family.
        lr_tolerance: a factor that the noise scale has since moved by more than this fraction is set afresh, the batch
            unchanged. Never doing so costs several per cent of a run, see ``docs/methods.md``.
    """

    rule: GrowthRule = field(default_factory=Egmd)
    lr_rule: LRChoice = "auto"
    lr_tolerance: float = 0.03

    def __post_init__(self) -> None:
        if self.lr_rule not in get_args(LRChoice):
            raise ConfigError(f"lr_rule must be one of {', '.join(get_args(LRChoice))}, got {self.lr_rule!r}")
        if not self.lr_tolerance > 0.0:
            raise ConfigError(f"lr_tolerance must be a positive fraction, e.g. 0.1, got {self.lr_tolerance}")

    def init(
        self, problem: Problem, prior: GrowthState | None, current: Allocation | None
    ) -> tuple[BatchPlan, GrowthState]:
        """Begin at the reference batch, or at the one resumed from. The pooled noise scale carries over, and bans.

        A batch that grew on more workers, under a higher cap or in other multiples is cut to what this group can run.
        """
        num_rows = problem.global_batch_size if current is None else current.global_batch_size
        factor = 1.0 if current is None else current.lr_factor
        state = GrowthState(problem=problem, num_rows=num_rows, lr_factor=factor)
        most = whole_rows(problem, min(num_rows, most_rows(problem)))
        if num_rows != most:
            phi = None if prior is None else prior.blocks.noise_scale
            factor = min(factor, self._factor(state, most, phi)[1])
            num_rows = most
            state = changed(state, num_rows=num_rows, lr_factor=factor)
        if prior is not None:
            state = changed(
                state,
                blocks=prior.blocks.after_change(),
                health=prior.health.recovered(),
                num_looks=prior.num_looks,
                lr_look=prior.num_looks,
                banned_rows=prior.banned_rows,
                banned_until=prior.banned_until,
                num_bans=prior.num_bans,
                largest_run=prior.largest_run,
            )
        return BatchPlan(global_batch_size=num_rows, lr_factor=factor), state

    def observe(
        self, state: GrowthState, step: StepObserved, model: Model | None
    ) -> tuple[BatchPlan | Finding | None, GrowthState]:
        """Take in a measured step; at the end of a block, judge. What was asked for stays until it is applied."""
        is_skipped = StepFlag.SKIPPED in step.flags
        if step.flags and StepFlag.OTHER_PARAMETERS in step.flags:
            state = changed(without_bets(state), blocks=state.blocks.afresh())
        if step.global_sq_norm is None and step.weighted_sq_norm is None and not is_skipped:
            if state.health.num_skipped:
                state = changed(state, health=state.health.unskipped())
            return state.plan or _said_if_off(state, step), state
        health = state.health.take(step) if self.rule.is_tried else state.health
        if is_skipped or StepFlag.PARTIAL in step.flags:
            state = changed(state, health=health)
            return self._nursed(state) if is_skipped and health.complaint else (state.plan, state)
        before, read = state.blocks, read_moments(step)
        if read == "lossy reduction":
            state = without_bets(state)
        blocks, is_closed = before.take(read, self.rule.window, is_flagged=step.num_norm_steps > 1)
        state = changed(state, blocks=blocks, health=health, pace=state.pace.take(step))
        if is_closed:
            return self._look(self._wagered(state, before), step, model)
        if blocks.fault and blocks.num_faults % BLOCK_STEPS == 1:
            return state.plan or self._unread(state), state
        return state.plan, state

    def applied(self, state: GrowthState, applied: AllocationApplied) -> GrowthState:
        """Begin afresh at another batch; at the same one, only the times do."""
        allocation = applied.allocation
        num_rows, shares = allocation.global_batch_size, allocation.local_batch_sizes
        asked = state
        if allocation.lr_factor != state.lr_factor:
            state = changed(state, lr_factor=allocation.lr_factor, lr_look=state.num_looks, plan=None)
        if num_rows != state.num_rows:
            trial = trial_of(asked, num_rows) if self.rule.is_tried else None
            return at_another_batch(state, num_rows, shares, trial)
        return state if shares == state.shares else changed(state, shares=shares, pace=Pace(), forecast={})

    def _wagered(self, state: GrowthState, before: NoiseBlocks) -> GrowthState:
        """Bet on the sign of the block that has just ended, unless it is one to skip."""
        blocks = state.blocks
        if blocks.num_blocks == before.num_blocks or not self.rule.is_betting:
            return state
        above = block_statistic(blocks.noise[-1], blocks.signal[-1], 2 * state.num_rows, "linear")
        wealth = read_only(BET.bet(state.wealth, state.num_bets, above), float)
        return changed(state, wealth=wealth, num_bets=state.num_bets + 1)

    def _look(
        self, state: GrowthState, step: StepObserved, model: Model | None
    ) -> tuple[BatchPlan | Finding, GrowthState]:
        state = with_fresh_forecast(state)
        view = GrowthView(
            problem=state.problem,
            num_rows=state.num_rows,
            smallest=min(smallest_batch(state.problem), state.num_rows),
            largest=largest_batch(state.problem),
            blocks=state.blocks,
            times=BatchTimes(
                model=model,
                pace=state.pace,
                global_batch_size=state.num_rows,
                largest_run=max(state.largest_run, state.num_rows),
                # Who was once disappointed hopes no more.
                optimism=0.0 if state.num_bans else self.rule.optimism,
                forecast=dict(state.forecast),
            ),
            wealth=state.wealth,
            num_bets=state.num_bets,
            is_new_epoch=step.epoch != state.epoch,
        )
        state = changed(state, num_looks=state.num_looks + 1)
        state, found = tried(state, view.times)
        if state.retreat_rows or state.health.complaint:
            return self._nursed(state)
        answer = self.rule.decide(view)
        state = changed(state, forecast=view.times.forecast)
        if answer.verdict == WITHIN_EPOCH and state.plan is not None:
            return state.plan, state
        if answer.verdict not in (UNKNOWN, UNTIMED):
            state = changed(state, epoch=step.epoch)
        if isinstance(answer, Target):
            answer = _held(state, answer)
        if isinstance(answer, Target):
            plan = self._plan(state, answer)
        else:
            refreshed = self._refreshed(state)
            if refreshed is None:
                finding = self._finding(state, answer.verdict, answer.reason, {**found, **answer.evidence})
                return finding, changed(state, plan=None)
            plan = refreshed
        return plan, changed(state, plan=plan)

    def _nursed(self, state: GrowthState) -> tuple[BatchPlan | Finding, GrowthState]:
        """Leave a batch that measured worse, or at which training suffers, while there is a smaller one to go to."""
        smallest = smallest_batch(state.problem)
        complaint = state.health.complaint
        if not state.retreat_rows and state.num_rows > smallest:
            half = whole_rows(state.problem, state.num_rows // 2)
            state = left(state, max(half, smallest), complaint)
        if not state.retreat_rows:
            return self._finding(state, "keep: training suffers", complaint), changed(state, plan=None)
        phi = state.blocks.noise_scale
        target = Target(num_rows=state.retreat_rows, noise_scale=phi or 0.0, reason=state.retreat_reason)
        plan = self._plan(state, target)
        return plan, changed(state, plan=plan)

    def _plan(self, state: GrowthState, target: Target) -> BatchPlan:
        rule, factor = self._factor(state, target.num_rows, target.noise_scale)
        reason = f"{state.num_rows} -> {target.num_rows} rows: {target.reason}; {known(state)}"
        return BatchPlan(
            global_batch_size=target.num_rows,
            lr_factor=factor,
            reason=f"{reason}; learning rate x{factor:.4g} by the rule {rule!r}",
            predicted_gain=target.predicted_gain,
            evidence=figures(state) | dict(target.evidence) | {"lr_factor": factor},
        )

    def _refreshed(self, state: GrowthState) -> BatchPlan | None:
        """Set the learning rate afresh where the noise scale has moved what it should be; the batch stays."""
        phi = state.blocks.noise_scale
        if phi is None or state.num_rows == state.problem.global_batch_size:
            return None
        if state.num_looks - state.lr_look < LR_REST_LOOKS:
            return None
        rule, factor = self._factor(state, state.num_rows, phi)
        if rule not in ("adascale", "adam") or abs(factor / state.lr_factor - 1) <= self.lr_tolerance:
            return None
        return BatchPlan(
            global_batch_size=state.num_rows,
            lr_factor=factor,
            reason=f"{known(state)}: learning rate x{factor:.4g} instead of x{state.lr_factor:.4g} by the rule "
            f"{rule!r}, the batch stays at {state.num_rows} rows",
            evidence=figures(state) | {"lr_factor": factor},
        )

    def _factor(self, state: GrowthState, num_rows: int, noise_scale: float | None) -> tuple[LRRule, float]:
        usual: LRRule = "adam" if state.problem.optimizer == "adam" else "adascale"
        rule: LRRule = usual if self.lr_rule == "auto" else self.lr_rule
        return rule, lr_factor(rule, num_rows, state.problem.global_batch_size, noise_scale)

    def _unread(self, state: GrowthState) -> Finding:
        fault = state.blocks.fault
        if fault == "lossy reduction":
            reason = "the reduced gradient is larger than its parts allow: a lossy hook adds noise of its own"
            return self._finding(state, "noise scale unavailable", reason)
        return self._finding(state, UNKNOWN, f"{fault} in the newest of {state.blocks.num_dropped} steps left out")

    def _finding(
        self, state: GrowthState, verdict: str, reason: str, evidence: dict[str, float] | None = None
    ) -> Finding:
        if state.blocks.is_flagged:
            verdict, reason = f"{verdict} (one-worker estimate)", f"{reason}; one worker, gradients of two steps"
        evidence = figures(state) | (evidence or {}) | {"lr_factor": state.lr_factor}
        return Finding(part="growth", verdict=verdict, reason=f"{reason}; {known(state)}", evidence=evidence)


def _held(state: GrowthState, target: Target) -> Target | Hold:
    """Hold a larger batch back while the present one is on trial, or when it was left not long ago."""
    if target.num_rows > state.num_rows and state.trial is not None:
        why = f"the clock has not yet confirmed {state.num_rows} rows: {target.reason}"
        return Hold(verdict="keep: batch on trial", reason=why, evidence=target.evidence)
    if is_banned(state, target.num_rows):
        looks = state.banned_until - state.num_looks
        why = f"{state.banned_rows} rows and more are not tried for {looks} more looks, some were left: {target.reason}"
        return Hold(verdict="keep: batch was left before", reason=why, evidence=target.evidence)
    return target


def _said_if_off(state: GrowthState, step: StepObserved) -> Finding | None:
    """Say now and then that nothing is measured, where nothing ever was."""
    blocks = state.blocks
    if step.step % _OFF_STEPS or blocks.num_open or blocks.num_pooled or blocks.num_dropped:
        return None
    return Finding(part="growth", verdict=UNKNOWN, reason="gradient norms are not measured")


def make_growth(rule: RuleName, egmd: Egmd, lr_rule: LRChoice, lr_tolerance: float = 0.03) -> NoiseScaleGrowth:
    """Build growth by the name of its rule; the others than ``egmd`` take its window, and its gain where they ask one.

    Raises:
        ConfigError: a name that there is not.
    """
    if rule not in get_args(RuleName):
        raise ConfigError(f"option 'growth_rule' must be one of {', '.join(get_args(RuleName))}, got {rule!r}")
    rules: dict[RuleName, GrowthRule] = {
        "egmd": egmd,
        "growth10": GrowTenPercent(window=egmd.window),
        "goodput": GoodputOptimal(min_gain=egmd.min_gain, window=egmd.window),
    }
    return NoiseScaleGrowth(rule=rules[rule], lr_rule=lr_rule, lr_tolerance=lr_tolerance)
