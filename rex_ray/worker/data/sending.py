"""What a batch needs to leave its loader process, looked at where an error can still be told.

A queue between processes pickles on a thread of its own, which prints what goes wrong there and forgets the batch: the
training process then waits for it for ever (pytorch#142884). So the process that made a batch looks first.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from rex_ray.core.errors import DataError
from rex_ray.worker.tree import tensors_in

__all__ = ["SendableCollate", "check_sendable"]


class _Look(ForkingPickler):
    """Pickles everything but the contents of tensors and arrays, which would be a second copy of them."""

    def reducer_override(self, obj: Any) -> Any:
        """Leave out what can be sent in any case."""
        if isinstance(obj, torch.Tensor):
            if obj.requires_grad and not obj.is_leaf:
                raise TypeError("a tensor with a history cannot be sent between processes: return tensor.detach()")
            return bool, ()
        if isinstance(obj, np.ndarray) and not obj.dtype.hasobject:
            return bool, ()
        return NotImplemented


def check_sendable(batch: Any) -> None:
    """In a loader process, make sure that ``batch`` can be sent to the training process; elsewhere nothing is sent.

    Raises:
        Exception: what pickling raised, or the system where there is no room left to share tensors.
    """
    if get_worker_info() is None:
        return
    _Look(io.BytesIO()).dump(batch)
    for tensor in tensors_in(batch):
        # The queue's thread would do this next. Where shared memory or open files have run out, it fails here.
        if tensor.device.type == "cpu" and tensor.layout is torch.strided:
            tensor.share_memory_()


class SendableCollate:
    """A collate function whose batches are looked at before they are sent.

    Args:
        collate: the user's, or torch's.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        """Collate.

        Raises:
            DataError: the batch cannot be sent.
        """
        batch = self._collate(rows)
        try:
            check_sendable(batch)
        except Exception as error:
            raise DataError(f"a batch cannot be sent out of its loader process: {error}") from error
        return batch
