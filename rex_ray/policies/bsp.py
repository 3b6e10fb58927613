"""BSP: a fixed batch in fixed shares, and nothing watched. The null members of every part, and the method they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rex_ray.core.observations import AllocationApplied, SearchResult, StepObserved, TrialRequested
from rex_ray.core.types import Allocation, Problem
from rex_ray.policies.base import Finding, Reallocate
from rex_ray.policies.composition import Composition
from rex_ray.policies.growth.limits import most_rows
from rex_ray.policies.limits import whole_rows
from rex_ray.policies.seams import Alarm, BatchPlan, Model, SearchView
from rex_ray.policies.split.fixed import FixedSplit

__all__ = ["FixedBatch", "NoSearch", "NoTrigger", "bsp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedBatch:
    """The reference batch for ever, or the one that training resumes with."""

    def init(self, problem: Problem, prior: None, current: Allocation | None) -> tuple[BatchPlan, None]:
        """Return the batch to keep.

        One that grew under another policy, on more workers, under a higher cap or in other multiples, is cut to what
        this group can run.
        The learning rate is cut with it in proportion, which is never above what a gain that flattens as the batch
        grows would allow, and never below the user's own.
        """
        del prior
        if current is None:
            return BatchPlan(global_batch_size=problem.global_batch_size, lr_factor=1.0), None
        rows, factor = current.global_batch_size, current.lr_factor
        most = whole_rows(problem, min(rows, most_rows(problem)))
        if rows != most:
            rows, factor = most, min(factor, max(1.0, factor * most / rows))
        return BatchPlan(global_batch_size=rows, lr_factor=factor), None

    def observe(self, state: None, step: StepObserved, model: Model | None) -> tuple[BatchPlan | None, None]:
        """Never change it."""
        del step, model
        return None, state

    def applied(self, state: None, applied: AllocationApplied) -> None:
        """Nothing to remember."""
        del state, applied


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

    def trusted(self, state: None) -> None:
        """Suspect nobody."""
        del state

    def applied(self, state: None, applied: AllocationApplied) -> None:
        """Nothing to remember."""
        del state, applied


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSearch:
    """The split's own plan is final."""

    def init(self, problem: Problem, prior: None) -> None:
        """Nothing to begin."""
        del problem, prior

    def busy(self, state: None) -> bool:
        """Never."""
        del state
        return False

    def observe(self, state: None, step: StepObserved, model: Model | None, look: SearchView) -> tuple[None, None]:
        """Never ask for a search."""
        del step, model, look
        return None, state

    def trial(self, state: None, requested: TrialRequested, model: Model | None) -> tuple[Finding, None]:
        """Nobody asked."""
        del requested, model
        return Finding(part="search", verdict="not searching", reason="no search was asked for"), state

    def answer(self, state: None, result: SearchResult, model: Model | None) -> tuple[str, None]:
        """Nobody asked."""
        del result, model
        return "no search was asked for", state

    def doubts(self, state: None) -> bool:
        """Never: nothing is compared here."""
        del state
        return False

    def holds(self, state: None, offer: Reallocate) -> None:
        """Speak for no shares."""
        del state, offer

    def applied(self, state: None, applied: AllocationApplied, model: Model | None) -> None:
        """Nothing to remember."""
        del state, applied, model


def bsp(local_batch_sizes: Sequence[int] | Mapping[str, int] | None = None) -> Composition[None, Problem, None, None]:
    """Bulk-synchronous training as Horovod or plain DDP does it: the member of the family with every part left out.

    Args:
        local_batch_sizes: shares set by hand, see ``FixedSplit``; None: equal ones.

    Raises:
        ConfigError: shares that are neither rows per rank nor rows per kind of device.
    """
    split = FixedSplit(local_batch_sizes=local_batch_sizes)
    return Composition(name="bsp", growth=FixedBatch(), split=split, trigger=NoTrigger(), search=NoSearch())
