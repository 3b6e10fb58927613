"""What control costs on the critical path, beside the steps themselves.

The slower steps of probes and trials are steps like any others and already counted. What they are not is charged here,
between the steps: no worker's clock sees it, so the evidence stays that of a run without charges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rex_ray.core.errors import ConfigError

__all__ = ["FREE", "Charges", "charges_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Charges:
    """Extra time of a step by what control does in it. The default charges nothing.

    A method pays for what it does: one that never switches pays no switch. Whether it measures is for the caller to
    say, since the engine shows every step to every method.

    Attributes:
        measuring_factor: how many times as long a step takes where times and norms are measured and control runs
            beside it. ``python -m experiments.overhead`` gave 1.013 at steps of 58 ms; it is a fixed .7 ms of the
            host, so longer steps are overcharged.
        measuring_s: the same as seconds: those .7 ms, for steps much longer than the ones they were measured at.
        search_factor: the same while the search helper works. ``python -m experiments.search_cost`` gave 1.080 for
            steps that wait for a device, and 1.027 for steps that compute on the host.
        switch_steps: steps' time that the first step after a switch takes longer. None has been measured on a GPU:
            on processors, the sampler's change of shares costs nothing that shows. A device that tunes its kernels to
            each new shape (cuDNN's benchmark mode) takes some nine times as long for the first step of a shape.
        switch_s: seconds likewise.
    """

    measuring_factor: float = 1.0
    measuring_s: float = 0.0
    search_factor: float = 1.0
    switch_steps: float = 0.0
    switch_s: float = 0.0

    def __post_init__(self) -> None:
        if not (1 <= self.measuring_factor < math.inf and 1 <= self.search_factor < math.inf):
            raise ConfigError(f"a charge's factor is at least 1 and finite, got {self}; 1 charges nothing")
        seconds = (self.measuring_s, self.switch_steps, self.switch_s)
        if not all(0 <= charge < math.inf for charge in seconds):
            raise ConfigError(f"a charge in steps or seconds is at least 0 and finite, got {self}; 0 charges nothing")

    def of_step(self, step_s: float, *, is_searching: bool, is_switch: bool) -> float:
        """Return what a step is charged in seconds.

        Args:
            step_s: its duration.
            is_searching: the helper works on a search.
            is_switch: the step is the first under other shares.
        """
        factor = self.measuring_factor * (self.search_factor if is_searching else 1.0)
        switch_s = self.switch_s + self.switch_steps * step_s if is_switch else 0.0
        return (factor - 1.0) * step_s + self.measuring_s + switch_s


FREE = Charges()
"""Control costs nothing: simulated times are then those of the steps alone."""

_CHARGES = {
    "none": FREE,
    "measured": Charges(measuring_factor=1.013, search_factor=1.080),
    "host": Charges(measuring_s=0.00075, search_factor=1.080),
    "autotuned": Charges(measuring_factor=1.013, search_factor=1.080, switch_steps=8.0),
}


def charges_of(name: str) -> Charges:
    """Return charges by name.

    ``"none"``; ``"measured"``; ``"host"``, where measuring takes the same time of every step and not the same part;
    ``"autotuned"``, where new shapes cost eight steps as well.

    Raises:
        ConfigError: there are none of that name.
    """
    if name not in _CHARGES:
        raise ConfigError(f"charges must be one of {', '.join(_CHARGES)}, got {name!r}")
    return _CHARGES[name]
