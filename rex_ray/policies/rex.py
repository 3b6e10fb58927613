"""REX: growth by the noise scale, a measured and searched split, and a trigger, in one composition.

Each part can be left out (``"off"``), asked for its word only (``"advise"``), or followed (``"auto"``).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from rex_ray.core.errors import ConfigError
from rex_ray.policies.base import Part, Policy
from rex_ray.policies.bsp import FixedBatch, NoSearch, NoTrigger
from rex_ray.policies.composition import Composition
from rex_ray.policies.fixed_split import FixedSplit
from rex_ray.policies.rollback import RollBack
from rex_ray.policies.spline_split import SplineSplit

__all__ = ["PartMode", "rex"]

PartMode: TypeAlias = Literal["auto", "advise", "off"]


def rex(  # noqa: PLR0913 - options by name, each with its default
    *,
    growth: PartMode = "auto",
    split: PartMode = "auto",
    trigger: PartMode = "auto",
    search: PartMode = "auto",
    min_gain: float = 0.03,
    min_steps: int = 6,
    max_review_steps: int = 96,
    num_sigmas: float = 2.0,
    rollback: bool = True,
) -> Policy[Any]:
    """REX's method; see the parts for their options.

    Args:
        growth: whether the global batch follows the noise scale.
        split: whether shares follow the measured times.
        trigger: whether lasting slowdowns are answered within an epoch.
        search: whether Ax looks for shares better than the split's.
        min_gain: see ``SplineSplit``.
        min_steps: see ``SplineSplit``.
        max_review_steps: see ``SplineSplit``.
        num_sigmas: see ``SplineSplit``.
        rollback: whether shares that measure worse are taken back, see ``RollBack``.

    Raises:
        ConfigError: a mode that there is not, or a value that cannot work.
    """
    modes: dict[Part, PartMode] = {"growth": growth, "split": split, "trigger": trigger, "search": search}
    for part, mode in modes.items():
        if mode not in get_args(PartMode):
            raise ConfigError(f"option {part!r} of policy 'rex' must be 'auto', 'advise' or 'off', got {mode!r}")
    measured = SplineSplit(
        min_gain=min_gain, min_steps=min_steps, max_review_steps=max_review_steps, num_sigmas=num_sigmas
    )
    method: Policy[Any] = Composition(
        name="rex",
        growth=FixedBatch(),
        split=FixedSplit() if split == "off" else measured,
        trigger=NoTrigger(),
        search=NoSearch(),
        advising=frozenset(part for part, mode in modes.items() if mode == "advise"),
    )
    return RollBack(method) if rollback else method
