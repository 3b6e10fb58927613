"""The convergence page's problems and laws: constants that hold everywhere, splits that change nothing, the bound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import convergence
from experiments._convergence_problems import Quadratic, Regression, Seen, random_shares, train
from experiments._harness import Settings
from rex_ray.core.lr_scaling import adascale_gain

QUADRATIC, REGRESSION = Quadratic(), Regression()
PROBLEMS = [QUADRATIC, REGRESSION]
seeds = st.integers(0, 10_000)


def points_near(problem, seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return problem.minimum + rng.standard_normal((count, problem.start.size)) * rng.choice([0.1, 1.0, 5.0])


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
@settings(max_examples=20)
@given(seed=seeds)
def test_the_gradient_is_that_of_the_function_and_no_steeper_than_smoothness_allows(problem, seed):
    points = points_near(problem, seed, 2)
    direction = np.random.default_rng(seed + 1).standard_normal(points.shape[1]) * 1e-5
    slope = (problem.value(points + direction) - problem.value(points - direction)) / 2
    assert slope == pytest.approx((problem.gradient(points) @ direction), rel=1e-3, abs=1e-10)
    change = np.linalg.norm(np.diff(problem.gradient(points), axis=0))
    assert change <= problem.smoothness * np.linalg.norm(np.diff(points, axis=0)) * (1 + 1e-9)
    assert (problem.value(points) >= problem.least_value).all()


@settings(max_examples=20)
@given(seed=seeds)
def test_no_point_has_noisier_rows_than_the_stated_variance(seed):
    point = points_near(REGRESSION, seed, 1)[0]
    assert convergence._row_trace(REGRESSION, point) <= REGRESSION.row_variance


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_a_group_has_the_mean_of_its_rows(problem):
    point = (problem.start + problem.minimum) / 2
    sizes = np.tile([3, 0, 40], (6000, 1))
    groups = problem.group_gradients(np.tile(point, (6000, 1)), sizes, np.random.default_rng(0))
    assert (groups[:, 1] == 0).all()
    truth, trace = problem.gradient(point[None])[0], convergence._row_trace(problem, point)
    for group, size in ((0, 3), (2, 40)):
        off = groups[:, group] - truth
        assert np.linalg.norm(off.mean(axis=0)) < 4 * np.sqrt(trace / size / 6000)
        assert (off**2).sum(axis=1).mean() == pytest.approx(trace / size, rel=0.06)


@given(batch=st.integers(5, 500), num_workers=st.integers(1, 16), seed=seeds)
def test_random_shares_are_shares_of_the_batch(batch, num_workers, seed):
    shares = random_shares(np.full(3, batch), num_workers, np.random.default_rng(seed))
    assert shares.shape == (3, num_workers)
    assert (shares >= 0).all()
    assert (shares.sum(axis=1) == batch).all()


@given(
    phi=st.floats(0, 1e6),
    scale=st.floats(1, 64),
    product=st.floats(0.001, 1.0),
)
def test_an_adascale_step_guarantees_exactly_what_its_gain_in_reference_steps_does(phi, scale, product):
    def descent(batch: float, rate: float) -> float:
        return rate - rate**2 / 2 * (1 + phi / batch)

    gain = adascale_gain(scale, phi, 16)
    told, expected = descent(16 * scale, gain * product), gain * descent(16, product)
    assert told == pytest.approx(expected, rel=1e-9, abs=1e-9 * gain * product * (1 + phi))


def test_a_schedule_sees_nothing_of_its_own_step():
    seen: list[Seen] = []

    def schedule(known: Seen, _):
        seen.append(known)
        return np.full(4, 16 * (1 + known.step)), np.ones(4)

    paths = train(QUADRATIC, schedule, rate=0.05, num_steps=3, num_runs=4, rng=np.random.default_rng(0))
    assert [known.batches.tolist() for known in seen] == [[0] * 4, [16] * 4, [32] * 4]
    assert np.isinf(seen[0].sq_norms).all()
    assert np.isfinite(seen[1].sq_norms).all()
    assert paths.batches[:, 0].tolist() == [16, 32, 48]


def test_the_quadratics_floor_is_where_it_ends_up():
    paths = train(
        QUADRATIC,
        convergence._constant(32),
        rate=0.2,
        num_steps=500,
        num_runs=200,
        rng=np.random.default_rng(0),
        start=QUADRATIC.minimum,
    )
    assert paths.values[150:].mean() == pytest.approx(QUADRATIC.floor(0.2, 32), rel=0.05)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
@pytest.mark.parametrize("rule", ["none", "adascale", "linear"])
def test_no_run_violates_the_bound_whatever_its_schedule_listens_to(problem, rule):
    schedule = convergence._wandering(rule, reaches=False)
    rate = 1 / problem.smoothness / 8
    paths = train(problem, schedule, rate=rate, num_steps=40, num_runs=30, rng=np.random.default_rng(1))
    assert np.unique(paths.batches).size > 2
    assert (convergence._used(problem, paths) <= 1).all()


def test_past_its_condition_the_bound_fails():
    schedule = convergence._wandering("linear", reaches=True)
    paths = train(QUADRATIC, schedule, rate=2.5 / 8, num_steps=60, num_runs=10, rng=np.random.default_rng(1))
    assert (convergence._used(QUADRATIC, paths) > 1).all()


def test_a_batch_decided_by_its_own_rows_biases_their_mean_and_an_earlier_ones_does_not():
    predictable, peeking = convergence._peeking(Settings(quick=True))
    assert abs(predictable["bias_sds"]) < 2 * predictable["error"]
    assert peeking["bias_sds"] == pytest.approx(1 / np.sqrt(8 * np.pi), abs=2 * peeking["error"])
    assert [predictable, peeking] == convergence._peeking(Settings(quick=True))


def test_equal_weights_have_more_variance_and_weighted_ones_that_of_the_batch():
    rng, sizes = np.random.default_rng(0), np.tile([2, 6, 56], (8000, 1))
    point = REGRESSION.start
    groups = REGRESSION.group_gradients(np.tile(point, (8000, 1)), sizes, rng)
    truth, trace = REGRESSION.gradient(point[None])[0], convergence._row_trace(REGRESSION, point)
    for weights, ratio in ((sizes[0] / 64, 1.0), (np.full(3, 1 / 3), 64 / 9 * (1 / 2 + 1 / 6 + 1 / 56))):
        variance = ((np.einsum("n,rnd->rd", weights, groups) - truth) ** 2).sum(axis=1).mean()
        assert variance == pytest.approx(ratio * trace / 64, rel=0.06)


def test_the_page_has_a_place_for_every_table():
    page = (Path(__file__).parents[2] / "docs" / "convergence.md").read_text(encoding="utf-8")
    for table in ("floors", "splits", "growth", "bounds", "peeking"):
        assert f"<!-- begin {table} -->\n\n|" in page
