from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from experiments.lab.cells import Result
from experiments.lab.summary import accuracy_delta, ratio, spread

BLANK = Result(
    tta_s=None, total_s=1, num_steps=1, num_rows=1, smallest_batch=1, largest_batch=1, imbalance=0, rii=0, rii_wait=0
)


def timed(*times):
    return [replace(BLANK, tta_s=time) for time in times]


def scored(*metrics):
    return [replace(BLANK, final_metric=metric) for metric in metrics]


def test_a_missed_target_is_endless_and_counted():
    found = spread(timed(3.0, None, 1.0))
    assert (found.median_s, found.lowest_s, found.highest_s, found.num_missed) == (3.0, 1.0, math.inf, 1)
    assert spread(timed(None, None, 1.0)).median_s == math.inf


def test_quartiles_are_between_the_extremes():
    found = spread(timed(*range(1, 12)))
    assert found.lowest_s < found.quarter_s < found.median_s < found.three_quarters_s < found.highest_s


def test_the_ratio_is_of_medians_and_pairs_cancel_what_they_share():
    rng = np.random.default_rng(0)
    worlds = rng.lognormal(0, 0.5, size=12)
    mine, other = timed(*(0.5 * worlds)), timed(*worlds)
    found = ratio(mine, other)
    assert found.value == pytest.approx(0.5)
    assert found.low == pytest.approx(0.5)
    assert found.high == pytest.approx(0.5)
    shuffled = ratio(mine, [other[k] for k in rng.permutation(12)])
    assert shuffled.value == pytest.approx(0.5)
    assert shuffled.high - shuffled.low > 0.1


def test_the_interval_covers_the_true_ratio_about_95_times_in_100():
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        found = ratio(
            timed(*(0.5 * rng.lognormal(0, 0.1, size=21))), timed(*rng.lognormal(0, 0.1, size=21)), seed=trial
        )
        hits += found.low <= 0.5 <= found.high
    assert 180 <= hits <= 200


def test_a_ratio_with_misses_is_infinite_not_wrong():
    assert ratio(timed(None, None, 1.0), timed(1.0, 1.0, 1.0)).value == math.inf
    assert math.isnan(ratio(timed(1.0, 1.0, 1.0), timed(None, None, 1.0)).value)
    with pytest.raises(ValueError, match="as many"):
        ratio(timed(1.0), timed(1.0, 2.0))


def test_accuracy_is_compared_in_pairs_and_a_margin_has_to_be_ruled_out():
    base = [0.70, 0.72, 0.74, 0.71]
    same = accuracy_delta(scored(*(x + 0.001 for x in base)), scored(*base))
    assert same.points == pytest.approx(0.1)
    assert same.lowest_90 == pytest.approx(0.1)
    assert same.is_not_inferior
    noisy = accuracy_delta(scored(0.69, 0.73, 0.73, 0.72), scored(*base))
    assert noisy.points == pytest.approx(0.0, abs=1e-9)
    # Half-width by hand: t(.9, 3) = 1.6377, sd 1.1547 points, four seeds.
    assert noisy.lowest_90 == pytest.approx(-1.6377 * 1.1547 / 2, abs=1e-3)
    assert not noisy.is_not_inferior
    with pytest.raises(ValueError, match="two pairs"):
        accuracy_delta(scored(0.7), scored(0.7))
