"""Vetoes around a policy. They hold a proposal back; what they wrap never learns of it and asks again.

That is sound because a decision is a proposal: the inner state moves only with observations, and an allocation that
was held back is never observed as applied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from rex_ray.core.errors import ConfigError
from rex_ray.core.observations import AllocationApplied, Observation, StepObserved
from rex_ray.core.types import Allocation, Problem
from rex_ray.policies.base import ChangeGlobalBatch, Decision, Keep, Policy, Proposal, Reallocate

__all__ = ["Cooldown", "CooldownState", "Hysteresis"]

StateT = TypeVar("StateT")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CooldownState(Generic[StateT]):
    """The inner state; whether the group runs anything yet; the newest step known; and the first that may change."""

    inner: StateT
    has_begun: bool = False
    newest_step: int = 0
    free_from_step: int = 0


@dataclass(frozen=True, slots=True)
class Cooldown(Generic[StateT]):
    """Holds back every change for ``steps`` steps after the last one was applied. A group's first is none.

    Attributes:
        inner: the policy that proposes.
        steps: optimizer steps to wait.
    """

    inner: Policy[StateT]
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ConfigError(f"cooldown_steps must not be negative, got {self.steps}")

    @property
    def name(self) -> str:
        """The inner policy's name."""
        return self.inner.name

    def init(
        self, problem: Problem, prior: CooldownState[StateT] | None = None, current: Allocation | None = None
    ) -> tuple[Proposal, CooldownState[StateT]]:
        """Begin with a worker group; see ``Policy.init``."""
        proposal, inner = self.inner.init(problem, prior.inner if prior else None, current)
        return proposal, CooldownState(inner=inner)

    def decide(
        self, state: CooldownState[StateT], observation: Observation, rng: np.random.Generator
    ) -> tuple[Decision, CooldownState[StateT]]:
        """Judge one observation; see ``Policy.decide``."""
        decision, inner = self.inner.decide(state.inner, observation, rng)
        state = replace(state, inner=inner)
        match observation:
            case AllocationApplied():
                free = observation.step + self.steps if state.has_begun else observation.step
                state = replace(state, has_begun=True, newest_step=observation.step, free_from_step=free)
            case StepObserved():
                state = replace(state, newest_step=observation.step)
        wait = state.free_from_step - state.newest_step
        return _held_back(decision, f"cool-down for {wait} more steps") if wait > 0 else decision, state


@dataclass(frozen=True, slots=True)
class Hysteresis(Generic[StateT]):
    """Holds back every change that does not promise to save more than ``min_gain`` of a step's time.

    Proposals without a predicted gain pass: what predicts nothing cannot be judged by its prediction. A change of batch
    predicts what it saves of the time to a row's worth of progress, and is held to the same. It has no memory of its
    own.
    """

    inner: Policy[StateT]
    min_gain: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_gain < 1.0:
            raise ConfigError(f"hysteresis_gain must be a fraction of step time in [0, 1), got {self.min_gain}")

    @property
    def name(self) -> str:
        """The inner policy's name."""
        return self.inner.name

    def init(
        self, problem: Problem, prior: StateT | None = None, current: Allocation | None = None
    ) -> tuple[Proposal, StateT]:
        """Begin with a worker group; see ``Policy.init``."""
        return self.inner.init(problem, prior, current)

    def decide(self, state: StateT, observation: Observation, rng: np.random.Generator) -> tuple[Decision, StateT]:
        """Judge one observation; see ``Policy.decide``."""
        decision, state = self.inner.decide(state, observation, rng)
        gain = decision.predicted_gain if isinstance(decision, Reallocate | ChangeGlobalBatch) else None
        if gain is not None and gain <= self.min_gain:
            return _held_back(decision, f"a gain of {gain:.1%} is not above {self.min_gain:.1%}"), state
        return decision, state


def _held_back(decision: Decision, why: str) -> Decision:
    if not isinstance(decision, Reallocate | ChangeGlobalBatch):
        return decision
    return Keep(reason=f"held back ({why}): {decision.reason}", findings=decision.findings)
