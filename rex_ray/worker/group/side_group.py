"""Small values that ranks agree on, over gloo beside the gradient's own group, each wait within a limit."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rex_ray.core.errors import LinkError

__all__ = ["PendingBroadcast", "SideGroup", "distributed"]


def distributed() -> bool:
    """Whether this process belongs to an initialised ``torch.distributed`` group."""
    return dist.is_available() and dist.is_initialized()


class PendingBroadcast:
    """A broadcast from rank 0 under way.

    Args:
        values: the buffer that is sent on rank 0 and filled on the others.
        work: the operation, None where there is nobody to talk to.
        group: the group it runs on.
        what: what is sent, for the error.
    """

    def __init__(self, values: torch.Tensor, work: dist.Work | None, group: SideGroup, what: str) -> None:
        self._values = values
        self._work = work
        self._group = group
        self._what = what

    def read(self, timeout_s: float | None = None) -> torch.Tensor:
        """Return what rank 0 sent.

        Raises:
            LinkError: it did not arrive within the limit.
        """
        if self._work is not None:
            whom = "the other ranks" if self._group.rank == 0 else "rank 0"
            self._group.wait(self._work, whom, self._what, timeout_s)
        return self._values


class SideGroup:
    """All ranks, over gloo on the CPU; with no ``torch.distributed`` a group of one.

    Every member must call the same operations in the same order.

    Args:
        timeout_s: limit of every operation.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._group: Any = None
        self.rank, self.size = 0, 1
        if distributed():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def broadcast_later(self, values: torch.Tensor, what: str) -> PendingBroadcast:
        """Start to send rank 0's ``values`` to everyone, and return at once."""
        work = None
        if self._group is not None:
            work = dist.broadcast(values, src=0, group=self._group, async_op=True)
        return PendingBroadcast(values, work, self, what)

    def broadcast(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Return rank 0's ``values``."""
        return self.broadcast_later(values, what).read()

    def sum(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Return the sum of ``values`` over ranks, same shape."""
        total = values.clone()
        if self._group is not None:
            work = dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
            self.wait(work, "the other ranks", what)
        return total

    def gather(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Return every rank's ``values`` (of one shape), shape ``[n, ...]``."""
        if self._group is None:
            return values.unsqueeze(0)
        parts = [torch.empty_like(values) for _ in range(self.size)]
        work = dist.all_gather(parts, values, group=self._group, async_op=True)
        self.wait(work, "the other ranks", what)
        return torch.stack(parts)

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """Return every rank's picklable ``value``, in rank order."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise self._broken("the other ranks", what, self._timeout_s) from error
        return values

    def broadcast_object(self, value: Any, what: str) -> Any:
        """Return rank 0's picklable ``value``."""
        if self._group is None:
            return value
        values = [value]
        try:
            dist.broadcast_object_list(values, src=0, group=self._group)
        except RuntimeError as error:
            raise self._broken("rank 0", what, self._timeout_s) from error
        return values[0]

    def wait(self, work: dist.Work, whom: str, what: str, timeout_s: float | None = None) -> None:
        """Wait for an operation of this group.

        Raises:
            LinkError: it broke, or did not end within the limit.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise self._broken(whom, what, limit_s) from error

    def close(self) -> None:
        """Leave the group; call it only when no operation is under way."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _broken(self, whom: str, what: str, limit_s: float) -> LinkError:
        return LinkError(
            f"rank {self.rank} waited for {whom} for {what} (limit {limit_s:g} s) and got no answer; every rank must "
            "make this call at the same place of its loop, and a rank that died is named in its own log"
        )
