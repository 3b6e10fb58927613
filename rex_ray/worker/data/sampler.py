"""Which rows a rank gets at a step, whatever the shares and the number of ranks are at that moment.

Each epoch has one global order, drawn from (seed, epoch) alike on every rank. A cursor counts the samples that all
ranks together have consumed; a step takes the next ``B`` of them and rank ``i`` the slice at its prefix sum. So a
change of shares or of world size keeps every sample exactly once per epoch, the whole position in the data is
(epoch, cursor), and every rank knows every rank's real row count without asking.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from rex_ray.core.apportion import rows_per_rank
from rex_ray.core.types import Allocation
from rex_ray.worker.data.schedule import Schedule

__all__ = ["ElasticSampler", "Plan", "Position", "batch_rows", "epoch_order", "plan_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where training stands in the data.

    Attributes:
        epoch: epoch number, from 0.
        cursor: samples of this epoch that all ranks together have consumed.
        step: next step, counted over the whole run.
    """

    epoch: int = 0
    cursor: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step's rows, decided when the loader draws it.

    Attributes:
        step: the step, counted over the whole run.
        epoch: epoch whose order the rows are taken from.
        cursor: position of the step's first row in that order.
        allocation: shares in force at the step.
        num_rows: real rows per rank; they differ from the shares in an epoch's last batch.
        total_rows: rows of the step over all ranks; asked for many times a step, and summed once.
    """

    step: int
    epoch: int
    cursor: int
    allocation: Allocation
    num_rows: tuple[int, ...]
    total_rows: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total_rows", sum(self.num_rows))

    @property
    def partial(self) -> bool:
        """Whether the rows are not what the allocation asks for."""
        return self.num_rows != self.allocation.local_batch_sizes

    @property
    def after(self) -> Position:
        """The position once the step is consumed."""
        return Position(epoch=self.epoch, cursor=self.cursor + self.total_rows, step=self.step + 1)

    def reference_steps(self, reference_batch: int) -> int:
        """Return how many steps of ``reference_batch`` rows end within this one, ``ceil(N / M0)`` over an epoch.

        Fractions are carried: the epoch's rows up to here make so many reference steps, begun ones counted whole.
        """
        return -(-(self.cursor + self.total_rows) // reference_batch) + (-self.cursor // reference_batch)

    def rows_of(self, rank: int) -> slice:
        """Return the rank's rows as a slice of the epoch's order."""
        start = self.cursor + sum(self.num_rows[:rank])
        return slice(start, start + self.num_rows[rank])


def epoch_order(seed: int, epoch: int, dataset_size: int) -> torch.Tensor:
    """Return the epoch's order of all rows, shape ``[dataset_size]``: the same on every rank.

    Seed and epoch are hashed together, since seeds that differ by one must not give neighbouring epochs' orders.
    """
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(dataset_size, generator=generator)


def batch_rows(remaining: int, global_batch_size: int, num_ranks: int) -> int:
    """Return how many of the epoch's ``remaining`` rows the next batch takes.

    A tail with fewer rows than ranks is absorbed by the last full batch: on its own it would leave ranks without
    a row, for which there is no reason but rounding.
    """
    tail = remaining - global_batch_size
    return remaining if tail < min(num_ranks, global_batch_size) else global_batch_size


def plan_step(position: Position, allocation: Allocation, dataset_size: int) -> Plan:
    """Plan the step at ``position``; all ranks plan alike."""
    sizes = allocation.local_batch_sizes
    total = batch_rows(dataset_size - position.cursor, allocation.global_batch_size, len(sizes))
    return Plan(
        step=position.step,
        epoch=position.epoch,
        cursor=position.cursor,
        allocation=allocation,
        num_rows=rows_per_rank(total, sizes),
    )


class ElasticSampler:
    """A batch sampler whose batches follow the schedule of allocations.

    It runs in the main process. Loader processes make torch's DataLoader draw ahead of what the user holds, so each
    draw leaves its plan in ``drawn``, and the loader takes one plan off it with every batch that it hands out: the
    weights are those of the batch in hand, not of the newest plan.

    Args:
        dataset_size: rows per epoch.
        rank: whose slices to draw.
        seed: seeds every epoch's order.
        schedule: allocations by step.
    """

    def __init__(self, *, dataset_size: int, rank: int, seed: int, schedule: Schedule) -> None:
        self._dataset_size = dataset_size
        self._rank = rank
        self._seed = seed
        self._schedule = schedule
        self._next = Position()
        self._pass = 0
        self._order: tuple[int, torch.Tensor] | None = None
        self.drawn: deque[Plan] = deque()

    @property
    def next_undrawn(self) -> int:
        """The first step that is not drawn yet: shares can change here and later, not before."""
        return self._next.step

    def rewind(self, position: Position) -> None:
        """Begin a pass at ``position``: what was drawn and not consumed is drawn again."""
        self._next = position
        self._pass += 1
        self.drawn.clear()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Draw this rank's batches up to the epoch's end, each row with its epoch."""
        this_pass = self._pass
        # An iterator of an earlier pass must not draw: a DataLoader may hold on to it for a while.
        while self._next.cursor < self._dataset_size and self._pass == this_pass:
            plan = plan_step(self._next, self._schedule.at(self._next.step), self._dataset_size)
            self._next = plan.after
            self.drawn.append(plan)
            yield self._indices(plan)

    def _indices(self, plan: Plan) -> list[tuple[int, int]]:
        order = self._epoch_order(plan.epoch)
        rows: list[int] = order[plan.rows_of(self._rank)].tolist()
        # No rows cannot be collated: one placeholder row is drawn, and the loader cuts it off.
        rows = rows or [int(order[plan.cursor])]
        return [(plan.epoch, row) for row in rows]

    def _epoch_order(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(self._seed, epoch, self._dataset_size))
        return self._order[1]
