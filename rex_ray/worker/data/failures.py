"""Failures of reading as values: they cross process boundaries, and others can be told before one is raised."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

from torch.utils.data import get_worker_info

from rex_ray.core.errors import DataError

__all__ = ["Failure", "handed_out_nothing"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why rows could not be had.

    Attributes:
        what: what was tried, e.g. ``"row 17 could not be read"``.
        error: type and text of what was raised.
        trace: the loader process's traceback; empty where the exception itself is at hand.
        cause: the exception, where it was raised in this process.
    """

    what: str
    error: str
    trace: str = ""
    cause: BaseException | None = field(default=None, compare=False)

    @classmethod
    def of(cls, what: str, error: BaseException) -> Failure:
        """Return what was raised as a value; call it where it is caught."""
        named = f"{type(error).__name__}: {error}"
        if get_worker_info() is None:
            return cls(what, named, cause=error)
        return cls(what, named, trace=traceback.format_exc())

    def to_error(self, *, rank: int, epoch: int, step: int) -> DataError:
        """Return the error to raise, with the place in training."""
        text = f"rank {rank}, epoch {epoch}, step {step}: {self.what}: {self.error}"
        error = DataError(f"{text}\nIn the loader process:\n{self.trace.rstrip()}" if self.trace else text)
        error.__cause__ = self.cause
        return error


def handed_out_nothing(error: Exception) -> Failure:
    """Return what torch's DataLoader raised in place of a batch, as a value."""
    what = "the loader processes handed out no batch"
    if isinstance(error, RuntimeError):  # torch's own, of a process that died or did not answer within its ``timeout``
        what += (
            " (a process that was killed ran out of memory or of shared memory as a rule: use fewer num_workers or a "
            "smaller prefetch_factor)"
        )
    return Failure.of(what, error)
