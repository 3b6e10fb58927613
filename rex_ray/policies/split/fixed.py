"""The null members among the splits: equal shares, or the ones that a person set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rex_ray.core.apportion import apportion
from rex_ray.core.changed import changed
from rex_ray.core.errors import ConfigError, InfeasibleError, nearest_name_hint
from rex_ray.core.memory import MemoryBook
from rex_ray.core.observations import AllocationApplied, StepObserved
from rex_ray.core.types import Allocation, BoolArray, Problem, StepFlag
from rex_ray.policies.base import Reallocate
from rex_ray.policies.limits import equal_shares, share_bounds
from rex_ray.policies.seams import Model, Shares
from rex_ray.policies.split.memory_model import MemoryModel

__all__ = ["EqualSplit", "EqualSplitState", "FixedSplit", "shares_by_hand"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSplit:
    """Shares that never move, whatever was run before. Its memory is the problem alone.

    Attributes:
        local_batch_sizes: rows per rank in rank order, or, since Ray decides which rank runs where, rows per worker
            of each kind of device, such as ``{"T4": 33, "V100": 95}``; None: equal shares within the ranks' limits.
    """

    local_batch_sizes: Sequence[int] | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        shares: Any = self.local_batch_sizes  # from a YAML file, so anything
        if shares is None:
            return
        if isinstance(shares, str) or not isinstance(shares, Mapping | Sequence) or not shares:
            raise ConfigError(
                "local_batch_sizes must be rows per rank, such as [33, 95], or rows per worker of each kind of device, "
                f"such as {{'T4': 33, 'V100': 95}}; got {shares!r}"
            )
        for rows in shares.values() if isinstance(shares, Mapping) else shares:
            if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
                raise ConfigError(f"local_batch_sizes={shares!r} must hold whole numbers of at least 1, got {rows!r}")

    def init(
        self, problem: Problem, prior: Problem | None, current: Allocation | None, global_batch_size: int
    ) -> tuple[tuple[int, ...], Problem]:
        """Return the shares.

        Raises:
            InfeasibleError: shares set by hand fit neither this group nor its global batch.
        """
        del prior, current
        if self.local_batch_sizes is None:
            return equal_shares(problem, global_batch_size), problem
        devices = tuple(worker.device for worker in problem.workers)
        try:
            shares = shares_by_hand(self.local_batch_sizes, devices, global_batch_size, problem.local_batch_multiple)
        except ConfigError as error:
            raise InfeasibleError(str(error)) from error
        return shares, problem

    def observe(self, state: Problem, step: StepObserved, use: BoolArray | None = None) -> Problem:
        """Learn nothing."""
        del step, use
        return state

    def propose(self, state: Problem) -> Reallocate | str:
        """Offer nothing."""
        del state
        return "shares are fixed"

    def plan(self, state: Problem, global_batch_size: int) -> Shares:
        """Return shares of another batch, in the same proportions."""
        if self.local_batch_sizes is None:
            return Shares(local_batch_sizes=equal_shares(state, global_batch_size))
        devices = tuple(worker.device for worker in state.workers)
        lower, upper = share_bounds(state, global_batch_size)
        by_hand = np.array(_per_rank(self.local_batch_sizes, devices))
        shares = apportion(global_batch_size, by_hand, lower, upper, state.local_batch_multiple)
        return Shares(local_batch_sizes=tuple(int(share) for share in shares))

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EqualSplitState:
    """The group and its limits, and peaks of memory per kind and size."""

    problem: Problem
    memory: MemoryBook


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualSplit:
    """Equal shares for ever, as far as memories have shown to hold them: for a batch that grows."""

    def init(
        self, problem: Problem, prior: EqualSplitState | None, current: Allocation | None, global_batch_size: int
    ) -> tuple[tuple[int, ...], EqualSplitState]:
        """Begin with equal shares; of earlier groups peaks of memory stay."""
        del current
        devices = tuple(worker.device for worker in problem.workers)
        state = EqualSplitState(problem=problem, memory=MemoryBook.empty(devices, prior.memory if prior else None))
        return self.plan(state, global_batch_size).local_batch_sizes, state

    def observe(self, state: EqualSplitState, step: StepObserved, use: BoolArray | None = None) -> EqualSplitState:
        """Take in a clean step's peaks of memory."""
        del use
        if step.flags != StepFlag.NONE:
            return state
        memory = state.memory.observe(step.num_rows, step.peak_memory_bytes)
        return state if memory is state.memory else changed(state, memory=memory)

    def propose(self, state: EqualSplitState) -> Reallocate | str:
        """Offer nothing."""
        del state
        return "shares are equal"

    def plan(self, state: EqualSplitState, global_batch_size: int) -> Shares:
        """Return equal shares of a batch."""
        fits = state.memory.max_rows(state.problem.workers)
        return Shares(local_batch_sizes=equal_shares(state.problem, global_batch_size, fits))

    def rescale(self, state: EqualSplitState, factors: Mapping[int, float]) -> EqualSplitState:
        """Times do not matter."""
        del factors
        return state

    def applied(self, state: EqualSplitState, applied: AllocationApplied) -> EqualSplitState:
        """Nothing to remember."""
        del applied
        return state

    def model(self, state: EqualSplitState) -> Model | None:
        """Return what is known of memory, and no times."""
        return MemoryModel(problem=state.problem, memory=state.memory)


def shares_by_hand(
    local_batch_sizes: Sequence[int] | Mapping[str, int],
    devices: Sequence[str],
    global_batch_size: int,
    multiple: int = 1,
) -> tuple[int, ...]:
    """Return rows per rank of shares that a person set.

    Args:
        local_batch_sizes: rows per rank, or per worker of each kind.
        devices: kind of device per rank.
        global_batch_size: what the shares must sum to.
        multiple: what each of them must be a multiple of.

    Raises:
        ConfigError: another number of workers, a kind without a share, another sum, or a share that is no multiple.
    """
    shares = _per_rank(local_batch_sizes, devices)
    odd = next((share for share in shares if share % multiple), None)
    if odd is not None:
        raise ConfigError(
            f"local_batch_sizes={_told(local_batch_sizes)} holds {odd}, which is no multiple of "
            f"local_batch_multiple={multiple}; change one of the two"
        )
    if sum(shares) != global_batch_size:
        raise ConfigError(
            f"local_batch_sizes={_told(local_batch_sizes)} sum to {sum(shares)} rows over {len(devices)} workers, not "
            f"to global_batch_size={global_batch_size}; change one of the two"
        )
    return shares


def _per_rank(local_batch_sizes: Sequence[int] | Mapping[str, int], devices: Sequence[str]) -> tuple[int, ...]:
    if not isinstance(local_batch_sizes, Mapping):
        if len(local_batch_sizes) != len(devices):
            raise ConfigError(
                f"local_batch_sizes={_told(local_batch_sizes)} are shares for {len(local_batch_sizes)} workers and the "
                f"group has {len(devices)}; give one per worker, or rows per kind of device"
            )
        return tuple(local_batch_sizes)
    for device in devices:
        if device not in local_batch_sizes:
            raise ConfigError(
                f"local_batch_sizes={_told(local_batch_sizes)} have no share for a worker on {device!r}"
                f"{nearest_name_hint(device, local_batch_sizes)}"
            )
    return tuple(local_batch_sizes[device] for device in devices)


def _told(local_batch_sizes: Sequence[int] | Mapping[str, int]) -> str:
    return str(dict(local_batch_sizes) if isinstance(local_batch_sizes, Mapping) else list(local_batch_sizes))
