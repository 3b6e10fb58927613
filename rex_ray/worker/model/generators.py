"""Random states of this process, taken before a pass and given back before it is tried again."""

from __future__ import annotations

import torch

__all__ = ["GeneratorStates"]


class GeneratorStates:
    """The default generators of the CPU and of one device, as they are now.

    Args:
        device: where the model computes.
    """

    __slots__ = ("_cpu", "_cuda", "_device")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Take the states back."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
