"""Charts say exactly what the arrays say, whatever their size; and thinning keeps what it must."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.report.charts.figure import spread, thin
from rex_ray.report.charts.fits import fits_figure
from rex_ray.report.charts.growth import growth_figure
from rex_ray.report.charts.kinds import MANY_RANKS, device_hues, fleet_text, hands
from rex_ray.report.charts.metrics import metric_figures
from rex_ray.report.charts.noise import noise_figure
from rex_ray.report.charts.own_time import own_time_figure
from rex_ray.report.charts.split import planned_shares, split_figure
from rex_ray.report.charts.svg import Scale, line_path, nice_ticks
from rex_ray.report.facts import CurveFit
from rex_ray.report.reading.schema import DecisionRow, EventRow, GroupData, MetricPoint, NoiseSeries


def make_group(shares: list[list[int]], versions: list[int], first_step: int = 0) -> GroupData:
    """A group whose step ``k`` ran under ``versions[k]`` with ``shares[versions[k]]``; the last one ends an epoch."""
    num_rows = np.array([shares[v] for v in versions])
    num_rows[-1] = num_rows[-1] // 2 if len(shares) > 1 else num_rows[-1] + 1
    n = num_rows.shape[1]
    own_s = 0.01 + 0.001 * num_rows
    return GroupData(
        generation="g",
        devices=tuple("T4" if rank < n // 2 else "V100" for rank in range(n)),
        nodes=("",) * n,
        steps=first_step + np.arange(len(versions)),
        versions=np.array(versions),
        num_rows=num_rows,
        own_s=own_s,
        step_s=own_s.max(axis=1) + 0.02,
        partial=np.arange(len(versions)) == len(versions) - 1,
        steady=np.arange(len(versions)) > 1,
    )


TWO_SPLITS = make_group([[8, 8, 8, 8], [4, 4, 12, 12]], [0] * 10 + [1] * 15)


def test_a_partial_last_batch_does_not_look_like_a_change_of_shares() -> None:
    starts, shares = planned_shares(TWO_SPLITS)
    assert starts.tolist() == [0, 10]
    assert shares.tolist() == [[8, 8, 8, 8], [4, 4, 12, 12]]


def test_nor_does_one_that_absorbs_the_few_rows_left() -> None:
    _, shares = planned_shares(make_group([[8, 8]], [0] * 5))
    assert shares.tolist() == [[8, 8]]


def test_an_allocation_that_only_ran_a_partial_batch_is_no_change_of_shares() -> None:
    starts, shares = planned_shares(make_group([[8, 8], [4, 12]], [0] * 6 + [1]))
    assert starts.tolist() == [0]
    assert shares.tolist() == [[8, 8]]
    alone = make_group([[8, 8], [4, 12]], [0])
    assert planned_shares(alone)[0].tolist() == [0]


def make_noise(noise_scale: list[float], batch: list[int], p_value: list[float]) -> NoiseSeries:
    return NoiseSeries(
        steps=np.arange(len(batch)) * 16 + 15,
        batch=np.array(batch),
        noise_scale=np.array(noise_scale),
        p_value=np.array(p_value),
        window=8,
        block_steps=4,
    )


def test_the_noise_scale_is_drawn_with_its_gaps_and_a_mark_where_the_test_shows_it() -> None:
    noise = make_noise([500.0, math.nan, 900.0, 1000.0], [64, 64, 64, 128], [0.01, 0.02, 0.2, 0.9])
    figure = noise_figure(noise, [make_group([[32, 32]], [0] * 70)])
    for drawing in (figure.wide, figure.narrow):
        marks = [e.get("class") for e in ET.fromstring(drawing).iter()]
        paths = {e.get("class"): e.get("d", "") for e in ET.fromstring(drawing).iter() if e.get("class")}
        assert marks.count("dot shown") == 2
        assert marks.count("dot open") == 2
        assert paths["line metric"].count("M") == 2
        assert not re.search(r"nan|inf", drawing)
    assert "2 of them marked" in figure.wide


def test_a_noise_scale_that_was_always_hidden_still_shows_the_batch() -> None:
    noise = make_noise([math.nan] * 3, [64] * 3, [0.01] * 3)
    assert "<svg" in noise_figure(noise, [make_group([[32, 32]], [0] * 70)]).wide


def test_rows_by_the_million_are_named_in_millions() -> None:
    noise = make_noise([64.0, 2.0**24], [64] * 2, [0.5] * 2)
    drawing = noise_figure(noise, [make_group([[32, 32]], [0] * 70)]).wide
    assert re.search(r">\d{1,3}M<", drawing)
    assert not re.search(r">[\d,]{4,}k<", drawing)


def test_batch_and_learning_rate_are_drawn_as_multiples_and_only_where_they_change() -> None:
    group = make_group([[32, 32]], [0] * 50)
    first = DecisionRow(
        number=1, kind="first", decided_at_step=-1, reason="", after=(32, 32), version=1, applied_at_step=0
    )
    grown = replace(first, number=2, after=(64, 64), applied_at_step=20, lr_factor=1.5)
    assert growth_figure([first], [group]) is None
    assert growth_figure([first, replace(first, number=2, after=(20, 44))], [group]) is None
    assert growth_figure([first, replace(grown, applied_at_step=None)], [group]) is None
    figure = growth_figure([first, grown], [group])
    assert figure is not None
    assert "64 to 128 rows" in figure.caption
    assert "the learning rate at 1.5 times" in figure.wide


@pytest.mark.parametrize("num_steps", [1, 2, 3000])
def test_charts_are_well_formed_at_any_length(num_steps: int) -> None:
    group = make_group([[8, 8], [4, 12]], [min(1, k // 2) for k in range(num_steps)])
    decision = DecisionRow(number=1, kind="reallocate", decided_at_step=1, reason="x", version=1, applied_at_step=2)
    hues = device_hues([group])
    for figure in (split_figure([group], hues), own_time_figure([group], [decision], [], hues)):
        for drawing in (figure.wide, figure.narrow):
            root = ET.fromstring(drawing)
            assert root.get("role") == "img"
            assert root.get("aria-label", "").startswith(figure.title)
            assert not re.search(r"nan|inf", "".join(e.get("d", "") for e in root.iter()))
            assert len(drawing) < 40_000


def test_lines_mark_the_decisions_that_moved_rows_and_their_numbers_stand_apart() -> None:
    equal, skewed = (8, 8, 8, 8), (4, 4, 12, 12)
    decisions = [
        DecisionRow(
            number=number,
            kind="reallocate" if after == skewed else "change_global_batch",
            decided_at_step=0,
            reason="",
            before=equal,
            after=after,
            applied_at_step=applied,
        )
        for number, after, applied in [(100, skewed, 10), (101, equal, 11), (102, skewed, None), (103, skewed, 11)]
    ]
    assert [decision.moved_rows for decision in decisions] == [True, False, False, True]
    figure = own_time_figure([TWO_SPLITS], decisions, [], device_hues([TWO_SPLITS]))
    assert figure.wide.count('class="mark"') == 2
    assert "2 decisions and 0 events marked" in figure.wide
    crowded = [replace(decisions[0], number=100 + k, applied_at_step=k) for k in range(200)]
    group = make_group([[8, 8, 8, 8], [4, 4, 12, 12]], [0] * 100 + [1] * 100)
    wide = own_time_figure([group], crowded, [], device_hues([group])).wide
    numbers = [e for e in ET.fromstring(wide).iter() if e.get("class") == "mark-number"]
    left = [float(e.get("x", "")) for e in numbers]
    assert 2 < len(left) < len(crowded)
    assert min(np.diff(left)) >= 24  # three bold digits take 21


def test_groups_of_different_sizes_share_one_axis() -> None:
    """After a resize the run goes on with another number of workers, and the chart with another number of bands."""
    later = make_group([[10, 10, 12]], [0] * 20, first_step=25)
    figure = split_figure([TWO_SPLITS, later], device_hues([TWO_SPLITS, later]))
    bands = [e for e in ET.fromstring(figure.wide).iter() if (e.get("class") or "").startswith("band ")]
    assert len(bands) == 4 + 3


def test_a_group_whose_every_step_is_warm_up_is_still_drawn() -> None:
    group = make_group([[8, 8]], [0, 0])
    assert not group.steady.any()
    assert "<svg" in own_time_figure([group], [], [], device_hues([group])).wide


@given(k=st.integers(1, 1000), most=st.integers(1, 50))
def test_thinning_covers_all_steps_in_order_and_stays_within_the_values(k: int, most: int) -> None:
    steps = np.arange(k)
    middles, medians = thin(steps, steps.astype(float)[:, None], most)
    assert len(middles) == min(k, most)
    assert np.all(np.diff(middles) > 0)
    assert np.allclose(medians[:, 0], middles)  # of a straight line, the median of a bucket is its middle


@given(low=st.floats(-1e6, 1e6), extent=st.floats(1e-6, 1e6), count=st.integers(2, 10))
def test_ticks_lie_within_the_axis_evenly_spaced_and_never_too_many(low: float, extent: float, count: int) -> None:
    ticks = nice_ticks(low, low + extent, count)
    slack = 1e-6 * extent + 1e-9 * abs(low)
    assert all(low - slack <= tick <= low + extent + slack for tick in ticks)
    assert len(ticks) <= 1.2 * count + 1
    if len(ticks) > 2:
        assert np.allclose(np.diff(ticks), ticks[1] - ticks[0], atol=slack)


def test_an_axis_without_extent_has_one_tick_and_one_place() -> None:
    assert nice_ticks(3.0, 3.0, 5) == (3.0,)
    assert float(Scale(3.0, 3.0, 10.0, 90.0)(3.0)) == 10.0


def test_a_missing_value_interrupts_the_line() -> None:
    path = line_path(np.arange(4.0), np.array([0.0, np.nan, 1.0, 2.0]))
    assert path.count("M") == 2


def test_workers_of_one_kind_share_a_hue_and_differ_in_pattern_and_shade() -> None:
    hues = device_hues([TWO_SPLITS])
    entries = hands(TWO_SPLITS, hues)
    assert [e.css for e in entries] == ["k0", "k0", "k1", "k1"]
    assert len({(e.css, e.dash) for e in entries}) == 4
    assert len({(e.css, e.opacity) for e in entries}) == 4
    assert fleet_text(TWO_SPLITS) == "2\u00a0×\u00a0T4 + 2\u00a0×\u00a0V100"


def test_of_many_workers_kinds_are_drawn_with_their_range_and_the_slowest() -> None:
    n = MANY_RANKS + 4
    group = make_group([[4] * n], [0] * 30)
    group.own_s[:, 3] = 0.5  # a straggler
    hues = device_hues([group])
    split = split_figure([group], hues)
    assert split.wide.count('class="band') == 2
    assert f"{n // 2} × T4 ends with {4 * n // 2} rows" in split.wide
    own = own_time_figure([group], [], [], hues)
    assert own.wide.count('class="range') == 2
    assert own.wide.count('class="line slowest"') == 1
    large = make_group([[2] * 1024], [0] * 50)
    for figure in (split_figure([large], hues), own_time_figure([large], [], [], hues)):
        assert len(figure.wide + figure.narrow) < 20_000


def test_events_stand_in_the_lane_with_a_key_for_those_that_are_there() -> None:
    events = [
        EventRow(step=3, kind="slow", rank=1, text=""),
        EventRow(step=3, kind="slow", rank=2, text=""),  # in the same place: one mark
        EventRow(step=3, kind="lost", rank=2, text=""),
        EventRow(step=-1, kind="incident", rank=0, text=""),
        EventRow(step=20, kind="recovered", rank=0, text=""),
    ]
    figure = own_time_figure([TWO_SPLITS], [], events, device_hues([TWO_SPLITS]))
    marks = [e for e in ET.fromstring(figure.wide).iter() if (e.get("class") or "").startswith("event")]
    assert len(marks) == 4
    meanings = [key.meaning for key in figure.keys]
    assert meanings == [
        "the whole step",
        "a worker became slower",
        "it became faster again",
        "a worker was lost",
        "an incident that a worker dealt with",
    ]
    for key in figure.keys:
        ET.fromstring(f"<svg>{key.mark}</svg>")


@given(wanted=st.lists(st.floats(0.0, 300.0), min_size=1, max_size=20))
def test_labels_stand_apart_in_the_order_of_their_lines_and_within_the_chart(wanted: list[float]) -> None:
    places = spread(wanted, 0.0, 300.0, 14.0)
    order = sorted(range(len(wanted)), key=lambda k: places[k])
    assert all(places[b] - places[a] >= 14.0 - 1e-6 for a, b in pairwise(order))
    assert all(wanted[a] <= wanted[b] + 1e-9 for a, b in pairwise(order))
    assert min(places) >= -1e-6
    assert max(places) <= 300.0 + 1e-6


def test_a_label_with_room_stands_at_its_line() -> None:
    assert spread([20.0, 100.0], 0.0, 300.0) == [20.0, 100.0]


def test_curves_are_drawn_with_their_points_and_quartiles() -> None:
    rows = np.array([8.0, 16.0, 32.0])
    fits = [
        CurveFit(
            device=device,
            rows=rows,
            own_s=rows * scale,
            low_s=rows * scale * 0.9,
            high_s=rows * scale * 1.2,
            num_steps=np.array([5.0, 7.0, 9.0]),
            fitted_rows=np.linspace(1.0, 40.0, 60),
            fitted_s=np.linspace(1.0, 40.0, 60) * scale,
        )
        for device, scale in (("T4", 0.004), ("V100", 0.001))
    ]
    figure = fits_figure(fits, {"T4": 0, "V100": 1})
    for drawing in (figure.wide, figure.narrow):
        root = ET.fromstring(drawing)
        classes = [e.get("class") for e in root.iter()]
        assert classes.count("whisker") == 6
        assert classes.count("dot") == 6
        assert {"T4", "V100"} <= {e.text for e in root.iter() if e.tag == "text"}
        paths = [e.get("d") or "" for e in root.iter() if e.get("class") == "line"]
        heights = [float(v) for path in paths for v in re.findall(r" ([\d.]+)", path)]
        assert min(heights) >= 28  # within the frame
    assert figure.rows[0] == ("T4", "8", "32.0", "28.8 – 38.4", "5")


def test_metrics_of_several_runs_share_a_chart_and_are_named_at_their_ends() -> None:
    runs = {
        name: [MetricPoint(elapsed_s=k * pace, epoch=k, step=k, metrics={"accuracy": k / 5}) for k in range(5)]
        for name, pace in (("bsp", 2.0), ("rex", 1.0))
    }
    (figure,) = metric_figures(runs)
    root = ET.fromstring(figure.wide)
    assert {"bsp", "rex"} <= {e.text for e in root.iter() if e.tag == "text"}
    assert figure.columns == ("run", "time, s", "accuracy")
    assert ("rex", "4.0", "0.8") in figure.rows


def test_metrics_that_never_change_are_not_drawn() -> None:
    points = [
        MetricPoint(elapsed_s=float(k), epoch=k, step=k, metrics={"accuracy": k / 5, "rows_seen_exactly_once": 1.0})
        for k in range(5)
    ]
    assert [figure.title for figure in metric_figures({"run": points})] == ["accuracy"]
    assert metric_figures({"run": points[:1]}) == ()


def test_a_metric_that_is_once_not_a_number_is_drawn_without_that_point() -> None:
    values = [0.1, float("nan"), 0.3]
    points = [MetricPoint(elapsed_s=k, epoch=k, step=k, metrics={"loss": v}) for k, v in enumerate(values)]
    (figure,) = metric_figures({"run": points})
    assert figure.wide.count('class="dot"') == 2
