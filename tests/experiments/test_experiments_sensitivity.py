"""The table of constants: every default between what is tried, every option real, effects told in pairs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments._harness import Settings
from experiments._matrix import Played, paired_effect_pct, seeded
from experiments.lab.cells import Result
from experiments.lab.methods import METHODS
from experiments.lab.play import play
from experiments.sensitivity import CONSTANTS, WORLDS, effect_rows, study
from rex_ray.policies.registry import make_policy, policy_options


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: constant.option)
def test_each_constant_is_an_option_whose_default_lies_between_what_is_tried(constant):
    assert constant.default == policy_options("rex")[constant.option]
    assert constant.halved < constant.default < constant.doubled
    assert type(constant.halved) is type(constant.doubled) is type(constant.default)
    for value in (constant.halved, constant.doubled):
        make_policy("rex", {constant.option: value})


def test_a_constant_is_doubled_as_what_it_means():
    by_name = {constant.option: constant for constant in CONSTANTS}
    factor = by_name["trigger_min_factor"]
    assert factor.doubled - 1 == pytest.approx(2 * (factor.default - 1))
    assert by_name["min_gain"].halved == pytest.approx(by_name["min_gain"].default / 2)


def test_no_constant_twice():
    assert len({constant.option for constant in CONSTANTS}) == len(CONSTANTS)


def result(tta_s):
    return Result(
        tta_s=tta_s, total_s=tta_s, num_steps=1, num_rows=1, smallest_batch=1, largest_batch=1, imbalance=0.0, rii=0.0,
        rii_wait=0.0,
    )  # fmt: skip


def test_effects_are_medians_over_pairs_and_the_largest_comes_first():
    seeds = range(3)
    world = WORLDS["static"]
    tried = CONSTANTS[:2]
    seconds = {cell.key: 100.0 * (1 + cell.seed) for cell in seeded(world, seeds)}
    for constant, factor in zip(tried, (1.02, 1.05), strict=True):
        for value, lengthens in ((constant.halved, factor), (constant.doubled, 1.0)):
            for cell in seeded(replace(world, options={constant.option: value}), seeds):
                seconds[cell.key] = lengthens * 100.0 * (1 + cell.seed)
    played = Played({key: result(tta_s) for key, tta_s in seconds.items()})
    rows = effect_rows(played, ["static"], seeds, tried)
    assert [row["constant"] for row in rows] == [tried[1].option, tried[0].option]
    assert rows[0]["halved_pct"] == pytest.approx(5.0)
    assert rows[0]["doubled_pct"] == pytest.approx(0.0)


def test_a_run_that_missed_its_target_is_no_figure():
    cells = seeded(WORLDS["static"], [0])
    played = Played({cells[0].key: replace(result(1.0), tta_s=None)})
    with pytest.raises(RuntimeError, match=cells[0].key):
        paired_effect_pct(played, cells, cells, seed=0)


def test_worlds_run_the_method_as_it_is():
    assert all(world.method in METHODS and not world.options for world in WORLDS.values())
    assert all(world.charges == "host" for world in WORLDS.values()), "searches and measuring are not free"


@pytest.mark.slow
def test_the_quick_form_sorts_by_effect():
    found = study(Settings(quick=True), lambda cells: [play(cell) for cell in cells]).findings
    largest = [max(abs(row["halved_pct"]), abs(row["doubled_pct"])) for row in found.tables["sensitivity"]]
    assert largest == sorted(largest, reverse=True)
    assert found.figures["largest_effect_pct_transient"] == largest[0]
