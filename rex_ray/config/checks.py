"""What can be wrong with a configuration: a rule per key, rules between keys, and those of the policy.

All that is wrong is found at once: whoever mends a file should not have to run it once per mistake.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from rex_ray.core.errors import ConfigError, nearest_name_hint
from rex_ray.policies.registry import make_policy, policy_names, policy_options

__all__ = [
    "RULES",
    "Mode",
    "OnNonFinite",
    "OnOutOfMemory",
    "Problem",
    "SmallDataset",
    "WeightBy",
    "problems_of",
]

Mode = Literal["auto", "advise", "off"]
SmallDataset = Literal["error", "clamp"]
WeightBy = Literal["samples", "tokens"]
OnNonFinite = Literal["stop", "skip", "ignore"]
OnOutOfMemory = Literal["retry", "stop"]

_Rule: TypeAlias = Callable[[str, Any], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that cannot work.

    Attributes:
        key: whose value it is: a key, or a key of ``policy_options`` after it; empty where no key is to blame.
        text: what is wrong and what to do about it.
    """

    key: tuple[str, ...]
    text: str


def problems_of(values: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Return all that is wrong with the values of a configuration, in the order of its keys.

    Args:
        values: a value for every key; rules between keys are asked only where each alone is sound.
    """
    found = [
        Problem(key=(name,), text=text)
        for name, rule in RULES.items()
        if (text := rule(name, values[name])) is not None
    ]
    wrong = {problem.key[0] for problem in found}
    for names, between in _BETWEEN.items():
        if not wrong & set(names) and (text := between(*(values[name] for name in names))) is not None:
            found.append(Problem(key=names[:1], text=text))
    if not wrong & {"policy", "policy_options"}:
        found += _policy_problems(values["policy"], values["policy_options"])
    return tuple(found)


_MOST_COUNTED = 2**31 - 1
_MOST_SEED = 2**63 - 1
_MOST_S = 1e9
"""31 years: sockets and clocks count nanoseconds in 64 bits, which overflow at ten times as much."""


def _whole(at_least: int, at_most: int = _MOST_COUNTED) -> _Rule:
    def judge(name: str, value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            return f"{name} must be a whole number of at least {at_least}, got {value!r}"
        return None if value <= at_most else f"{name} must be at most {at_most}, got {value}"

    return judge


def _seconds(*, zero_allowed: bool) -> _Rule:
    limit = "zero or more" if zero_allowed else "more than zero"

    def judge(name: str, value: Any) -> str | None:
        if not _is_finite_number(value) or value < 0 or (value == 0 and not zero_allowed):
            return f"{name} must be {limit} seconds, and finite, got {value!r}"
        return None if value <= _MOST_S else f"{name} must be at most {_MOST_S:g} seconds, got {value!r}"

    return judge


def _one_of(known: tuple[str, ...]) -> _Rule:
    def judge(name: str, value: Any) -> str | None:
        return None if value in known else f"unknown {name} {value!r}{nearest_name_hint(str(value), known)}"

    return judge


def _if_given(rule: _Rule) -> _Rule:
    return lambda name, value: None if value is None else rule(name, value)


def _share(name: str, value: Any) -> str | None:
    if _is_finite_number(value) and value >= 0:
        return None
    return f"{name} must be a share such as 0.02, or 0 to follow the batch at once, got {value!r}"


def _yes_or_no(name: str, value: Any) -> str | None:
    return None if isinstance(value, bool) else f"{name} must be true or false, got {value!r}"


def _path(name: str, value: Any) -> str | None:
    if isinstance(value, str) and value:
        return None
    return f"{name} must be the path of a past run or of its profiles, got {value!r}"


def _label(name: str, value: Any) -> str | None:
    if isinstance(value, str) and value:
        return None
    return f"{name} must name a node label such as 'ray.io/accelerator-type', got {value!r}"


def _options(name: str, value: Any) -> str | None:
    return None if isinstance(value, Mapping) else f"{name} must map option names to values, got {value!r}"


def _policy(name: str, value: Any) -> str | None:
    # Of a file it may be anything, also what is no key.
    known = policy_names()
    if isinstance(value, str) and value in known:
        return None
    return f"unknown {name} {value!r}{nearest_name_hint(str(value), known)}"


RULES: Mapping[str, _Rule] = {
    "global_batch_size": _whole(1),
    "policy": _policy,
    "max_global_batch_size": _if_given(_whole(1)),
    "policy_options": _options,
    "mode": _one_of(get_args(Mode)),
    "seed": _whole(0, _MOST_SEED),
    "device_label": _label,
    "control_interval_steps": _whole(1),
    "norm_interval_steps": _if_given(_whole(0)),
    "lr_slew": _if_given(_share),
    "warm_up_steps": _whole(0),
    "collective_timeout_s": _seconds(zero_allowed=False),
    "join_timeout_s": _seconds(zero_allowed=False),
    "placement_timeout_s": _seconds(zero_allowed=True),
    "checkpoint_interval_s": _seconds(zero_allowed=True),
    "small_dataset": _one_of(get_args(SmallDataset)),
    "weight_by": _one_of(get_args(WeightBy)),
    "on_non_finite": _one_of(get_args(OnNonFinite)),
    "on_out_of_memory": _one_of(get_args(OnOutOfMemory)),
    "replica_check_interval_steps": _whole(0),
    "snapshot_interval_s": _seconds(zero_allowed=True),
    "storage_retry_s": _seconds(zero_allowed=True),
    "local_batch_multiple": _whole(1),
    "learn_from": _if_given(_path),
    "preflight": _yes_or_no,
    "preflight_timeout_s": _seconds(zero_allowed=False),
}
"""What each key alone must be."""


def _growth_limit(max_global_batch_size: int | None, global_batch_size: int) -> str | None:
    if max_global_batch_size is None or max_global_batch_size >= global_batch_size:
        return None
    return (
        f"max_global_batch_size={max_global_batch_size} is below global_batch_size={global_batch_size}; raise it, or "
        "leave it out for 8 times the batch"
    )


def _multiple(global_batch_size: int, local_batch_multiple: int) -> str | None:
    odd = global_batch_size % local_batch_multiple
    if not odd:
        return None
    below, above = global_batch_size - odd, global_batch_size - odd + local_batch_multiple
    return (
        f"global_batch_size={global_batch_size} is no multiple of local_batch_multiple={local_batch_multiple}, and the "
        "shares that make it up are; use " + (f"{below} or {above} rows" if below else f"{above} rows")
    )


_BETWEEN: Mapping[tuple[str, ...], Callable[..., str | None]] = {
    ("max_global_batch_size", "global_batch_size"): _growth_limit,
    ("global_batch_size", "local_batch_multiple"): _multiple,
}


def _policy_problems(policy: str, options: Mapping[str, Any]) -> list[Problem]:
    """Return every option that the policy has not, and what it says of the others."""
    known = policy_options(policy)
    found = [
        Problem(
            key=("policy_options", str(option)),
            text=f"policy {policy!r} has no option {option!r}{nearest_name_hint(str(option), known)}",
        )
        for option in options
        if option not in known
    ]
    kept = {option: value for option, value in options.items() if option in known}
    try:
        make_policy(policy, kept)
    except ConfigError as error:
        # A policy judges its options together and says the first thing; the option that it names is the place.
        named = [option for option in kept if re.search(rf"\b{option}\b", str(error))]
        found.append(Problem(key=("policy_options", *named[:1]), text=str(error)))
    return found


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
