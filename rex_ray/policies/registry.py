"""Policies by name, as a configuration or a journal's header names them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rex_ray.core.errors import ConfigError, nearest_name_hint
from rex_ray.policies.base import Policy
from rex_ray.policies.bsp import bsp
from rex_ray.policies.cannikin import cannikin
from rex_ray.policies.dlb import dlb
from rex_ray.policies.growth10 import growth10
from rex_ray.policies.lb_bsp import lb_bsp
from rex_ray.policies.omnilearn import omnilearn
from rex_ray.policies.pollux import pollux
from rex_ray.policies.rex import rex
from rex_ray.policies.wrappers import Cooldown, Hysteresis

__all__ = ["make_policy", "policy_names", "policy_options"]

_BUILDERS: Mapping[str, Callable[..., Policy[Any]]] = {
    "bsp": bsp,
    "cannikin": cannikin,
    "dlb": dlb,
    "growth10": growth10,
    "lb_bsp": lb_bsp,
    "omnilearn": omnilearn,
    "pollux": pollux,
    "rex": rex,
}
_WRAPPERS: Mapping[str, float] = {"cooldown_steps": 0, "hysteresis_gain": 0.0}


def policy_names() -> tuple[str, ...]:
    """Return the names that ``make_policy`` knows, sorted."""
    return tuple(sorted(_BUILDERS))


def policy_options(name: str) -> dict[str, Any]:
    """Return the options of a policy with their defaults, those of the wrappers included.

    Raises:
        ConfigError: no policy has this name.
    """
    parameters = inspect.signature(_builder(name)).parameters
    return {option: parameter.default for option, parameter in parameters.items()} | dict(_WRAPPERS)


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy[Any]:
    """Build a policy.

    Args:
        name: one of ``policy_names()``.
        options: hyperparameters by name, see ``policy_options``; beside the policy's own, ``cooldown_steps`` and
            ``hysteresis_gain`` wrap it in ``Cooldown`` and ``Hysteresis``.

    Raises:
        ConfigError: an unknown name or option (the nearest one is named), or a value that cannot work.
    """
    build = _builder(name)
    known = policy_options(name)
    given = dict(options or {})
    for option, value in given.items():
        if option not in known:
            raise ConfigError(f"policy {name!r} has no option {option!r}{nearest_name_hint(option, known)}")
        if isinstance(known[option], int | float):  # any other option is judged by its policy
            _check_number(name, option, value, known[option])
    cooldown_steps = int(given.pop("cooldown_steps", 0))
    hysteresis_gain = float(given.pop("hysteresis_gain", 0.0))
    policy = build(**given)
    if hysteresis_gain:
        policy = Hysteresis(policy, hysteresis_gain)
    if cooldown_steps:
        policy = Cooldown(policy, cooldown_steps)
    return policy


def _builder(name: str) -> Callable[..., Policy[Any]]:
    # Of a file the name may be anything, also what is no key.
    if not isinstance(name, str) or name not in _BUILDERS:
        raise ConfigError(f"unknown policy {name!r}{nearest_name_hint(str(name), _BUILDERS)}")
    return _BUILDERS[name]


def _check_number(name: str, option: str, value: object, default: float) -> None:
    """A whole number stays one: 6.5 steps are nobody's intention. Nor is 1 a yes."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"option {option!r} of policy {name!r} must be true or false, got {value!r}")
        return
    whole = isinstance(default, int)
    wanted = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted):
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"option {option!r} of policy {name!r} must be {kind}, got {value!r} (default: {default})")
