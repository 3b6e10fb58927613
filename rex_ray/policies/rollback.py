"""Takes back what measured worse: a re-split is a bet on the curves, and the group's own steps decide it.

The wrapped policy never learns that it was overruled; it sees the old shares applied, as it would any others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from rex_ray.core.changed import changed
from rex_ray.core.errors import ConfigError
from rex_ray.core.observations import AllocationApplied, Observation, StepObserved
from rex_ray.core.rank_tests import compare_ranks
from rex_ray.core.types import Allocation, FloatArray, IntArray, Problem, StepFlag, frozen
from rex_ray.policies.base import ChangeGlobalBatch, Decision, Finding, Keep, Policy, Proposal, Reallocate
from rex_ray.policies.limits import are_alike
from rex_ray.policies.patience import is_due

__all__ = ["RollBack", "RollBackState"]

StateT = TypeVar("StateT")

_ONSET = 3
"""Steps to either side of a switch that tell whether a rank became slower with it."""

_LONGEST_BAN = 16
"""Times ``ban_steps``; each ban of a run is twice as long as the one before."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RollBackState(Generic[StateT]):
    """The inner state, and the comparison under way.

    Attributes:
        inner: the wrapped policy's state.
        present: what the group is known to run.
        before: what it ran until the switch that is being judged; None when none is.
        before_us: own times of its last clean steps, ``num_before`` of shape ``[n]``.
        recent_us: own times of the newest clean steps under ``present``, at most ``num_after`` of shape ``[n]``.
        came_slow: ranks that became slower with the very switch that is being judged, shape ``[n]``; empty: not known.
        trial: shares that a search wants run, and judges by itself.
        condemned: shares that measured worse, until the group has left them.
        condemned_step: newest step at that judgement.
        evidence: the figures of it.
        banned: shares that are not proposed again for a while.
        banned_until: step from which they may be.
        num_bans: how often shares were taken back.
        newest_step: newest step seen.
    """

    inner: StateT
    present: Allocation | None = None
    before: Allocation | None = None
    before_us: tuple[IntArray, ...] = ()
    recent_us: tuple[IntArray, ...] = ()
    came_slow: tuple[bool, ...] = ()
    trial: tuple[int, ...] | None = None
    condemned: tuple[int, ...] | None = None
    condemned_step: int = 0
    evidence: dict[str, float] = field(default_factory=dict)
    banned: tuple[int, ...] | None = None
    banned_until: int = 0
    num_bans: int = 0
    newest_step: int = -1


