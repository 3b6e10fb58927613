"""Ablations: every variant is a real policy, and differs from the one that it is held against by one part alone."""

from __future__ import annotations

import pytest

from experiments._harness import Settings
from experiments._matrix import Played
from experiments.ablation import VARIANTS, WORLDS, _cell, study, variant_rows
from experiments.lab.cells import Result
from experiments.lab.play import play
from rex_ray.policies.registry import make_policy, policy_options

BY_NAME = {variant.name: variant for variant in VARIANTS}
DEFAULTS = policy_options("rex")


def settled(variant):
    return {name: variant.options.get(name, value) for name, value in DEFAULTS.items()}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_variant_can_be_built_and_differs_by_its_part_alone(variant):
    make_policy("rex", variant.options)
    mine, other = settled(variant), settled(BY_NAME[variant.against])
    differing = {name for name in mine if mine[name] != other[name]}
    allowed = {"growth", "growth_gate"} if variant.part == "gate" else {variant.part}
    assert differing <= allowed
    assert bool(differing) == bool(variant.part)


def test_every_part_is_both_added_and_removed():
    added = {variant.part for variant in VARIANTS if variant.part and variant.against != "rex"}
    removed = {variant.part for variant in VARIANTS if variant.part and variant.against == "rex"}
    assert added == removed == {"growth", "gate", "split", "trigger", "search"}


def test_whoever_measures_or_searches_pays_for_it():
    for world in WORLDS.values():
        charged = {variant.name: _cell(world, variant).charges for variant in VARIANTS}
        assert charged.pop("bsp") == "none"
        assert "none" not in charged.values()


class Constant(dict):
    """Every cell takes as long as its method says."""

    def __getitem__(self, key):
        tta_s = {"oracle": 50.0, "oracle_delayed": 51.0}.get(key.rsplit("-", 1)[0], 100.0)
        return Result(
            tta_s=tta_s, total_s=tta_s, num_steps=1, num_rows=1, smallest_batch=1, largest_batch=1, imbalance=0.0,
            rii=0.0, rii_wait=0.0,
        )  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
def test_rows_that_take_equally_long_have_no_effect_and_the_controls_come_last(world):
    rows = variant_rows(Played(Constant()), [world], range(2))
    assert [row["variant"] for row in rows[-2:]] == ["oracle_delayed", "oracle"]
    assert {row["effect_pct"] for row in rows[:-2]} == {0.0}
    assert {row["to_oracle"] for row in rows[:-2]} == {2.0}
    assert ("rex - Ax" in {row["variant"] for row in rows}) == (WORLDS[world].search == "helper")


def play_in_turn(cells):
    return [play(cell) for cell in cells]


@pytest.mark.slow
def test_the_quick_form_has_a_figure_for_every_part():
    found = study(Settings(quick=True), play_in_turn).findings
    for part in ("growth", "gate", "split", "trigger"):
        assert f"removed_{part}_pct_transient" in found.figures
        assert f"alone_{part}_pct_transient" in found.figures
