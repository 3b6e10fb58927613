"""The language model: measured cards only, what is charged to whom, and the names of the figures."""

from __future__ import annotations

import pytest

from experiments._harness import Settings
from experiments.lab.cells import Result
from experiments.lab.play import play
from experiments.wikitext import CLUSTERS, METHODS, cell_of, study
from rex_ray.scenario import load_profile, parse_cluster


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_card_was_measured_and_the_reference_batch_fits(cluster):
    profiles = [load_profile(device, "lstm") for device in parse_cluster(cluster)]
    assert {profile.source.repo for profile in profiles} == {"stanford-futuredata/gavel"}
    reference = cell_of("bsp", cluster, "wikitext2").global_batch_size
    assert len(profiles) <= reference <= sum(profile.max_local_batch_size for profile in profiles)


def test_methods_are_charged_and_controls_are_not():
    charged = {method: cell_of(method, CLUSTERS[0], "wikitext2").charges for method in METHODS}
    free = {"oracle", "rex, not charged", "balanced 64", "balanced 128", "equal 64", "equal 128"}
    assert {method for method, charges in charged.items() if charges == "none"} == free
    assert set(charged.values()) == {"none", "host"}


def constant(cells):
    """A sweep that trains nothing."""
    seconds = {"rex": 3.0, "oracle": 2.5}
    return [
        Result(
            tta_s=seconds.get(cell.method, 5.0), total_s=9.0, num_steps=1, num_rows=1, final_metric=0.9,
            smallest_batch=64, largest_batch=64, imbalance=0.0, rii=0.0, rii_wait=0.0,
        )
        for cell in cells
    ]  # fmt: skip


def test_figures_are_the_headline_s_without_an_ending():
    figures = study(Settings(quick=True), constant).findings.figures
    assert figures["tta_ratio_rex_bsp"] == pytest.approx(0.6)
    assert figures["tta_ratio_rex_oracle"] == pytest.approx(1.2)


@pytest.mark.slow
def test_the_quick_form_trains():
    found = study(Settings(quick=True), lambda cells: [play(cell) for cell in cells]).findings
    assert {"tta_ratio_rex_bsp", "tta_ratio_rex_oracle"} <= set(found.figures)
    assert all(row["missed"] == 0 for row in found.tables["wikitext"])
