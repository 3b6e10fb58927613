"""What is measured of a step beside its times, and how it leaves the worker.

A tensor on the device is never waited for: it is copied to the host in stream order and read some steps later, so a
record waits in a queue until each of its parts is there, and leaves once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rex_ray.core.types import StepFlag, StepRecord
from rex_ray.worker.link import IncidentRecord
from rex_ray.worker.measuring.timing import StepTimer

__all__ = ["DeferredScalar", "DeferredTensor", "PendingRecord", "RecordQueue", "squared_norm", "total_squared_norm"]

# Records that wait for the device; past this many the oldest leaves without what is still missing.
_MOST_PENDING = 64


class DeferredTensor:
    """A tensor that is read once the device has computed it.

    Args:
        value: a small tensor; it must not be written to afterwards.
    """

    __slots__ = ("_event", "_host")

    def __init__(self, value: torch.Tensor) -> None:
        value = value.detach()
        self._event: torch.cuda.Event | None = None
        self._host = value
        if value.is_cuda:
            self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def ready(self) -> bool:
        """Whether the value can be read without waiting."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> torch.Tensor:
        """Return the value, on the host, once the device has computed it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class DeferredScalar(DeferredTensor):
    """A one-element tensor that is read as a number."""

    __slots__ = ()

    def read(self) -> float:
        """Return the value; call it only when ready."""
        return float(self._host)


def squared_norm(values: torch.Tensor) -> torch.Tensor:
    """Return ``|values|^2`` as a 0-d tensor, at least in single precision: half precision overflows at 256^2."""
    flat = (values.coalesce().values() if values.is_sparse else values).reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.dtype in (torch.float32, torch.float64):
        return torch.dot(flat, flat)
    norm: torch.Tensor = torch.linalg.vector_norm(flat, dtype=torch.float32)
    return norm.square()


def total_squared_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``|g|^2`` over some gradients as a 0-d tensor, at least in single precision."""
    exact: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for gradient in gradients:
        is_exact = not gradient.is_sparse and gradient.dtype in (torch.float32, torch.float64)
        (exact if is_exact else others).append(gradient)
    # Noise is the small difference of two norms: half precision would round it away.
    parts = [squared_norm(gradient) for gradient in others]
    if exact or not parts:
        parts.insert(0, torch.nn.utils.get_total_norm(exact).square())
    # Summed where the first one is, not on the host: a sum there would wait for the device.
    total, *further = parts
    for part in further:
        total = total + part.to(total.device)
    return total


@dataclass(slots=True, kw_only=True)
class PendingRecord:
    """A step's record, complete but for what the device still computes.

    Attributes:
        known: makes the record of what is read at last; a record of its own, made anew then, would cost twice.
        timer: the step's marks.
        flags: why the step is no evidence, as far as that is known.
        local_sq: squared norm of the local gradient as it entered the reduction, weighted and loss-scaled.
        local_factor: turns it into ``rows * |g_i|^2``, but for the loss scale.
        global_sq: squared norm of the reduced gradient, loss-scaled.
        scale: the loss scale that the step ran with; None without a gradient scaler.
        next_scale: the following step's scale; a lower one tells that this step was skipped.
        loss: mean loss over the rank's rows.
    """

    known: Callable[..., StepRecord]
    timer: StepTimer
    flags: StepFlag = StepFlag.NONE
    local_sq: DeferredScalar | None = None
    local_factor: float = 1.0
    global_sq: DeferredScalar | None = None
    scale: DeferredScalar | None = None
    next_scale: DeferredScalar | None = None
    loss: DeferredScalar | None = None

    def ready(self) -> bool:
        """Whether every part can be read without waiting."""
        if self.scale is not None and self.next_scale is None:
            return False
        parts = (self.local_sq, self.global_sq, self.scale, self.next_scale, self.loss)
        return self.timer.ready() and all(part is None or part.ready() for part in parts)

    def resolve(self) -> StepRecord:
        """Return the record with every part in place; what cannot be read yet is left out."""
        scale = self._read(self.scale) or 1.0
        next_scale = self._read(self.next_scale)
        skipped = next_scale is not None and next_scale < scale
        local_sq, global_sq = self._read(self.local_sq), self._read(self.global_sq)
        return self.known(
            compute_s=self.timer.compute_s(),
            sync_s=self.timer.sync_s(),
            weighted_sq_norm=None if skipped else _finite(local_sq, self.local_factor / scale**2),
            global_sq_norm=None if skipped else _finite(global_sq, 1.0 / scale**2),
            loss=_finite(self._read(self.loss), 1.0),
            flags=self.flags | StepFlag.SKIPPED if skipped else self.flags,
        )

    @staticmethod
    def _read(part: DeferredScalar | None) -> float | None:
        return part.read() if part is not None and part.ready() else None


def _finite(value: float | None, factor: float) -> float | None:
    """Return ``value * factor``, or None for what is unknown or not a number: evidence is finite."""
    if value is None or not math.isfinite(value):
        return None
    return value * factor


class RecordQueue:
    """Records on their way out, in step order.

    Args:
        send: takes complete records; must return at once.
    """

    def __init__(self, send: Callable[[Sequence[StepRecord | IncidentRecord]], None]) -> None:
        self._send = send
        self._pending: deque[PendingRecord] = deque()

    def put(self, pending: PendingRecord) -> None:
        """Take a closed step's record, and send what is complete by now."""
        if self._pending:
            self._pending[-1].next_scale = pending.scale
        self._pending.append(pending)
        self._send_ready()

    def tell(self, incident: IncidentRecord) -> None:
        """Send an incident at once."""
        self._send([incident])

    def flush(self) -> None:
        """Send what the device has finished; the last step counts as not skipped."""
        if self._pending and self._pending[-1].scale is not None:
            self._pending[-1].next_scale = self._pending[-1].scale
        self._send_ready()

    def _send_ready(self) -> None:
        complete: list[StepRecord] = []
        while self._pending:
            oldest = self._pending[0]
            if not oldest.ready():
                if len(self._pending) <= _MOST_PENDING:
                    break
                if not oldest.timer.ready():
                    self._pending.popleft()
                    continue
            complete.append(self._pending.popleft().resolve())
        if complete:
            self._send(complete)
