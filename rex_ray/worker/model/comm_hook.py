# No postponed annotations here: DDP reads the hook's signature and refuses strings.
"""DDP's communication hook: sees the last local gradient, takes norms, then reduces."""

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from rex_ray.core.errors import ConfigError
from rex_ray.worker.model.weighting import at_end_of_backward
from rex_ray.worker.tracker import StepTracker

__all__ = ["CommHook", "Reduction", "reduce_bucket"]

CommHook: TypeAlias = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class Reduction:
    """The hook's state: who is told, and how gradients are averaged.

    Args:
        tracker: told of the last local gradient and of the reduction's end.
        process_group: ranks to average over.
    """

    def __init__(self, tracker: StepTracker, process_group: dist.ProcessGroup) -> None:
        self._tracker = tracker
        self.process_group = process_group
        self._average: tuple[Any, CommHook] = (process_group, allreduce_hook)
        self._joins_late = False
        self._under_way: list[dist.Work] = []
        self._warned = False

    def average_by(self, state: Any, hook: CommHook) -> None:
        """Average by the user's hook instead; its rounding would be taken for gradient noise, so norms stop."""
        self._average = (state, hook)
        self._tracker.norms.lossless = False
        self._joins_late = False

    def install(self, ddp: DistributedDataParallel) -> None:
        """Register the hook.

        Raises:
            ConfigError: the user registered one before; DDP takes one.
        """
        on_host = all(p.device.type == "cpu" for p in ddp.parameters())
        self._joins_late = on_host and ddp.gradient_as_bucket_view and self._tracker.norms.lossless
        try:
            ddp.register_comm_hook(self, reduce_bucket)
        except RuntimeError as error:
            raise ConfigError(
                "the wrapped model has a communication hook already, and DDP takes one; register yours with "
                "session.register_comm_hook(state, hook)"
            ) from error

    def look_at(self, bucket: GradBucket) -> None:
        """Take stamp and norm of a bucket whose local gradients are complete."""
        step = self._tracker.in_hand
        # Buckets leave in order, so the last one leaves when every gradient is there. They are never counted:
        # DDP rebuilds them after the first step.
        is_last = bucket.is_last()
        if is_last:
            self._tracker.last_gradient()
        if step is None:
            self._warn_of_foreign_batch()
        elif step.num_rows == 0 and not bucket.buffer().is_sparse:
            # A model may divide by its input; on rows of zeros that is no gradient but NaN times zero.
            torch.nan_to_num_(bucket.buffer(), nan=0.0, posinf=0.0, neginf=0.0)
        if step is not None and self._tracker.measures_norm:
            self._tracker.norms.look_at(step, bucket)
        if is_last:
            # DDP queues its own end after this hook; what is queued from within the queue comes after that.
            at_end_of_backward(lambda: at_end_of_backward(self._join))

    def _warn_of_foreign_batch(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "a backward pass of the prepared model ran with no batch of session.loader(...) in hand: ranks are "
                "weighted alike then, and the step is not counted; take training batches from session.loader",
                stacklevel=2,
            )

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket over ranks.

        The usual hook has a Python callback turn the reduction's result into DDP's, on a thread that must first get
        hold of the interpreter; on a host that computes, that was most of what the hook costs
        (``experiments.overhead``). Where gradients are views of the bucket, which is reduced in place, the answer is
        known before the reduction ends, and it is enough to wait for it once, after DDP's own end.
        """
        buffer = bucket.buffer()
        if not self._joins_late or buffer.is_sparse:
            state, hook = self._average
            return hook(state, bucket)
        self._under_way.append(self.process_group.allreduce([buffer.div_(self.process_group.size())]))
        answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        answer.set_result(buffer)
        return answer

    def _join(self) -> None:
        """Wait, within the group's limit, until every bucket holds the global gradient."""
        while self._under_way:
            self._under_way.pop().wait()
        self._tracker.reduction_ended()


def reduce_bucket(state: Reduction, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Look at a bucket, then start its reduction."""
    state.look_at(bucket)
    return state.average(bucket)
