"""RexConfig: what it refuses, and how it says so; and YAML one to one."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray import ConfigError, RexConfig
from rex_ray.policies.registry import policy_names


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"global_batch_size": 0}, ["global_batch_size", "0", "at least 1"]),
        ({"global_batch_size": 64.0}, ["global_batch_size", "64.0", "whole number"]),
        ({"global_batch_size": True}, ["global_batch_size", "True"]),
        ({"global_batch_size": 64, "policy": "rx"}, ["'rx'", "did you mean 'rex'"]),
        ({"global_batch_size": 64, "policy_options": {"min_gian": 0.1}}, ["'min_gian'", "did you mean 'min_gain'"]),
        ({"global_batch_size": 64, "policy_options": {"min_gain": 2.0}}, ["min_gain", "2.0"]),
        ({"global_batch_size": 64, "mode": "atuo"}, ["'atuo'", "did you mean 'auto'"]),
        ({"global_batch_size": 64, "small_dataset": "clmap"}, ["'clmap'", "did you mean 'clamp'"]),
        ({"global_batch_size": 64, "weight_by": "token"}, ["'token'", "did you mean 'tokens'"]),
        ({"global_batch_size": 64, "max_global_batch_size": 32}, ["32", "below", "64", "raise it"]),
        ({"global_batch_size": 64, "collective_timeout_s": 0.0}, ["collective_timeout_s", "more than zero"]),
        ({"global_batch_size": 64, "join_timeout_s": math.inf}, ["join_timeout_s", "inf"]),
        ({"global_batch_size": 64, "placement_timeout_s": -1.0}, ["placement_timeout_s", "-1.0"]),
        ({"global_batch_size": 64, "control_interval_steps": 0}, ["control_interval_steps", "at least 1"]),
        ({"global_batch_size": 64, "norm_interval_steps": -1}, ["norm_interval_steps", "at least 0"]),
        ({"global_batch_size": 64, "lr_slew": -0.1}, ["lr_slew", "-0.1", "0.02"]),
        ({"global_batch_size": 64, "lr_slew": math.nan}, ["lr_slew", "nan"]),
        ({"global_batch_size": 64, "local_batch_multiple": 0}, ["local_batch_multiple", "at least 1"]),
        ({"global_batch_size": 60, "local_batch_multiple": 8}, ["60", "local_batch_multiple=8", "56 or 64 rows"]),
        ({"global_batch_size": 4, "local_batch_multiple": 8}, ["use 8 rows"]),
        ({"global_batch_size": 10**26}, ["global_batch_size must be at most 2147483647", str(10**26)]),
        ({"global_batch_size": 64, "seed": 2**63}, ["seed must be at most 9223372036854775807"]),
        ({"global_batch_size": 64, "collective_timeout_s": 1e10}, ["must be at most 1e+09 seconds", "10000000000.0"]),
        ({"global_batch_size": 64, "device_label": ""}, ["device_label", "ray.io/accelerator-type"]),
    ],
)
def test_a_bad_value_is_refused_by_name_with_the_remedy(fields: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RexConfig(**fields)
    for words in named:
        assert words in str(caught.value)


def test_an_unknown_key_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "rex.yaml").write_text("global_batch_size: 64\npolicyy: rex\n")
    with pytest.raises(ConfigError, match=r"'policyy'.*did you mean 'policy'"):
        RexConfig.from_yaml(tmp_path / "rex.yaml")


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "a: [", "", "policy: rex\n"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rex.yaml").write_text(text)
    with pytest.raises(ConfigError):
        RexConfig.from_yaml(tmp_path / "rex.yaml")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        RexConfig.from_yaml(tmp_path / "nowhere.yaml")


@given(
    batch=st.integers(1, 10**6),
    growth=st.none() | st.integers(1, 8),
    policy=st.sampled_from(policy_names()),
    mode=st.sampled_from(["auto", "advise", "off"]),
    cooldown=st.none() | st.integers(0, 100),
    timeout=st.floats(1e-3, 1e6),
)
def test_yaml_and_configuration_are_one_to_one(
    tmp_path_factory: pytest.TempPathFactory,
    batch: int,
    growth: int | None,
    policy: str,
    mode: Any,
    cooldown: int | None,
    timeout: float,
) -> None:
    config = RexConfig(
        global_batch_size=batch,
        max_global_batch_size=None if growth is None else growth * batch,
        policy=policy,
        mode=mode,
        policy_options={} if cooldown is None else {"cooldown_steps": cooldown},
        collective_timeout_s=timeout,
    )
    path = tmp_path_factory.mktemp("yaml") / "rex.yaml"
    path.write_text(config.to_yaml())
    assert RexConfig.from_yaml(path) == config


def test_the_group_is_checked_against_the_batch_and_the_rows() -> None:
    config = RexConfig(global_batch_size=4)
    config.check_group(4, dataset_size=4)
    with pytest.raises(ConfigError, match=r"num_workers=0.*ScalingConfig\(num_workers=1\)"):
        config.check_group(0)
    with pytest.raises(ConfigError, match=r"global_batch_size=4 is below num_workers=5.*at least 5 rows"):
        config.check_group(5)
    with pytest.raises(ConfigError, match=r"global_batch_size=4 is above the 3 rows.*clamp"):
        config.check_group(2, dataset_size=3)
    RexConfig(global_batch_size=4, small_dataset="clamp").check_group(2, dataset_size=3)
    in_eights = RexConfig(global_batch_size=32, local_batch_multiple=8)
    in_eights.check_group(4)
    with pytest.raises(ConfigError, match=r"num_workers=5 times local_batch_multiple=8.*at least 40 rows"):
        in_eights.check_group(5)


def by_hand(shares: Any) -> RexConfig:
    return RexConfig(global_batch_size=256, policy="bsp", policy_options={"local_batch_sizes": shares})


def test_shares_set_by_hand_must_sum_to_the_batch() -> None:
    by_hand([33, 33, 95, 95]).check_group(4)
    with pytest.raises(ConfigError, match=r"\[33, 33, 95, 94\] sum to 255 rows over 4 workers, not to .*=256"):
        by_hand([33, 33, 95, 94]).check_group(4)
    with pytest.raises(ConfigError, match="shares for 4 workers and the group has 3"):
        by_hand([33, 33, 95, 95]).check_group(3)
    with pytest.raises(ConfigError, match="holds 33, which is no multiple of local_batch_multiple=8"):
        replace(by_hand([33, 33, 95, 95]), local_batch_multiple=8).check_group(4)


def test_shares_per_kind_of_device_are_checked_as_soon_as_the_kinds_are_known() -> None:
    config = by_hand({"T4": 33, "V100": 95})
    config.check_group(4)
    config.check_group(4, devices=["T4", "V100", "T4", "V100"])
    with pytest.raises(ConfigError, match="sum to 318 rows over 4 workers"):
        config.check_group(4, devices=["T4", "V100", "V100", "V100"])
    with pytest.raises(ConfigError, match=r"no share for a worker on 'V10O' \(did you mean 'V100'"):
        config.check_group(2, devices=["T4", "V10O"])


@pytest.mark.parametrize("shares", ["33", 33, [], {}, [33, 0], [33, True], {"T4": 1.5}])
def test_shares_that_are_none_are_refused(shares: Any) -> None:
    with pytest.raises(ConfigError, match="local_batch_sizes"):
        by_hand(shares)


def test_the_package_and_its_configuration_import_neither_torch_nor_ray() -> None:
    code = (
        "import sys, rex_ray; heavy = {'torch', 'ray', 'pandas', 'ax', 'scipy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert 'RexTrainer' in dir(rex_ray)\n"
        "rex_ray.RexConfig(global_batch_size=8).worker_options()\n"
        "assert not (heavy - {'scipy'}) & set(sys.modules)\n"
        "try: rex_ray.RexTrainr\n"
        "except AttributeError as error: assert 'RexTrainr' in str(error)\n"
        "else: raise SystemExit('an unknown name was found')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "fields",
    [{"policy": name} for name in ("bsp", "dlb", "lb_bsp", "omnilearn")]
    + [{"policy_options": {"growth": "off"}}, {"max_global_batch_size": 64}],
    ids=str,
)
def test_nobody_measures_norms_that_nothing_decides_on(fields: dict[str, Any]) -> None:
    assert RexConfig(global_batch_size=64, **fields).worker_options().norm_interval_steps == 0
    asked = RexConfig(global_batch_size=64, norm_interval_steps=7, **fields)
    assert asked.worker_options().norm_interval_steps == 7
    assert asked.worker_options().norm_dense_steps == 0


def test_growth_has_norms_measured_and_a_mode_that_decides_nothing_has_not() -> None:
    for name in ("rex", "pollux", "growth10", "cannikin"):
        options = RexConfig(global_batch_size=64, policy=name).worker_options()
        assert (options.norm_interval_steps, options.norm_dense_steps) == (4, 40)
    assert RexConfig(global_batch_size=64, mode="advise").worker_options().norm_interval_steps == 4
    assert RexConfig(global_batch_size=64, mode="off").worker_options().norm_interval_steps == 0


def test_only_the_linear_rule_warms_up_by_itself() -> None:
    def slew_of(**fields: Any) -> float | None:
        return RexConfig(global_batch_size=64, **fields).worker_options().lr_slew

    linear = {"policy_options": {"lr_rule": "linear"}}
    assert slew_of() is None
    assert slew_of(lr_slew=0.1) == 0.1
    assert slew_of(**linear) == 0.02
    assert slew_of(lr_slew=0, **linear) is None
