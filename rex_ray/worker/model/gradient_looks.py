"""Whether a gradient is finite, in as few passes over it and as few waits for a device as its kind allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

__all__ = ["ScaleAndLook", "is_finite", "largest_entry", "local_part", "reads_late", "scales_and_looks"]

_SCALE_AND_LOOK: Callable[..., None] | None = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)
"""What a gradient scaler unscales with; there is no public name for it."""


def scales_and_looks(gradient: torch.Tensor) -> bool:
    """Whether a gradient can be scaled and looked at in one pass: its factor is in single precision."""
    return _SCALE_AND_LOOK is not None and gradient.dtype == torch.float32 and not gradient.is_sparse


class ScaleAndLook:
    """Multiplies gradients in place, and looks whether every entry is finite, which costs no pass of its own.

    Its two numbers are made once: making tensors of them would cost more than the look itself.

    Args:
        factor: what gradients are multiplied by.
    """

    def __init__(self, factor: float) -> None:
        self._factor = torch.tensor([factor], dtype=torch.float32)
        self._found = torch.zeros(1)

    def __call__(self, gradients: list[torch.Tensor]) -> bool:
        """Multiply; return whether every entry is finite."""
        assert _SCALE_AND_LOOK is not None
        _SCALE_AND_LOOK(gradients, self._found, self._factor)
        if self._found.item():
            self._found.zero_()
            return False
        return True


def reads_late(value: torch.Tensor) -> bool:
    """Whether the host would have to wait for a value."""
    return value.is_cuda


def local_part(gradient: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a gradient that is divided over ranks; any other one as it is."""
    to_local: Callable[[], torch.Tensor] | None = getattr(gradient, "to_local", None)
    return gradient if to_local is None else to_local()


def is_finite(gradient: torch.Tensor) -> bool:
    """Whether every entry is."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(torch.isfinite(values).all())


def largest_entry(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest entry's size, NaN if one is NaN, in a few launches; nothing in it can overflow."""
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in dense:
        if gradient.numel():
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    first = gradients[0].device
    sizes = [
        torch.stack(torch._foreach_norm(alike, math.inf)).max().to(first, torch.float64) for alike in by_kind.values()
    ]
    return torch.stack(sizes).max() if sizes else torch.zeros((), device=first)
