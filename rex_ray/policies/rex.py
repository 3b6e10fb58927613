"""REX: growth by the noise scale, a measured and searched split, and a trigger, in one composition.

Each part can be left out (``"off"``), asked for its word only (``"advise"``), or followed (``"auto"``).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from rex_ray.core.errors import ConfigError
from rex_ray.policies.base import Part, Policy
from rex_ray.policies.bsp import FixedBatch, NoSearch, NoTrigger
from rex_ray.policies.composition import Composition
from rex_ray.policies.growth.by_noise_scale import LRChoice, RuleName, make_growth
from rex_ray.policies.growth.egmd import Egmd, Statistic, Test
from rex_ray.policies.rollback import RollBack
from rex_ray.policies.search.beyond_curves import AxSearch
from rex_ray.policies.search.rules import SearchRules
from rex_ray.policies.split.fixed import FixedSplit
from rex_ray.policies.split.probing import ProbingSplit
from rex_ray.policies.split.spline import SplineSplit
from rex_ray.policies.trigger.response import Response
from rex_ray.policies.trigger.two_level import TwoLevelTrigger

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
    probe: bool = False,
    growth_rule: RuleName = "egmd",
    growth_test: Test = "wilcoxon",
    growth_statistic: Statistic = "linear",
    growth_alpha: float = 0.05,
    growth_window: int = 8,
    growth_min_gain: float = 0.02,
    growth_jump: bool = True,
    growth_optimism: float = 0.5,
    growth_gate: bool = True,
    lr_rule: LRChoice = "auto",
    lr_tolerance: float = 0.03,
    search_min_gain: float = 0.03,
    search_measured: bool = True,
    search_min_mismatch: float = 0.05,
    search_trials: int = 10,
    search_trial_steps: int = 10,
    search_budget: float = 0.02,
    trigger_min_factor: float = 1.15,
    trigger_num_sds: float = 5.0,
    trigger_hits: int = 2,
    trigger_fast_factor: float = 1.15,
    trigger_cooldown_steps: int = 5,
    trigger_max_hold_steps: int = 160,
    trigger_switch_cost_steps: float = 0.5,
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
        probe: whether two mirrored probes come before the first plan, see ``ProbingSplit``; they seldom pay.
        growth_rule: ``"egmd"`` doubles where a test allows, ``"growth10"`` adds a tenth while the noise scale is above
            the batch, ``"goodput"`` takes the batch of the best goodput once per epoch.
        growth_test: see ``Egmd``, as the next seven.
        growth_statistic: what is tested.
        growth_alpha: level of the test.
        growth_window: blocks of measured steps behind it.
        growth_min_gain: least gain in goodput.
        growth_jump: whether goodput itself is tested, and not only twice the batch.
        growth_optimism: how much of the slowing predicted for a batch that was never run is left out.
        growth_gate: whether goodput is asked at all.
        lr_rule: how the learning rate follows the batch, see ``NoiseScaleGrowth``.
        lr_tolerance: from which change of the noise scale on it is set afresh, see there.
        search_min_gain: see ``SearchRules``.
        search_measured: whether a search may run candidates where the curves err.
        search_min_mismatch: see ``SearchRules``.
        search_trials: candidates of a measured search.
        search_trial_steps: clean steps that time one.
        search_budget: fraction of all steps that they may cost.
        trigger_min_factor: see ``TwoLevelTrigger``.
        trigger_num_sds: see ``TwoLevelTrigger``.
        trigger_hits: see ``TwoLevelTrigger``.
        trigger_fast_factor: see ``TwoLevelTrigger``; 0 leaves the two-level test alone.
        trigger_cooldown_steps: see ``Response``.
        trigger_max_hold_steps: see ``Response``.
        trigger_switch_cost_steps: see ``Response``.
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
    planned = ProbingSplit(inner=measured) if probe else measured
    egmd = Egmd(
        test=growth_test,
        statistic=growth_statistic,
        alpha=growth_alpha,
        window=growth_window,
        min_gain=growth_min_gain,
        jump=growth_jump,
        optimism=growth_optimism,
        gate=growth_gate,
    )
    sized = make_growth(growth_rule, egmd, lr_rule, lr_tolerance)
    # What a search finds is a split: it does not act where the split itself may only advise.
    if split == "advise" and search == "auto":
        modes["search"] = "advise"
    rules = SearchRules(
        min_gain=search_min_gain,
        measured=search_measured and modes["search"] == "auto",
        acts=modes["search"] == "auto",
        min_mismatch=search_min_mismatch,
        max_measured_trials=search_trials,
        trial_steps=search_trial_steps,
        budget=search_budget,
    )
    watched = TwoLevelTrigger(
        min_factor=trigger_min_factor,
        num_sds=trigger_num_sds,
        num_hits=trigger_hits,
        fast_factor=trigger_fast_factor,
        response=Response(
            cooldown_steps=trigger_cooldown_steps,
            max_hold_steps=trigger_max_hold_steps,
            switch_cost_steps=trigger_switch_cost_steps,
        ),
    )
    method: Policy[Any] = Composition(
        name="rex",
        growth=FixedBatch() if growth == "off" else sized,
        split=FixedSplit() if split == "off" else planned,
        trigger=NoTrigger() if trigger == "off" or split == "off" else watched,
        search=NoSearch() if search == "off" or split == "off" else AxSearch(rules=rules),
        advising=frozenset(part for part, mode in modes.items() if mode == "advise"),
    )
    return RollBack(method) if rollback else method
