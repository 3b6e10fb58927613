"""The step-time book: shape per kind, scale per worker, immutable, plain, and robust to what logs contain."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.split import exact_split
from rex_ray.core.step_time import MAX_SIZES, RUN, StepTimeBook
from rex_ray.scenario import NoiseModel, WorkerTimeline, load_profile

SHARED = NoiseModel(sd=0.04)
DEDICATED = NoiseModel(sd=0.01)


def cluster(noise, seed, devices=("T4", "T4", "V100", "V100"), factors=(1, 1, 1, 1), workload="resnet50"):
    return [
        WorkerTimeline(profile=load_profile(d, workload), rank=rank, seed=seed, noise=noise, speed_factor=factor)
        for rank, (d, factor) in enumerate(zip(devices, factors, strict=True))
    ]


def balance(workers, total, plans, steps_per_plan=10):
    """The simplest loop: run, re-split on the book's curves, run again."""
    devices = tuple(worker.profile.device for worker in workers)
    book = StepTimeBook.empty(devices)
    sizes = [total // len(workers)] * len(workers)
    step, history = 0, []
    for _ in range(plans):
        for _ in range(steps_per_plan):
            book = book.observe(sizes, [w.own_time_s(step, b) for w, b in zip(workers, sizes, strict=True)])
            step += 1
        curves = book.curves()
        sizes = list(exact_split(curves, total, upper=[c.max_trusted_rows for c in curves]).local_batch_sizes)
        history.append(sizes)
    return book, history


def true_step_s(workers, sizes):
    return max(w.quiet_time_s(b) for w, b in zip(workers, sizes, strict=True))


def test_d1_repeated_sizes_are_condensed_before_the_fit():
    rows, times = [8, 8, 16, 16, 32, 32], [1.0, 1.1, 1.5, 1.6, 3.0, 3.2]
    book = StepTimeBook.empty(("T4",))
    for b, t in zip(rows, times, strict=True):
        book = book.observe([b], [t])
    assert book.num_sizes(0) == 3
    assert book.num_samples(0) == 6
    assert 1.5 < book.curve(0).predict_s(20) < 2.3
    assert (np.diff(book.curve(0).predict_s(np.arange(200))) >= 0).all()


@pytest.mark.parametrize("noise", [DEDICATED, SHARED])
@pytest.mark.parametrize("seed", range(5))
def test_equal_workers_stay_equal_within_one_row(noise, seed):
    workers = cluster(noise, seed)
    book, history = balance(workers, 256, plans=6)
    for sizes in history:
        assert abs(sizes[0] - sizes[1]) <= 1
        assert abs(sizes[2] - sizes[3]) <= 1
    assert book.curve(0).scale == book.curve(1).scale


@pytest.mark.parametrize(("noise", "within"), [(DEDICATED, 1.02), (SHARED, 1.06)])
@pytest.mark.parametrize("seed", range(3))
def test_the_split_on_fitted_curves_nears_the_optimum_within_three_plans(noise, within, seed):
    workers = cluster(noise, seed)
    optimum = exact_split([w.profile.curve for w in workers], 256).step_time_s
    _, history = balance(workers, 256, plans=3)
    assert true_step_s(workers, history[-1]) < within * optimum


@pytest.mark.parametrize("noise", [DEDICATED, SHARED])
@pytest.mark.parametrize("seed", range(3))
def test_two_workers_of_one_kind_with_different_speeds_are_told_apart(noise, seed):
    workers = cluster(noise, seed, factors=(1, 1.4, 1, 1))
    book, history = balance(workers, 256, plans=4)
    assert book.curve(1).scale / book.curve(0).scale == pytest.approx(1.4, rel=0.1)
    assert book.curve(2).scale == pytest.approx(book.curve(3).scale, rel=0.03)
    optimum = exact_split([w.profile.curve.scaled(w.speed_factor) for w in workers], 256).step_time_s
    assert true_step_s(workers, history[-1]) < 1.06 * optimum


@pytest.mark.parametrize("total", [128, 512, 1024, 2048])
def test_a_kind_that_is_slower_at_small_batches_and_faster_at_large_ones(total):
    """ResNet-18: this V100 is slower than the T4 below 129 rows."""
    workers = cluster(DEDICATED, 3, workload="resnet18")
    optimum = exact_split([w.profile.curve for w in workers], total).step_time_s
    _, history = balance(workers, total, plans=5)
    assert true_step_s(workers, history[-1]) < 1.05 * optimum


def test_a_rescale_keeps_the_shape():
    book, _ = balance(cluster(DEDICATED, 1), 256, plans=3)
    slower = book.rescale(0, 2.0)
    rows = np.arange(1, 100)
    assert slower.curve(0).predict_s(rows) == pytest.approx(2 * book.curve(0).predict_s(rows))
    assert slower.curve(1).predict_s(rows) == pytest.approx(book.curve(1).predict_s(rows))
    # Samples taken while slow agree with those before: nothing moves.
    sizes = [33, 33, 95, 95]
    times = (
        book.curve(0).predict_s(33) * 2,
        *(float(book.curve(r).predict_s(b)) for r, b in ((1, 33), (2, 95), (3, 95))),
    )
    for _ in range(20):
        slower = slower.observe(sizes, times)
    assert slower.curve(0).scale == pytest.approx(2.0 * slower.curve(1).scale, rel=0.02)


def run_at(book, workers, sizes, steps, factor=1.0):
    """Run the sizes for some steps, worker 0 slowed down by a factor."""
    for step in steps:
        own_s = [w.own_time_s(step, b) for w, b in zip(workers, sizes, strict=True)]
        book = book.observe(sizes, [own_s[0] * factor, *own_s[1:]])
    return book


@pytest.mark.parametrize("noise", [DEDICATED, SHARED])
@pytest.mark.parametrize("factor", [0.5, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("onset", [0, 5, 11])
def test_a_change_of_level_at_a_size_that_goes_on_is_one_of_scale_and_holds_for_every_size(noise, factor, onset):
    workers = cluster(noise, 5)
    book, history = balance(workers, 256, plans=3, steps_per_plan=16)
    book = run_at(book, workers, history[-1], range(100, 164 + onset))
    rows, within = np.array([34, 48, 64, 80]), 0.03 + 2 * noise.sd
    before = book.curve(0).predict_s(rows)
    slow = run_at(book, workers, history[-1], range(200, 232), factor)
    assert slow.curve(0).predict_s(rows) == pytest.approx(factor * before, rel=within)
    assert slow.curve(1).predict_s(rows) == pytest.approx(book.curve(1).predict_s(rows), rel=within)
    healed = run_at(slow, workers, history[-1], range(300, 332))
    assert healed.curve(0).predict_s(rows) == pytest.approx(before, rel=within)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", [SHARED, NoiseModel(sd=0.04, rho=0.9), NoiseModel(sd=0.04, spike_probability=0.02)])
def test_noise_is_no_change_of_scale(noise, seed):
    workers = cluster(noise, seed)
    book = run_at(StepTimeBook.empty(("T4", "T4", "V100", "V100")), workers, [34, 34, 94, 94], range(3000))
    assert book.applied_scale.tolist() == [1.0] * 4


@pytest.mark.parametrize("final", [0.7, 1.5, 2.0])
def test_a_drift_too_slow_for_any_block_to_show_it_is_one_of_scale(final):
    """A card that throttles over minutes: its time at the sizes of long ago has changed as well."""
    workers = cluster(DEDICATED, 3)
    book, history = balance(workers, 256, plans=3, steps_per_plan=16)
    book = run_at(book, workers, history[-1], range(100, 400))
    before = book.curve(0).predict_s(20) / book.curve(1).predict_s(20)
    for step in range(400, 1900):
        own_s = [w.own_time_s(step, b) for w, b in zip(workers, history[-1], strict=True)]
        now = 1 + (final - 1) * min((step - 400) / 1000, 1)
        book = book.observe(history[-1], [own_s[0] * now, *own_s[1:]])
    assert book.curve(0).predict_s(20) / book.curve(1).predict_s(20) == pytest.approx(final * before, rel=0.1)


def test_two_sizes_of_quite_other_times_are_two_however_near_they_are():
    book = StepTimeBook.empty(("T4", "T4"))
    for rows, own_s, steps in ((64, 0.042, 20), (82, 0.153, 12), (79, 0.0495, 200)):
        for _ in range(steps):
            book = book.observe([rows, rows], [own_s, own_s])
    assert book.curve(0).predict_s(79) == pytest.approx(0.0495, rel=0.03)
    assert book.curve(0).predict_s(82) == pytest.approx(0.153, rel=0.03)


def test_what_a_caller_has_rescaled_is_not_found_once_more():
    workers = cluster(DEDICATED, 5)
    book = run_at(StepTimeBook.empty(("T4", "T4", "V100", "V100")), workers, [34, 34, 94, 94], range(40))
    book = run_at(book, workers, [34, 34, 94, 94], range(40, 48), factor=2.0).rescale(0, 2.0)
    book = run_at(book, workers, [34, 34, 94, 94], range(48, 120), factor=2.0)
    assert book.applied_scale.tolist() == [2.0, 1.0, 1.0, 1.0]


def test_a_shape_that_nothing_new_is_known_of_passes_through_any_number_of_groups_unchanged():
    book, _ = balance(cluster(DEDICATED, 1), 256, plans=3)
    first = book.carry_over(("V100", "T4"))
    later = first
    for _ in range(20):
        later = later.carry_over(("T4",)).carry_over(("V100", "T4"))
    assert later.learnt == first.learnt


def test_what_was_learnt_per_kind_serves_the_next_group_and_what_was_learnt_per_rank_does_not():
    book, _ = balance(cluster(DEDICATED, 2, factors=(1, 1.5, 1, 1)), 256, plans=4)
    following = book.carry_over(("V100", "T4", "K80"))
    rows = np.array([30, 60, 100])
    assert following.curve(0).predict_s(rows) == pytest.approx(book.curve(2).predict_s(rows), rel=0.03)
    assert following.num_samples(1) == 0
    assert following.curve(1).scale == 1.0
    assert following.num_sizes(2) == 0
    with pytest.raises(ValueError, match="no own time of any 'K80' was measured yet, so rank 2 has no curve"):
        following.curve(2)
    again = following.carry_over(("T4",)).carry_over(("T4", "V100"))
    assert again.curve(1).predict_s(rows) == pytest.approx(book.curve(2).predict_s(rows), rel=0.03)


def test_new_evidence_outweighs_what_an_earlier_group_left():
    book, _ = balance(cluster(DEDICATED, 2), 256, plans=4)
    following = book.carry_over(("T4", "T4"))
    expected = 1.6 * float(book.curve(0).predict_s(40))
    for _ in range(20):
        following = following.observe([40, 40], [expected, expected])
    assert following.curve(0).predict_s(40) == pytest.approx(expected, rel=0.03)
    assert following.curve(0).predict_s(80) == pytest.approx(1.6 * float(book.curve(0).predict_s(80)), rel=0.06)


@given(st.lists(st.tuples(st.integers(-2, 500), st.floats(allow_nan=True, allow_infinity=True)), max_size=40))
def test_junk_never_reaches_a_curve(samples):
    book = StepTimeBook.empty(("T4", "T4"))
    for rows, own_s in samples:
        book = book.observe([rows, 64], [own_s, own_s])
    used = sum(bool(rows > 0 and 1e-6 <= own_s <= 86_400) for rows, own_s in samples)
    assert book.num_samples(0) <= used
    assert (book.num_samples(0) > 0) == (used > 0)
    if book.num_sizes(0):
        predicted = book.curve(0).predict_s(np.arange(1000))
        assert (predicted > 0).all()


def test_only_the_ranks_in_use_are_evidence():
    empty = StepTimeBook.empty(("T4", "V100"))
    book = empty.observe([64, 64], [0.1, 0.2], use=np.array([True, False]))
    assert (book.num_samples(0), book.num_samples(1)) == (1, 0)
    assert empty.observe([64, 64], [0.1, 0.2], use=np.array([False, False])) is empty
    assert empty.num_samples(0) == 0


def test_e12_memory_is_bounded_whatever_the_number_of_steps():
    book = StepTimeBook.empty(("T4",))
    for step in range(3000):
        book = book.observe([1 + step % 300], [0.1 + 0.01 * (step % 300)])
    assert book.recent_s.shape == StepTimeBook.empty(("T4",)).recent_s.shape
    assert (book.counts > 0).sum() == MAX_SIZES
    assert book.curve(0).predict_s(150) == pytest.approx(0.1 + 0.01 * 149, rel=0.1)


def test_a_book_is_plain_data_and_survives_being_written_as_json():
    book, _ = balance(cluster(DEDICATED, 4), 256, plans=2)
    book = book.carry_over(book.devices).observe([64] * 4, [0.3, 0.3, 0.2, 0.2])
    arrays = ("applied_scale", "num_rows", "counts", "last_seen", "recent_s", "level_s", "newest_s")
    text = json.dumps({name: getattr(book, name).tolist() for name in arrays})
    loaded = {name: np.array(value) for name, value in json.loads(text).items()}
    restored = StepTimeBook(devices=book.devices, num_observed=book.num_observed, learnt=book.learnt, **loaded)
    rows = np.arange(300)
    for rank in range(4):
        assert (restored.curve(rank).predict_s(rows) == book.curve(rank).predict_s(rows)).all()
        assert not getattr(book, arrays[rank]).flags.writeable


def test_a_factor_that_is_no_factor_is_refused():
    with pytest.raises(ValueError, match="positive and finite"):
        StepTimeBook.empty(("T4",)).rescale(0, 0.0)


@pytest.mark.parametrize("noise", [DEDICATED, SHARED])
def test_d8_one_of_two_equal_workers_three_times_slower_is_balanced_within_three_plans(noise):
    workers = cluster(noise, 2, devices=("T4", "T4"), factors=(1, 3))
    optimum = exact_split([w.profile.curve.scaled(w.speed_factor) for w in workers], 128).step_time_s
    _, history = balance(workers, 128, plans=3)
    assert true_step_s(workers, history[-1]) < 1.1 * optimum


def test_a_lasting_slowdown_is_followed_even_when_nobody_announces_it():
    """No trigger, no rescale: the newest samples of the size now in use carry the scale with them."""
    workers = cluster(DEDICATED, 1)
    book, history = balance(workers, 256, plans=6)
    sizes, slow = history[-1], [2.0, 1.0, 1.0, 1.0]
    for step in range(100, 220):
        own_s = [w.own_time_s(step, b) * k for w, b, k in zip(workers, sizes, slow, strict=True)]
        book = book.observe(sizes, own_s)
        if step % 10 == 9:
            curves = book.curves()
            sizes = list(exact_split(curves, 256, upper=[c.max_trusted_rows for c in curves]).local_batch_sizes)
    optimum = exact_split([w.profile.curve.scaled(k) for w, k in zip(workers, slow, strict=True)], 256).step_time_s
    assert max(w.quiet_time_s(b) * k for w, b, k in zip(workers, sizes, slow, strict=True)) < 1.05 * optimum


def test_a_book_is_complete_once_some_worker_of_every_kind_was_measured():
    book = StepTimeBook.empty(("T4", "V100", "T4"))
    assert not book.is_complete
    book = book.observe([8, 0, 0], [0.1, 0.0, 0.0])
    assert not book.is_complete
    book = book.observe([0, 8, 0], [0.0, 0.1, 0.0])
    assert book.is_complete
    assert [curve.scale for curve in book.curves()] == [book.curve(rank).scale for rank in range(3)]
    assert book.carry_over(("V100", "T4")).is_complete
    assert not book.carry_over(("V100", "A100")).is_complete


STEPS = st.lists(
    st.tuples(
        st.sampled_from([(8, 8), (8, 8), (8, 8), (12, 4), (16, 0)]),
        st.sampled_from([None, None, None, (True, False)]),
        st.sampled_from([1.0, 1.0, 1.0, 3.0, 1e9]),
        st.integers(1, 20),
    ),
    max_size=12,
)


@given(stretches=STEPS, rescale_at=st.integers(0, 100))
def test_a_run_of_equal_steps_is_taken_in_as_one_step_after_the_other(stretches, rescale_at):
    """The same samples with and without waiting: every number of the two books is the same, to the last bit."""
    rng = np.random.default_rng(rescale_at)
    book = direct = StepTimeBook.empty(("T4", "T4"))
    step = 0
    for rows, use, factor, count in stretches:
        mask = None if use is None else np.array(use)
        for own_s in 0.1 * factor * np.exp(0.02 * rng.standard_normal((count, 2))):
            book, direct = book.observe(rows, own_s, mask), direct.observe(rows, own_s, mask).settled
            direct = replace(direct, run_rows=np.zeros(0, dtype=np.int64))
            if step == rescale_at:
                book, direct = book.rescale(1, 1.7), direct.rescale(1, 1.7)
            step += 1
    settled = book.settled
    for name in ("applied_scale", "num_rows", "counts", "last_seen", "recent_s", "level_s", "newest_s", "num_observed"):
        assert np.array_equal(getattr(settled, name), getattr(direct, name)), name
    assert book.is_complete == direct.is_complete
    assert [book.num_samples(rank) for rank in (0, 1)] == [direct.num_samples(rank) for rank in (0, 1)]
    assert len(book.waiting_s) < RUN
