"""What an out-of-memory error looks like, and what is done before anything is tried again."""

from __future__ import annotations

import gc

import torch

from rex_ray.core.errors import MemoryExhaustedError

__all__ = ["free_memory", "is_out_of_memory"]

_SIGNS = (
    "out of memory",  # CUDA, HIP, XPU and MPS allocators
    "can't allocate memory",  # the CPU's
    "_STATUS_ALLOC_FAILED",  # cuBLAS and cuDNN, whose workspaces no allocator of torch knows
)

_MOST_CAUSES = 8


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what caused it, says that a device or the host had no memory left."""
    cause: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if cause is None:
            return False
        if isinstance(cause, torch.OutOfMemoryError | MemoryError | MemoryExhaustedError):
            return True
        # Not any error's text: who waited for a rank that ran out of memory says so, too.
        if isinstance(cause, RuntimeError) and any(sign in str(cause) for sign in _SIGNS):
            return True
        cause = cause.__cause__
    return False


def free_memory(device: torch.device) -> None:
    """Give back what nobody holds any more, so that a smaller try finds it, and forget the peak of the one that failed.

    Call it when the error and its traceback are gone: its frames hold the activations of the pass that failed.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
