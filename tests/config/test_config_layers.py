"""A configuration from defaults, a file, the environment and a caller: who wins, and what is said of mistakes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import rex_ray
from rex_ray import ConfigError, RexConfig
from rex_ray.config.checks import RULES
from rex_ray.config.layers import RESERVED
from rex_ray.config.plain_yaml import read_document, read_value, write_document
from rex_ray.config.wording import commented_yaml, meanings_in

FIELDS = [field.name for field in dataclasses.fields(RexConfig)]


def test_every_field_has_a_rule_and_a_meaning() -> None:
    assert list(RULES) == FIELDS
    meanings = meanings_in(RexConfig.__doc__)
    assert list(meanings) == FIELDS
    assert all(meanings.values())


def test_later_layers_win_and_each_value_knows_where_it_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "rex.yaml"
    path.write_text("global_batch_size: 64\nseed: 1\nmode: off\npolicy_options:\n  min_gain: 0.1\n  trigger: off\n")
    environ = {"REX_RAY_SEED": "2", "REX_RAY_POLICY_OPTIONS__MIN_GAIN": "2e-1", "PATH": "/bin"}
    config = RexConfig.load(path, environ=environ, global_batch_size=128)
    assert (config.global_batch_size, config.seed, config.mode) == (128, 2, "off")
    assert config.policy_options == {"min_gain": 0.2, "trigger": "off"}
    layers = RexConfig.layers(path, environ=environ)
    assert layers.origin_of(("seed",)) == "REX_RAY_SEED"
    assert layers.origin_of(("mode",)) == f"{path}:3"
    assert layers.origin_of(("policy_options", "trigger")) == f"{path}:6"
    assert layers.origin_of(("policy_options", "min_gain")) == "REX_RAY_POLICY_OPTIONS__MIN_GAIN"
    assert layers.origin_of(("policy",)) == ""


def test_the_environment_counts_only_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REX_RAY_SEED", "7")
    (tmp_path / "rex.yaml").write_text("global_batch_size: 64\n")
    assert RexConfig(global_batch_size=64).seed == 0
    assert RexConfig.from_mapping({"global_batch_size": 64}).seed == 0
    assert RexConfig.from_yaml(tmp_path / "rex.yaml").seed == 0
    assert RexConfig.load(tmp_path / "rex.yaml").seed == 7
    assert RexConfig.load(tmp_path / "rex.yaml", environ={}).seed == 0


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("REX_RAY_SEDE", "1", "unknown variable REX_RAY_SEDE in the environment (did you mean 'REX_RAY_SEED'?)"),
        ("REX_RAY_SEED__X", "1", "unknown variable REX_RAY_SEED__X"),
        ("REX_RAY_SEED", "", "REX_RAY_SEED is empty: give it a value, or unset it"),
        ("REX_RAY_SEED", "one", "REX_RAY_SEED: seed must be a whole number of at least 0, got 'one'"),
        ("REX_RAY_LEARN_FROM", "''", "learn_from must be the path of a past run or of its profiles, got ''"),
        ("REX_RAY_SEED", "[", "REX_RAY_SEED: '[' cannot be read as a value"),
        ("REX_RAY_POLICY_OPTIONS__MIN_GIAN", "1", "did you mean 'min_gain'?"),
        ("REX_RAY_POLICY_OPTIONS", "3", "policy_options must map option names to values, got 3"),
    ],
)
def test_a_variable_that_cannot_mean_anything_is_named(variable: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        RexConfig.load(environ={variable: value}, global_batch_size=64)


def test_all_that_is_wrong_is_said_at_once_each_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rex.yaml"
    path.write_text(
        "global_batch_size: 100\npolcy: rex\nlocal_batch_multiple: 8\nseed: -1\n"
        "policy_options:\n  a: 1\n  min_gain: 4\n"
    )
    with pytest.raises(ConfigError) as caught:
        RexConfig.load(path, environ={"REX_RAY_LR_SLEW": "-1"})
    lines = str(caught.value).splitlines()
    places = [line.partition(": ")[0].removeprefix(str(path)) for line in lines]
    assert sorted(places) == [":1", ":2", ":4", ":6", ":7", "REX_RAY_LR_SLEW"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it holds nothing"),
        ("- 1\n", "it holds list"),
        ("a: [\n", "line 2"),
        ("seed: 1\nseed: 2\n", "line 2: key 'seed' stands twice"),
        ("a: 1\n---\nb: 2\n", "line 2"),
        ("[" * 3000, "nested too deeply"),
    ],
)
def test_what_is_no_configuration_says_what_it_is(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rex.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        RexConfig.from_yaml(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("1e-3", 1e-3),
        ("010", "010"),
        ("1:30", "1:30"),
        ("1_000", 1000),
        ("2026-01-01", "2026-01-01"),
        ("null", None),
        ("{T4: 33, V100: 95}", {"T4": 33, "V100": 95}),
        (".inf", float("inf")),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    assert read_value(text) == value
    assert type(read_value(text)) is type(value)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
words = st.sampled_from(["off", "no", "1e3", "010", "1:30", "~", "<<", "", "null", "1_0", ".nan", "=", "2026-01-01"])


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=5) | words, plain | words, max_size=4))
def test_what_is_written_is_read_back_and_by_other_readers_too(values: dict[str, Any]) -> None:
    text = write_document(values)
    assert read_document(text).value == values
    assert yaml.safe_load(text) == values


def test_the_commented_file_holds_every_default_behind_its_sign() -> None:
    config = RexConfig(global_batch_size=256)
    text = commented_yaml(config.to_mapping(), meanings_in(RexConfig.__doc__), lambda key: key != "global_batch_size")
    assert RexConfig.from_mapping(read_document(text).value) == config
    everything = re.sub(r"^#(?! )", "", text, flags=re.MULTILINE)
    assert read_document(everything).value == config.to_mapping()
    assert all(len(line) <= 120 for line in text.splitlines())


def test_no_other_variable_bears_the_prefix_of_the_configuration() -> None:
    """Whoever sets one that is neither reserved nor a key would be told that it is unknown."""
    named = {
        found
        for path in Path(rex_ray.__file__).parent.rglob("*.py")
        for found in re.findall(r"\bREX_RAY_[A-Z]\w*", path.read_text())
    }
    keys = {f"REX_RAY_{name.upper()}" for name in FIELDS}
    assert {name for name in named if name.partition("__")[0] not in keys} == RESERVED
    RexConfig.load(environ=dict.fromkeys(RESERVED, "here"), global_batch_size=64)


def test_a_file_of_another_kind_is_not_echoed_whole(tmp_path: Path) -> None:
    other = tmp_path / "compose.yaml"
    other.write_text("".join(f"service{number}: x\n" for number in range(40)))
    with pytest.raises(ConfigError) as caught:
        RexConfig.from_yaml(other)
    said = str(caught.value)
    assert len(said.splitlines()) == 10 + 1 + 1
    assert said.count("(known: ") == 1
    assert f"{other}: 30 more unknown keys: is this a configuration of RexConfig?" in said
