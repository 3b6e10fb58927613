# No postponed annotations here: DDP reads the hook's signature and refuses strings.
"""DDP's communication hook: sees the last local gradient, takes norms, then reduces."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from rex_ray.core.errors import ConfigError
from rex_ray.worker.doing import reduction_name
from rex_ray.worker.group.presence import Presence
from rex_ray.worker.model.gradient_looks import ScaleAndLook, scales_and_looks
from rex_ray.worker.model.thawed import FlatBucket, ThawedGradients
from rex_ray.worker.model.weighting import at_end_of_backward
from rex_ray.worker.step import StepInHand
from rex_ray.worker.tracker import StepTracker
from rex_ray.worker.user_warning import warn

__all__ = ["CommHook", "Reduction", "reduce_bucket"]

CommHook: TypeAlias = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class Reduction:
    """The hook's state: who is told, and how gradients are averaged.

    Args:
        tracker: told of the last local gradient and of the reduction's end.
        process_group: ranks to average over.
        presence: says who did not answer.
        thawed: gradients that DDP does not know of.

    Attributes:
        beyond_retry: a bucket is being handed over, or the last one was and DDP has yet to end: an error now leaves it
            in a state from which no further gradient would wake it.
    """

    def __init__(
        self, tracker: StepTracker, process_group: dist.ProcessGroup, presence: Presence, thawed: ThawedGradients
    ) -> None:
        self._tracker = tracker
        self._presence = presence
        self.process_group = process_group
        self._thawed = thawed
        self._holds_gradients = False
        self._flat: list[torch.Tensor] = []
        self._average: tuple[Any, CommHook] = (process_group, allreduce_hook)
        self._joins_late = False
        self._is_open = False
        self._under_way: list[dist.Work] = []
        self._unscaled: list[torch.Tensor] = []
        self._num_ranks = process_group.size()
        self._mean_and_look = ScaleAndLook(1.0 / self._num_ranks)
        self._finite: list[tuple[torch.Tensor, int]] = []
        self._warned = False
        self.beyond_retry = False

    def average_by(self, state: Any, hook: CommHook) -> None:
        """Average by the user's hook instead; its rounding would be taken for gradient noise, so norms stop."""
        self._average = (state, hook)
        self._tracker.norms.lossless = False
        self._joins_late = self._holds_gradients = False

    def install(self, ddp: DistributedDataParallel) -> None:
        """Register the hook.

        Raises:
            ConfigError: the user registered one before; DDP takes one.
        """
        on_host = all(p.device.type == "cpu" for p in ddp.parameters())
        self._holds_gradients = ddp.gradient_as_bucket_view and self._tracker.norms.lossless
        self._joins_late = on_host and self._holds_gradients
        try:
            ddp.register_comm_hook(self, reduce_bucket)
        except RuntimeError as error:
            raise ConfigError(
                "the wrapped model has a communication hook already, and DDP takes one; register yours with "
                "session.register_comm_hook(state, hook)"
            ) from error

    def flat_gradients(self) -> list[torch.Tensor]:
        """Return the buffers whose views the reduced gradients are; none where gradients are not views."""
        return self._flat if self._holds_gradients else []

    def is_known_finite(self) -> bool:
        """Whether the reduced gradient is known to be finite, and nobody wrote to it since."""
        known = self._finite
        return bool(known) and len(known) == len(self._flat) and all(g._version == at for g, at in known)

    def look_at(self, bucket: GradBucket) -> None:
        """Take stamp and norm of a bucket whose local gradients are complete."""
        step = self._tracker.in_hand
        # Buckets leave in order, so the last one leaves when every gradient is there. They are never counted:
        # DDP rebuilds them after the first step.
        is_last, has_thawed = bucket.is_last(), False
        if not self._thawed.knows_all:
            self._thawed.seen(bucket.parameters())
        if is_last:
            self._thawed.reduction_ended()
            has_thawed = self._thawed.present
        if is_last and not has_thawed:
            self._tracker.last_gradient()
        if step is None:
            self._warn_of_foreign_batch()
        else:
            self._look_into(step, bucket)
        if is_last:
            at_end_of_backward(self._reduce_thawed if has_thawed else self._queue_join)

    def _look_into(self, step: StepInHand, bucket: GradBucket | FlatBucket) -> None:
        buffer = bucket.buffer()
        if step.num_rows == 0 and not buffer.is_sparse:
            # A model may divide by its input; on rows of zeros that is no gradient but NaN times zero.
            torch.nan_to_num_(buffer, nan=0.0, posinf=0.0, neginf=0.0)
        if self._is_open:
            self._flat.append(buffer)
        else:
            self._flat, self._is_open = [buffer], True
        if self._tracker.measures_norm:
            self._tracker.norms.look_at(step, bucket)

    def _queue_join(self) -> None:
        """DDP queues its own end after its hook; what is queued from within the queue comes after that."""
        at_end_of_backward(self._join)

    def _reduce_thawed(self) -> None:
        """Every local gradient is there, those that DDP does not wait for, too."""
        self._tracker.last_gradient()
        self._queue_join()

    def _warn_of_foreign_batch(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                "a backward pass of the prepared model ran with no batch of session.loader(...) in hand: ranks are "
                "weighted alike then, and the step is not counted; take training batches from session.loader, and "
                "begin it anew by iter(...) where itertools.cycle would hand out copies"
            )

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket over ranks.

        The usual hook has a Python callback turn the reduction's result into DDP's, on a thread that must first get
        hold of the interpreter; on a host that computes, that was most of what the hook costs
        (``experiments.overhead``). Where gradients are views of the bucket, which is reduced in place, the answer is
        known before the reduction ends, and it is enough to wait for it once, after DDP's own end. There the sum is
        divided, too: in one pass with the look for what is not finite, which would read the whole gradient again.
        """
        buffer = bucket.buffer()
        if not self._joins_late or buffer.is_sparse:
            state, hook = self._average
            return hook(state, bucket)
        if scales_and_looks(buffer):
            self._unscaled.append(buffer)
        else:
            buffer.div_(self._num_ranks)
        self._under_way.append(self.process_group.allreduce([buffer]))
        answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        answer.set_result(buffer)
        return answer

    def _join(self) -> None:
        """Wait, within the group's limit, until every bucket holds the global gradient.

        Raises:
            LinkError: it does not come; says for whom this rank waited.
        """
        if self._under_way:
            with self._presence.told(reduction_name(self._tracker.in_hand)):
                while self._under_way:
                    self._under_way.pop().wait()
        summed, self._unscaled = self._unscaled, []
        sound = bool(summed) and self._mean_and_look(summed)
        self._finite = [(buffer, buffer._version) for buffer in summed] if sound else []
        if self._thawed.present:
            self._average_thawed()
        self._is_open = self.beyond_retry = False
        self._tracker.reduction_ended()

    def _average_thawed(self) -> None:
        step = self._tracker.in_hand
        for bucket in self._thawed.buckets():
            if step is not None:
                self._look_into(step, bucket)
            with self._presence.told(reduction_name(step)):
                bucket.average(self.process_group)


def reduce_bucket(state: Reduction, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Look at a bucket, then start its reduction."""
    state.beyond_retry = True
    state.look_at(bucket)
    answer = state.average(bucket)
    state.beyond_retry = bucket.is_last()
    return answer
