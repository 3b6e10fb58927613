"""What a ``ScalingConfig`` asks for, and what it must not: Ray Train takes much that it then waits for without end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from ray._private.label_utils import validate_label_selector
from ray.train import ScalingConfig

from rex_ray.core.errors import ConfigError, nearest_name_hint

__all__ = ["check_elastic", "check_scaling", "resources_per_worker", "selector_per_worker"]

_STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_HALF: Final = 0.5
_SPREAD_OUT: Final = "STRICT_SPREAD"


def check_scaling(scaling: ScalingConfig, backend: str | None = None) -> None:
    """Refuse what no cluster could ever give, and what we do not train on.

    Args:
        scaling: the group asked for.
        backend: of ``torch.distributed``, None for the device's own.

    Raises:
        ConfigError: names the field, its value and what to write instead.
    """
    if scaling.use_tpu or scaling.topology:
        raise ConfigError(
            f"ScalingConfig(use_tpu={scaling.use_tpu}, topology={scaling.topology!r}): rex_ray trains on CPUs and CUDA "
            "devices; leave both out"
        )
    strategy = scaling.placement_strategy
    if strategy not in _STRATEGIES:
        raise ConfigError(f"unknown placement_strategy {strategy!r}{nearest_name_hint(str(strategy), _STRATEGIES)}")
    _check_resources(scaling)
    _check_whole_gpus(scaling, backend)
    _check_selectors(scaling.label_selector)


def check_elastic(scaling: ScalingConfig) -> None:
    """Refuse what keeps an elastic group from ever growing or shrinking.

    Raises:
        ConfigError: a list of label selectors with a range of workers: Ray Train gives a smaller group the first ones
            of the list, and waits for ever for the node that it has lost.
    """
    if scaling.min_workers < scaling.max_workers and isinstance(scaling.label_selector, list):
        kinds: dict[str, list[str]] = {}
        for selector in scaling.label_selector:
            for key, value in selector.items():
                kinds.setdefault(key, []).append(value)
        one = {key: f"in({', '.join(dict.fromkeys(values))})" for key, values in kinds.items()}
        raise ConfigError(
            f"num_workers={scaling.num_workers} with one label selector per worker cannot shrink: give one selector "
            f"for all, such as label_selector={one}"
        )


def resources_per_worker(scaling: ScalingConfig) -> dict[str, float]:
    """Return what Ray Train reserves for each worker, its defaults and ``accelerator_type`` included."""
    return {name: float(amount) for name, amount in scaling._resources_per_worker_not_none.items()}


def selector_per_worker(scaling: ScalingConfig) -> list[dict[str, str]]:
    """Return the selectors of the smallest group; of a list Ray Train likewise takes the first ones."""
    least: int = scaling.min_workers
    match scaling.label_selector:
        case None:
            return [{}] * least
        case dict() as one:
            return [one] * least
        case several:
            return list(several[:least])


def _check_resources(scaling: ScalingConfig) -> None:
    given = scaling.resources_per_worker
    if given is None:
        return
    for name, amount in given.items():
        is_number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if not is_number or not 0 <= amount < math.inf:
            raise ConfigError(
                f"resources_per_worker={given}: {name!r} must be a number of zero or more, and finite, got {amount!r}"
            )
    if not resources_per_worker(scaling):
        raise ConfigError(
            f"resources_per_worker={given} asks for nothing, so that workers could be placed nowhere; give each "
            "something of a CPU, such as {'CPU': 0.1}"
        )


def _check_whole_gpus(scaling: ScalingConfig, backend: str | None) -> None:
    """Two processes on one card cannot meet in an all-reduce of NCCL's, which finds it out late and says little.

    Ray packs fractions onto as few cards as hold them; two of more than a half each never share one.
    """
    gpus = resources_per_worker(scaling).get("GPU", 0.0)
    if gpus > 1 and gpus != int(gpus):
        raise ConfigError(f"{gpus:g} GPUs per worker: more than one must be a whole number, as Ray counts them")
    shares_a_card = 0 < gpus <= _HALF and scaling.max_workers > 1 and scaling.placement_strategy != _SPREAD_OUT
    if shares_a_card and backend != "gloo":
        raise ConfigError(
            f"{gpus:g} GPU for each of {scaling.max_workers} workers puts several on one card, where NCCL cannot "
            "reduce between them; give each a whole GPU (a large card takes a larger share), keep them on different "
            f"nodes by placement_strategy={_SPREAD_OUT!r}, or use backend='gloo'"
        )


def _check_selectors(selectors: Any) -> None:
    for selector in selectors if isinstance(selectors, list) else [] if selectors is None else [selectors]:
        are_texts = isinstance(selector, Mapping) and all(
            isinstance(text, str) for pair in selector.items() for text in pair
        )
        if not are_texts:
            raise ConfigError(
                f"a label selector must map label names to text, got {selector!r}; write for example "
                "{'ray.io/accelerator-type': 'in(T4,V100)'}"
            )
        wrong = validate_label_selector(dict(selector))
        if wrong is not None:
            raise ConfigError(
                f"label selector {dict(selector)}: {wrong.rstrip('.')}; write for example 'T4', '!T4' or 'in(T4,V100)'"
            )
