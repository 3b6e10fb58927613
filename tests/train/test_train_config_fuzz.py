"""Whatever a YAML file holds, it is a configuration that can run or a ConfigError: never anything else."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rex_ray import ConfigError, RexConfig
from rex_ray.policies.registry import policy_names, policy_options

NAMES = [field.name for field in dataclasses.fields(RexConfig)]

odd_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.sampled_from(["", "auto", "rex", "off", "skip", "1e3", "\x00", "nan"]),
        st.dates(),
        st.binary(max_size=4),
    ),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["min_gain", "T4", 3]), inner, max_size=2)
    ),
    max_leaves=4,
)
options = st.sampled_from(policy_names()).flatmap(
    lambda name: st.fixed_dictionaries(
        {
            "policy": st.just(name),
            "policy_options": st.dictionaries(st.sampled_from(sorted(policy_options(name))), odd_values, max_size=3),
        }
    )
)


def judged(values: Any) -> None:
    try:
        config = RexConfig.from_mapping(values)
    except ConfigError:
        return
    config.worker_options()
    assert RexConfig.from_mapping(config.to_mapping()) == config


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*NAMES, "global_batchsize", 7, None]), odd_values, max_size=4))
def test_any_values_are_a_configuration_or_a_config_error(values):
    judged(values)
    judged({"global_batch_size": 64} | values)


@settings(max_examples=150, deadline=None)
@given(options)
def test_any_options_of_any_policy_are_taken_or_refused_with_a_config_error(values):
    judged({"global_batch_size": 64} | values)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(), st.text(), odd_values.map(yaml.dump)))
def test_any_file_is_a_configuration_or_a_config_error(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(ConfigError):
            RexConfig.from_yaml(path)
