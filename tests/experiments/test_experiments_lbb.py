"""The measured box: how its durations are counted, and that the shipped profile explains them without a factor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from experiments._harness import Settings
from experiments.lbb import MEASURED, Form, as_published_s, box_learning, measure, method_row
from rex_ray.core.types import FloatArray
from rex_ray.scenario import load_network, load_profile, parse_cluster

_FOUR = Form(name="four cards", cluster="2xGTX1070,1xM40,1xGTX750", global_batch_size=512)


@given(arrays(np.float64, (5, 3), elements=st.floats(0.01, 1.0)), st.floats(0.0, 0.5))
def test_the_source_counts_every_wait_again(own_s: FloatArray, reduction_s: float) -> None:
    wall_s = (own_s.max(axis=1) + reduction_s).sum()
    waits_s = (own_s.max(axis=1)[:, None] - own_s).mean(axis=1).sum()
    assert as_published_s(own_s, reduction_s) == pytest.approx(wall_s + waits_s)


@given(st.floats(0.01, 1.0), st.floats(0.0, 0.5))
@settings(max_examples=20)
def test_without_waits_both_ways_to_count_agree(own_s: float, reduction_s: float) -> None:
    assert as_published_s(np.full((7, 4), own_s), reduction_s) == pytest.approx(7 * (own_s + reduction_s))


@pytest.mark.parametrize(("cluster", "rows", "within_pct"), [
    ("2xGTX1070,1xM40,1xGTX750", 128, 1.0),
    ("2xGTX1070,1xM40", 171, 7.0),
])  # fmt: skip
def test_the_published_profile_explains_the_published_durations(cluster: str, rows: int, within_pct: float) -> None:
    devices = parse_cluster(cluster)
    own_s = np.array([[float(load_profile(device, "resnet18").own_time_s(rows)) for device in devices]])
    reduction_s = load_network("resnet18", "GTX1070").all_reduce_s(len(devices))
    form = "four cards" if len(devices) == 4 else "three cards"
    predicted_s = 120 * 97 * as_published_s(own_s, reduction_s)
    assert 100 * abs(predicted_s / MEASURED[form, "bsp"] - 1) < within_pct


@pytest.mark.parametrize("epochs", [1, 7, 120])
def test_a_fixed_batch_takes_the_box_s_epochs(epochs: int) -> None:
    curve = box_learning(512, epochs)
    assert curve.dataset_size == 97 * 512
    assert curve.epochs_to_target(512) == pytest.approx(epochs)


def test_balance_saves_time_on_the_box_and_nothing_beats_the_oracle() -> None:
    walls = {}
    for name in ("bsp", "rex-no-growth", "oracle"):
        row = method_row(_FOUR, name, seeds=[0], epochs=3)
        walls[name] = row["wall_s"]
        assert isinstance(row["as_published_s"], float)
        assert isinstance(row["wall_s"], float)
        assert row["as_published_s"] >= row["wall_s"]
    assert walls["oracle"] < walls["rex-no-growth"] < walls["bsp"]


@pytest.mark.slow
def test_the_quick_form_has_every_figure() -> None:
    found = measure(Settings(quick=True))
    assert {"equal_s", "rex_speedup", "rex_s", "ratio_rex_oracle", "disturbed_ratio_rex_bsp"} <= set(found.figures)
    assert {row["form"] for row in found.tables["lbb"]} == {"four cards", "three cards", "three cards, disturbed"}
