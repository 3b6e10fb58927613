"""What a step is worth: shipped noise scales with a source each, and the laws of efficiency."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.learning_table import table
from rex_ray.core.errors import ConfigError
from rex_ray.core.goodput import statistical_efficiency
from rex_ray.scenario import workload_names
from rex_ray.scenario.learning import learning_names, load_learning

PUBLIC = Path(__file__).parents[2].parent / "shared" / "data" / "convergence_curves.csv"
SHIPPED = Path(__file__).parents[2] / "rex_ray" / "scenario" / "learning.toml"


@pytest.mark.parametrize("workload", learning_names())
def test_every_curve_is_positive_and_names_its_source(workload):
    curve = load_learning(workload)
    assert workload in workload_names()
    assert curve.progress_rows[0] == 0
    assert (np.diff(curve.progress_rows) > 0).all()
    assert (curve.noise_scale > 0).all()
    assert curve.progress_rows.size == curve.noise_scale.size <= 12
    assert len(curve.source.commit) == 40
    assert curve.source.path.endswith(".csv")


@pytest.mark.parametrize("workload", learning_names())
def test_the_reference_batch_needs_the_epochs_that_its_run_took(workload):
    curve = load_learning(workload)
    assert curve.measured_batch_sizes[0] == curve.reference_batch_size
    assert curve.epochs_to_target(curve.reference_batch_size) == pytest.approx(curve.measured_epochs[0], rel=0.01)


@pytest.mark.parametrize(("workload", "worst"), [("resnet18", 0.10), ("resnet50", 0.11), ("bert", 0.10)])
def test_efficiency_predicts_the_epochs_of_other_batches_up_to_sixteen_fold(workload, worst):
    curve = load_learning(workload)
    for batch, epochs in zip(curve.measured_batch_sizes, curve.measured_epochs, strict=True):
        if batch <= 16 * curve.reference_batch_size:
            assert curve.epochs_to_target(batch) == pytest.approx(epochs, rel=worst)


@given(st.sampled_from(learning_names()), st.integers(1, 100_000), st.floats(0, 1))
def test_efficiency_is_that_of_the_growth_rule(workload, batch, part):
    curve = load_learning(workload)
    phi = float(curve.noise_scale_at(part * curve.target_rows))
    expected = statistical_efficiency(batch, curve.reference_batch_size, phi)
    assert float(curve.efficiency(batch, phi)) == pytest.approx(expected)


def test_the_noise_scale_is_constant_beyond_both_ends():
    curve = load_learning("resnet50")
    assert float(curve.noise_scale_at(-1.0)) == pytest.approx(curve.noise_scale[0])
    assert float(curve.noise_scale_at(2 * curve.target_rows)) == pytest.approx(curve.noise_scale[-1])


def test_a_workload_without_a_curve_is_told_from_an_unknown_one():
    with pytest.raises(ConfigError, match=r"no public source measured the noise scale of 'lstm' \(measured: resnet18"):
        load_learning("lstm")
    with pytest.raises(ConfigError, match=r"unknown workload 'resnet5' \(did you mean 'resnet50'\?\)"):
        load_learning("resnet5")


@pytest.mark.skipif(not PUBLIC.exists(), reason="the public training curves are not at hand")
def test_the_shipped_table_is_what_the_command_makes():
    assert SHIPPED.read_text(encoding="utf-8").endswith(table(PUBLIC))
