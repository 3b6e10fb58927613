"""Who is compared: policies and ablations under the names of the tables, and the controls that know more than any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from experiments._harness import Scalar
from rex_ray.core.errors import ConfigError, nearest_name_hint

__all__ = ["CONTROLS", "METHODS", "PERIODS", "Method", "method_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A policy with options.

    Attributes:
        policy: see ``policies.registry``.
        options: what the method sets.
    """

    policy: str
    options: Mapping[str, Scalar] = field(default_factory=dict)


METHODS: Mapping[str, Method] = {
    "bsp": Method(policy="bsp"),
    "dlb": Method(policy="dlb"),
    "lb_bsp": Method(policy="lb_bsp"),
    "omnilearn": Method(policy="omnilearn"),
    "pollux": Method(policy="pollux"),
    "growth10": Method(policy="growth10"),
    "cannikin": Method(policy="cannikin"),
    "rex": Method(policy="rex"),
    "rex-no-growth": Method(policy="rex", options={"growth": "off"}),
    "rex-no-split": Method(policy="rex", options={"split": "off"}),
    "rex-no-trigger": Method(policy="rex", options={"trigger": "off"}),
    "rex-no-search": Method(policy="rex", options={"search": "off"}),
    "rex-growth10": Method(policy="rex", options={"growth_rule": "growth10"}),
    "rex-goodput": Method(policy="rex", options={"growth_rule": "goodput"}),
}

CONTROLS = ("oracle", "oracle_delayed", "best_fixed_equal", "best_fixed_balanced")
"""The oracle knows every curve, script and noise scale; the delayed one hears of an episode 10 steps late. The best
fixed batches are what a sweep finds, which a user would pay for."""

PERIODS: Mapping[str, str] = {
    "bsp": "never",
    "dlb": "shares: each epoch",
    "lb_bsp": "shares: every 10 steps",
    "omnilearn": "shares: every 10 steps",
    "pollux": "batch: each epoch, first when the noise scale is known",
    "growth10": "batch: every 4 measured steps",
    "cannikin": "batch and shares: each epoch",
    "rex": "batch: every 4 measured steps; shares: with the batch, on an alarm, on a search's advice",
    "rex-no-trigger": "batch: every 4 measured steps; shares: with the batch, on a search's advice",
    "best_fixed_equal": "never, after a sweep",
    "best_fixed_balanced": "never, after a sweep",
    "oracle": "batch: every 8 steps; shares: every step",
    "oracle_delayed": "batch: every 8 steps; shares: every step, 10 late",
}
"""When each of those in the headline tables may change what. Norms are measured at each of the first 40 steps of a
batch, then at every fourth."""


def method_of(name: str) -> Method:
    """Return a method by its name.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}{nearest_name_hint(name, [*METHODS, *CONTROLS])}")
    return METHODS[name]
