"""ImageNet by traces: who is played how, and that the figures are named and computed as the table says."""

from __future__ import annotations

import pytest

from experiments._harness import Settings
from experiments._matrix import Played
from experiments.imagenet import HALVES, PROFILES, cell_of, method_rows, study
from experiments.lab.cells import Cell, Result
from experiments.lab.fixed import BATCH_OPTION
from experiments.lab.play import play

SECONDS = {"rex": 61.0, "oracle": 60.0, "oracle_delayed": 60.5, "best_fixed_balanced": 62.0, "best_fixed_equal": 100.0}


class Table(dict):
    """A time for every method, whatever the cell."""

    def __getitem__(self, key):
        tta_s = 3600 * SECONDS.get(key.rsplit("-", 1)[0], 80.0)
        return Result(
            tta_s=tta_s, total_s=tta_s, num_steps=1, num_rows=1, smallest_batch=256, largest_batch=512, imbalance=0.0,
            rii=0.0, rii_wait=0.0,
        )  # fmt: skip


def test_a_batch_that_never_changes_needs_no_controller():
    cell = Cell(method="bsp", workload="bert", cluster="2xT4,2xV100", global_batch_size=48)
    fixed = Cell(
        method="best_fixed_equal", workload="bert", cluster="2xT4,2xV100", global_batch_size=48,
        options={BATCH_OPTION: 48},
    )  # fmt: skip
    assert play(fixed).tta_s == pytest.approx(play(cell).tta_s, rel=1e-9)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("half", HALVES)
def test_every_method_runs_on_the_named_cluster_at_the_reference_batch(half, profile):
    for method in ("bsp", "rex", "oracle", "best_fixed_equal", "best_fixed_balanced", "rex, charged in proportion"):
        cell = cell_of(method, half, profile)
        assert cell.cluster == f"{half}xT4,{half}x{profile}"
        assert cell.global_batch_size == 256
    assert cell_of("bsp", half, profile).options[BATCH_OPTION] == 256
    assert 256 <= cell_of("best_fixed_equal", half, profile).options[BATCH_OPTION] <= 2048


def test_ratios_are_between_medians_of_the_same_seeds():
    rows = method_rows(Played(Table()), 2, "V100", {"bsp": range(3), "rex": range(3), "oracle": range(3)})
    by_method = {row["method"]: row for row in rows}
    assert by_method["rex"]["to_oracle"] == pytest.approx(61 / 60, abs=1e-4)
    assert by_method["oracle"]["over_oracle_pct"] == 0.0
    # bsp is played as a fixed batch.
    assert by_method["rex"]["to_bsp"] == pytest.approx(0.61, abs=1e-4)


def constant(cells):
    """A sweep that plays nothing."""
    return [Table()[cell.key] for cell in cells]


def test_figures_are_named_by_the_number_of_gpus():
    found = study(Settings(), constant)
    figures = found.findings.figures
    for gpus in (4, 8, 12, 16):
        for ending in (f"{gpus}", f"{gpus}_other_profile"):
            assert figures[f"time_ratio_rex_bsp_{ending}"] == pytest.approx(0.61, abs=1e-3)
            assert figures[f"ratio_rex_oracle_{ending}"] == pytest.approx(61 / 60, abs=1e-3)
    assert len(found.findings.tables["imagenet"]) == 2 * 4 * 10
    assert {"bsp", "rex", "rex, charged in proportion"} <= {cell.method for cell in found.comparison.cells}
