"""Label selectors and the question whether a cluster can hold a group; no cluster is needed to ask it."""

from __future__ import annotations

import contextlib
from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.train import ScalingConfig

from rex_ray import ConfigError
from rex_ray.train import placement
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


def test_a_worker_gives_way_to_another_that_has_no_other_node() -> None:
    # Placed one after the other, each where it fits, the third would find V100 and A100 taken or refused.
    nodes = [node(1, kind="T4"), node(1, kind="V100"), node(1, kind="A100")]
    wanted = [{"kind": "in(T4,V100)"}, {"kind": "in(V100,A100)"}, {"kind": "!A100"}]
    assert not unplaced(nodes, wanted, {"CPU": 1})
    assert unplaced(nodes[:2], wanted, {"CPU": 1}).total() == 1


kinds = st.sampled_from("abc")
choices = st.one_of(kinds.map(lambda kind: {"kind": kind}), kinds.map(lambda kind: {"kind": f"!{kind}"}), st.just({}))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(kinds, st.integers(0, 2)), max_size=3), st.lists(choices, max_size=4), st.booleans())
def test_no_placement_holds_more_than_is_found(
    room: list[tuple[str, int]], wanted: list[dict[str, str]], spread: bool
) -> None:
    nodes = [node(cpus, kind=kind) for kind, cpus in room]
    most = 0
    for places in product([None, *range(len(nodes))], repeat=len(wanted)):
        used = Counter(place for place in places if place is not None)
        fits = all(selector_matches(s, nodes[p].labels) for s, p in zip(wanted, places, strict=True) if p is not None)
        if fits and all(count <= min(room[place][1], 1 if spread else 9) for place, count in used.items()):
            most = max(most, used.total())
    left = unplaced(nodes, wanted, {"CPU": 1}, "STRICT_SPREAD" if spread else "PACK")
    assert left.total() == len(wanted) - most


def test_strict_strategies_want_one_node_or_one_each() -> None:
    nodes = [node(2, kind="T4"), node(3, kind="V100")]
    assert not unplaced(nodes, [{}] * 5, {"CPU": 1}, "SPREAD")
    assert not unplaced(nodes, [{}] * 3, {"CPU": 1}, "STRICT_PACK")
    assert unplaced(nodes, [{}] * 5, {"CPU": 1}, "STRICT_PACK").total() == 2
    assert not unplaced(nodes, [{}] * 2, {"CPU": 1}, "STRICT_SPREAD")
    assert unplaced(nodes, [{}] * 3, {"CPU": 1}, "STRICT_SPREAD").total() == 1
    assert unplaced([], [{}], {"CPU": 1}, "STRICT_PACK").total() == 1


def test_parts_of_a_resource_add_up() -> None:
    assert not unplaced([node(1)], [{}] * 10, {"CPU": 0.1})
    assert unplaced([node(1)], [{}] * 11, {"CPU": 0.1}).total() == 1


def test_a_resource_that_no_node_has_is_named_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "live_nodes", lambda: [Node(labels={}, resources={"CPU": 4.0, "GPU": 1.0})])
    monkeypatch.setattr(placement, "_asked_for", lambda *_: contextlib.nullcontext())
    asked = ScalingConfig(num_workers=1, resources_per_worker={"gpu": 1})
    with pytest.raises(ConfigError, match=r"no node has any 'gpu' \(did you mean 'GPU'\?\)"):
        placement.check_placement(asked, 0.0)
    asked = ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD")
    with pytest.raises(ConfigError, match=r"1 x \[any node\] .* on a node of its own \(placement_strategy='STRICT_"):
        placement.check_placement(asked, 0.0)
    asked = ScalingConfig(num_workers=1, accelerator_type="T4")
    with pytest.raises(ConfigError, match=r"no node has any 'accelerator_type:T4'"):
        placement.check_placement(asked, 0.0)


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5), min_size=1))
def test_a_cluster_made_for_a_group_holds_it_and_no_more(devices: dict[str, int]) -> None:
    nodes = [Node(labels={LABEL: device}, resources={"CPU": count}) for device, count in devices.items()]
    selectors = label_selectors(devices)
    assert not unplaced(nodes, selectors, {"CPU": 1})
    assert sum(unplaced(nodes, [*selectors, {}], {"CPU": 1}).values()) == 1
