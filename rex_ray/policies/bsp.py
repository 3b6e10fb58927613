"""BSP: a fixed batch in equal shares, and nothing watched. The null members of every part, and the method they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rex_ray.core.observations import AllocationApplied, SearchResult, StepObserved
from rex_ray.core.types import Allocation, Problem
from rex_ray.policies.base import Reallocate, Search
from rex_ray.policies.composition import Composition
from rex_ray.policies.limits import equal_shares
from rex_ray.policies.seams import Alarm, BatchPlan, Model, Shares

__all__ = ["EqualSplit", "FixedBatch", "NoSearch", "NoTrigger", "bsp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedBatch:
    """The reference batch for ever, or the one that training resumes with."""

    def init(self, problem: Problem, prior: None, current: Allocation | None) -> tuple[BatchPlan, None]:
        """Return the batch to keep."""
        del prior
        if current is not None:
            return BatchPlan(global_batch_size=current.global_batch_size, lr_factor=current.lr_factor), None
        return BatchPlan(global_batch_size=problem.global_batch_size, lr_factor=1.0), None

    def observe(self, state: None, step: StepObserved, model: Model | None) -> tuple[BatchPlan | None, None]:
        """Never change it."""
        del step, model
        return None, state

    def applied(self, state: None, applied: AllocationApplied) -> None:
        """Nothing to remember."""
        del state, applied


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualSplit:
    """Equal shares, as far as the ranks' limits allow, whatever was run before. Its memory is the problem alone."""

    def init(
        self, problem: Problem, prior: Problem | None, current: Allocation | None, global_batch_size: int
    ) -> tuple[tuple[int, ...], Problem]:
        """Return equal shares."""
        del prior, current
        return equal_shares(problem, global_batch_size), problem

    def observe(self, state: Problem, step: StepObserved) -> Problem:
        """Learn nothing."""
        del step
        return state

    def propose(self, state: Problem) -> Reallocate | str:
        """Offer nothing."""
        del state
        return "shares are fixed"

    def plan(self, state: Problem, global_batch_size: int) -> Shares:
        """Return equal shares of another batch."""
        return Shares(local_batch_sizes=equal_shares(state, global_batch_size))

    def rescale(self, state: Problem, factors: Mapping[int, float]) -> Problem:
        """Times do not matter."""
        del factors
        return state

    def applied(self, state: Problem, applied: AllocationApplied) -> Problem:
        """Nothing to remember."""
        del applied
        return state

    def model(self, state: Problem) -> Model | None:
        """There is none."""
        del state
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTrigger:
    """Watches nothing."""

    def init(self, problem: Problem, prior: None) -> None:
        """Nothing to begin."""
        del problem, prior

    def observe(self, state: None, step: StepObserved, model: Model | None) -> tuple[Alarm | None, None]:
        """Never raise an alarm."""
        del step, model
        return None, state

    def applied(self, state: None, applied: AllocationApplied) -> None:
        """Nothing to remember."""
        del state, applied


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSearch:
    """The split's own plan is final."""

    def init(self, problem: Problem, prior: None) -> None:
        """Nothing to begin."""
        del problem, prior

    def seek(self, state: None, offer: Reallocate | None, model: Model | None) -> tuple[Search | None, None]:
        """Never ask for a search."""
        del offer, model
        return None, state

    def answer(self, state: None, result: SearchResult, model: Model | None) -> tuple[Reallocate | str, None]:
        """Nobody asked."""
        del result, model
        return "no search was asked for", state


def bsp() -> Composition[None, Problem, None, None]:
    """Bulk-synchronous training as Horovod or plain DDP does it: the member of the family with every part left out."""
    return Composition(name="bsp", growth=FixedBatch(), split=EqualSplit(), trigger=NoTrigger(), search=NoSearch())