@dataclass(frozen=True, slots=True)
class RollBack(Generic[StateT]):
    """Puts the old shares of a batch back when the new ones turn out slower.

    Judged are the last clean steps before a switch, when the cause of it was already at work, and the first clean
    ones after. Worse is a median of the slowest rank above the old one's by ``min_loss``, in steps that hardly
    overlap, unless some rank got slower on no more rows: that tells of a change from outside, which is the trigger's
    business, if it did not come with the very switch. Trials of a search are the search's to judge, and batches the
    growth's.

    Attributes:
        inner: the policy that proposes.
        min_loss: fraction of step time lost from which shares are taken back.
        num_before: clean steps that stand for the old shares.
        num_after: clean steps that stand for the new ones.
        min_delta: least Cliff's delta between the two; .8 of 8 against 16 steps is p < .001 if steps are independent.
            Steps that remember share a level, which is why ``min_loss`` has to be exceeded as well.
        ban_steps: steps for which the same shares are not proposed again, doubled with every ban.
    """

    inner: Policy[StateT]
    min_loss: float = 0.03
    num_before: int = 8
    num_after: int = 16
    min_delta: float = 0.8
    ban_steps: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.min_loss < 1:
            raise ConfigError(f"rollback's min_loss must be a fraction of step time in (0, 1), got {self.min_loss}")

    @property
    def name(self) -> str:
        """The inner policy's name."""
        return self.inner.name

    def init(
        self, problem: Problem, prior: RollBackState[StateT] | None = None, current: Allocation | None = None
    ) -> tuple[Proposal, RollBackState[StateT]]:
        """Begin with a worker group; see ``Policy.init``."""
        proposal, inner = self.inner.init(problem, prior.inner if prior else None, current)
        return proposal, RollBackState(inner=inner)

    def decide(
        self, state: RollBackState[StateT], observation: Observation, rng: np.random.Generator
    ) -> tuple[Decision, RollBackState[StateT]]:
        """Judge one observation; see ``Policy.decide``."""
        decision, inner = self.inner.decide(state.inner, observation, rng)
        trial = state.trial
        if isinstance(decision, Reallocate) and decision.search_id is not None:
            trial = decision.proposal.local_batch_sizes
        newest_step, recent_us, is_evidence = state.newest_step, state.recent_us, False
        if isinstance(observation, StepObserved):
            newest_step = observation.step
            is_evidence = self._is_evidence(state, observation)
            if is_evidence:
                recent_us = (*recent_us[1 - self.num_after :], frozen(observation.own_us))
        state = changed(state, inner=inner, trial=trial, newest_step=newest_step, recent_us=recent_us)
        if isinstance(observation, AllocationApplied):
            return decision, self._applied(state, observation)
        # Judged once, as soon as there are steps enough to compare.
        if is_evidence and state.before is not None and state.condemned is None and len(recent_us) >= self.num_after:
            state, finding = self._compare(state, state.before)
            if finding is not None:
                decision = replace(decision, findings=(*decision.findings, finding))
        return self._overrule(state, decision), state

    def _applied(self, state: RollBackState[StateT], applied: AllocationApplied) -> RollBackState[StateT]:
        old, new = state.present, applied.allocation
        if old is not None and old.local_batch_sizes == new.local_batch_sizes:
            return replace(state, present=new)  # another learning rate: the comparison goes on
        left = state.condemned is not None and new.local_batch_sizes != state.condemned
        ban = self.ban_steps * min(2**state.num_bans, _LONGEST_BAN)
        return replace(
            state,
            present=new,
            **self._comparison(state, new.local_batch_sizes),
            recent_us=(),
            trial=None,
            condemned=None if left else state.condemned,
            evidence={} if left else state.evidence,
            banned=state.condemned if left else state.banned,
            banned_until=applied.step + ban if left else state.banned_until,
            num_bans=state.num_bans + left,
        )

    def _comparison(self, state: RollBackState[StateT], new: tuple[int, ...]) -> dict[str, Any]:
        """Return what new shares are to be judged against, if at all.

        Shares that were slower from their first step on and were left before they were judged have proved nothing: what
        comes after them is measured against the shares before them. Else a method that goes on from bad shares to
        others as bad is never found out.
        """
        old, kept = state.present, state.before
        nothing = {"before": None, "before_us": (), "came_slow": ()}
        if old is None or state.condemned is not None or new in (state.trial, old.local_batch_sizes):
            return nothing
        if old.global_batch_size != sum(new):
            return nothing
        if kept is not None and new != kept.local_batch_sizes:
            came_slow = state.came_slow or self._came_slow(state)
            if any(came_slow):
                return {"came_slow": came_slow}
        if len(state.recent_us) < self.num_before:
            return nothing
        return {"before": old, "before_us": state.recent_us[-self.num_before :], "came_slow": ()}

    def _is_evidence(self, state: RollBackState[StateT], step: StepObserved) -> bool:
        """Whether a step is clean and has the present shares' rows."""
        if step.flags != StepFlag.NONE or state.present is None:
            return False
        return tuple(step.num_rows.tolist()) == state.present.local_batch_sizes

    def _compare(
        self, state: RollBackState[StateT], before: Allocation
    ) -> tuple[RollBackState[StateT], Finding | None]:
        assert state.present is not None, "steps of no allocation are no evidence"
        recent = np.array(state.recent_us)
        old_us, new_us = np.array(state.before_us).max(axis=1), recent.max(axis=1)
        loss = float(np.median(new_us) / max(1.0, float(np.median(old_us)))) - 1.0
        delta = float(compare_ranks([new_us], [old_us]).cliffs_delta[0])
        ranks = np.median(recent, axis=0)
        slowest = int(np.argmax(ranks))
        given = np.subtract(state.present.local_batch_sizes, before.local_batch_sizes)
        evidence = {
            "loss": loss,
            "effect": delta,
            "num_samples": float(len(recent)),
            "rows_given": float(given[slowest]),
        }
        judged = replace(state, before=None, before_us=())
        if loss <= self.min_loss or delta < self.min_delta:
            return judged, Finding(
                part="split",
                verdict="measured",
                reason=f"the new shares take {1 + loss:.3f} times as long as the old ones",
                evidence=evidence,
            )
        changed_speed = self._changed_speed(state, ranks, given)
        if changed_speed is not None:
            return judged, Finding(
                part="split",
                verdict="speed changed meanwhile",
                reason=f"steps take {1 + loss:.3f} times as long, but rank {changed_speed} got slower on no more rows",
                evidence=evidence,
            )
        # `before` stays: it is what to go back to.
        condemned = state.present.local_batch_sizes
        return replace(state, condemned=condemned, condemned_step=state.newest_step, evidence=evidence), None

    def _changed_speed(self, state: RollBackState[StateT], median_us: FloatArray, given: IntArray) -> int | None:
        """Return a rank that got slower on no more rows, and not with the switch itself; None if there is none.

        One that was slower from the very first step under the new shares on is no such rank: some sizes are slow ones,
        as those that are no multiple of a kernel's tile. If it was a coincidence, the old shares will say so.
        """
        old_us = np.median(np.array(state.before_us), axis=0)
        came_slow = np.array(state.came_slow or self._came_slow(state))
        is_slower = (median_us > (1 + self.min_loss) * old_us) & (given <= 0) & ~came_slow
        return int(np.argmax(np.where(is_slower, median_us, 0))) if is_slower.any() else None

    def _came_slow(self, state: RollBackState[StateT]) -> tuple[bool, ...]:
        """Say of each rank whether its first steps under new shares were slower than all of its last before them."""
        first_us, before_us = np.array(state.recent_us[:_ONSET]), np.array(state.before_us)
        if len(first_us) < _ONSET:
            return (False,) * len(state.before_us[0])
        old_us, new_us = np.median(before_us, axis=0), np.median(first_us, axis=0)
        between_us = np.sqrt(old_us * new_us)
        is_clean = (first_us.min(axis=0) > between_us) & (before_us[-_ONSET:].max(axis=0) < between_us)
        return tuple((is_clean & (new_us > (1 + self.min_loss) * old_us)).tolist())

    def _is_mere_rate(self, state: RollBackState[StateT], decision: ChangeGlobalBatch) -> bool:
        present = state.present
        return present is not None and decision.proposal.local_batch_sizes == present.local_batch_sizes

    def _overrule(self, state: RollBackState[StateT], decision: Decision) -> Decision:
        """Ask for the old shares until the group runs them; hold back what was taken back before."""
        if isinstance(decision, ChangeGlobalBatch) and not self._is_mere_rate(state, decision):
            return decision
        is_asking = state.condemned is not None and is_due(1 + state.newest_step - state.condemned_step)
        if is_asking and state.before is not None and state.present is not None:
            loss = state.evidence["loss"]
            return Reallocate(
                proposal=Proposal(local_batch_sizes=state.before.local_batch_sizes, lr_factor=state.present.lr_factor),
                reason=f"rolled back: the new shares measured {loss:.1%} slower than the old ones",
                predicted_gain=loss / (1 + loss),
                evidence=dict(state.evidence),
                findings=decision.findings,
            )
        if (
            isinstance(decision, Reallocate)
            and decision.search_id is None
            and state.newest_step < state.banned_until
            and state.banned is not None
            and are_alike(decision.proposal.local_batch_sizes, state.banned)
        ):
            wait = state.banned_until - state.newest_step
            return Keep(
                reason=f"held back (measured worse before; {wait} more steps): {decision.reason}",
                findings=decision.findings,
            )
        return decision
