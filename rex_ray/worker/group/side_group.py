"""Small values that ranks agree on, over gloo beside the gradient's own group, each wait within a limit."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from rex_ray.worker.group.presence import Presence
from rex_ray.worker.group.waits import Told

__all__ = ["PendingValues", "SideGroup", "distributed"]


# Gloo has two threads a group, each of which is behind with one operation at most.
_NUM_KEPT: Final = 8


def distributed() -> bool:
    """Whether this process belongs to an initialised ``torch.distributed`` group."""
    return dist.is_available() and dist.is_initialized()


class PendingValues:
    """Values on their way from one rank, or from each, to all.

    Args:
        arrived: returns them once the operation has ended.
        work: the operation, None where there is nobody to talk to.
        group: the group it runs on.
        what: what is sent, for the error.
    """

    def __init__(
        self, arrived: Callable[[], torch.Tensor], work: dist.Work | None, group: SideGroup, what: str
    ) -> None:
        self._arrived = arrived
        self._work = work
        self._group = group
        self._what = what

    def read(self, timeout_s: float | None = None) -> torch.Tensor:
        """Return what was sent.

        Raises:
            LinkError: it did not arrive within the limit.
        """
        if self._work is not None:
            self._group.wait(self._work, self._what, timeout_s)
        return self._arrived()


class SideGroup:
    """All ranks, over gloo on the CPU; with no ``torch.distributed`` a group of one.

    Every member must call the same operations in the same order.

    Args:
        timeout_s: limit of every operation, and of finding together.
        presence: says who did not answer; default: nobody does.

    Attributes:
        presence: see above.

    Raises:
        LinkError: the ranks did not find together.
    """

    def __init__(self, timeout_s: float, presence: Presence | None = None) -> None:
        self._timeout_s = timeout_s
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        self._recent: deque[dist.Work] = deque(maxlen=_NUM_KEPT)
        self.rank, self.size = 0, 1
        if distributed():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.presence = Presence(self.rank, 1, timeout_s) if presence is None else presence
        if distributed():
            with self._told("all ranks to form a group beside the gradient's"):
                self._group = dist.new_group(backend="gloo", timeout=self._timeout)

    @property
    def timeout_s(self) -> float:
        """Limit of every operation."""
        return self._timeout_s

    def broadcast_later(self, values: torch.Tensor, what: str, source: int = 0) -> PendingValues:
        """Start to send ``values`` of rank 0, or of ``source``, to everyone, and return at once."""
        work = None
        if self._group is not None:
            begun = dist.broadcast(values, src=source, group=self._group, async_op=True)
            assert begun is not None, "every rank is of this group"
            work = self._begun(begun)
        return PendingValues(lambda: values, work, self, what)

    def broadcast(self, values: torch.Tensor, what: str, source: int = 0) -> torch.Tensor:
        """Return ``values`` of rank 0, or of ``source``."""
        return self.broadcast_later(values, what, source).read()

    def sum(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Return the sum of ``values`` over ranks, same shape."""
        total = values.clone()
        if self._group is not None:
            work = dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
            self.wait(self._begun(work), what)
        return total

    def gather_later(self, values: torch.Tensor, what: str) -> PendingValues:
        """Start to send every rank's ``values`` (of one shape) to everyone, and return at once."""
        if self._group is None:
            return PendingValues(lambda: torch.stack([values]), None, self, what)
        parts = [torch.empty_like(values) for _ in range(self.size)]
        work = self._begun(dist.all_gather(parts, values, group=self._group, async_op=True))
        return PendingValues(lambda: torch.stack(parts), work, self, what)

    def gather(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Return every rank's ``values`` (of one shape), shape ``[n, ...]``."""
        return self.gather_later(values, what).read()

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """Return every rank's picklable ``value``, in rank order."""
        if self._group is None:
            return [value]
        own = _bytes_of(value)
        sizes = self.gather(torch.tensor([len(own)]), what).reshape(-1).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(own)] = own
        return [_object_of(data[:size]) for data, size in zip(self.gather(padded, what), sizes, strict=True)]

    def broadcast_object(self, value: Any, what: str, source: int = 0) -> Any:
        """Return the picklable ``value`` of rank 0, or of ``source``."""
        if self._group is None:
            return value
        data = _bytes_of(value) if self.rank == source else torch.empty(0, dtype=torch.uint8)
        size = int(self.broadcast(torch.tensor([len(data)]), what, source))
        if self.rank != source:
            data = torch.empty(size, dtype=torch.uint8)
        return _object_of(self.broadcast(data, what, source))

    def wait(self, work: dist.Work, what: str, timeout_s: float | None = None) -> None:
        """Wait for an operation of this group.

        Raises:
            LinkError: it broke, or did not end within the limit.
        """
        limit = self._timeout if timeout_s is None else timedelta(seconds=timeout_s)
        with self._told(what, timeout_s):
            work.wait(limit)

    def close(self) -> None:
        """Leave the group; call it only when no operation is under way."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
            self._recent.clear()

    def _begun(self, work: dist.Work) -> dist.Work:
        """Keep an operation, and with it its tensors, until others have come after it.

        One of gloo's threads lets go of an operation some time after it has ended, and of tensors that nobody else has
        needs Python's lock for it; ``close`` holds that lock while it waits for this very thread (seen with torch 2.6).
        """
        self._recent.append(work)
        return work

    def _told(self, what: str, limit_s: float | None = None) -> Told:
        return self.presence.told(what, self._timeout_s if limit_s is None else limit_s)


def _bytes_of(value: Any) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(pickle.dumps(value), dtype=np.uint8).copy())


def _object_of(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
