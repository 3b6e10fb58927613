"""Label selectors and the question whether a cluster can hold a group; no cluster is needed to ask it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.train import ScalingConfig

from rex_ray import ConfigError
from rex_ray.train.placement import Node, devices_asked_for, label_selectors, selector_matches, unplaced

LABEL = "ray.io/accelerator-type"


def node(cpus: float, **labels: str) -> Node:
    return Node(labels=labels, resources={"CPU": cpus})


def test_a_mapping_of_devices_becomes_a_selector_per_worker() -> None:
    assert label_selectors({"T4": 2, "V100": 1}) == [{LABEL: "T4"}, {LABEL: "T4"}, {LABEL: "V100"}]
    assert label_selectors({"a": 1}, "gpu") == [{"gpu": "a"}]


@pytest.mark.parametrize("devices", [{}, {"T4": 0}, {"T4": -1}, {"T4": 1.5}, {"T4": True}])
def test_counts_that_are_none_are_refused(devices: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        label_selectors(devices)


@pytest.mark.parametrize(
    ("selector", "devices"),
    [
        (label_selectors({"T4": 1, "V100": 1}), ["T4", "V100"]),
        ({LABEL: "T4"}, ["T4", "T4"]),
        ({LABEL: "in(T4,V100)"}, None),
        ([{LABEL: "T4"}, {"zone": "a"}], None),
        (None, None),
    ],
)
def test_kinds_are_known_early_where_every_worker_is_pinned_to_one(selector: Any, devices: list[str] | None) -> None:
    assert devices_asked_for(ScalingConfig(num_workers=2, label_selector=selector), LABEL) == devices


@pytest.mark.parametrize(
    ("wanted", "value", "matches"),
    [
        ("T4", "T4", True),
        ("T4", "V100", False),
        ("T4", None, False),
        ("!T4", "V100", True),
        ("!T4", "T4", False),
        ("!T4", None, True),
        ("in(T4,V100)", "V100", True),
        ("in(T4, V100)", "V100", True),
        ("in(T4,V100)", "A100", False),
        ("!in(T4,V100)", "A100", True),
        ("!in(T4,V100)", "T4", False),
    ],
)
def test_selectors_mean_what_they_mean_to_ray(wanted: str, value: str | None, matches: bool) -> None:
    labels = {} if value is None else {"kind": value}
    assert selector_matches({"kind": wanted}, labels) is matches


def test_choosy_workers_are_placed_first() -> None:
    nodes = [node(1, kind="T4"), node(1, kind="V100")]
    assert not unplaced(nodes, [{}, {"kind": "T4"}], {"CPU": 1})
    assert unplaced(nodes, [{"kind": "T4"}, {"kind": "T4"}], {"CPU": 1}) == Counter({"kind=T4": 1})
    assert unplaced(nodes, [{"kind": "T4"}], {"CPU": 1, "GPU": 1}) == Counter({"kind=T4": 1})


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5), min_size=1))
def test_a_cluster_made_for_a_group_holds_it_and_no_more(devices: dict[str, int]) -> None:
    nodes = [Node(labels={LABEL: device}, resources={"CPU": count}) for device, count in devices.items()]
    selectors = label_selectors(devices)
    assert not unplaced(nodes, selectors, {"CPU": 1})
    assert sum(unplaced(nodes, [*selectors, {}], {"CPU": 1}).values()) == 1
