"""Laws of the learning-rate rules and of goodput."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.goodput import break_even_noise_scale, goodput, statistical_efficiency
from rex_ray.core.lr_scaling import adascale_gain, lr_factor, slewed

phis = st.one_of(st.none(), st.just(math.inf), st.floats(0, 1e9))
RULES = ("adascale", "linear", "sqrt", "adam", "none")


@given(scale=st.floats(1, 1e4), phi=phis, reference=st.integers(1, 10**5))
def test_the_gain_lies_between_one_and_the_batch_ratio(scale, phi, reference):
    gain = adascale_gain(scale, phi, reference)
    assert 1 - 1e-9 <= gain <= scale * (1 + 1e-9)


@given(phi=phis, reference=st.integers(1, 10**5))
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_leaves_the_reference_batch_alone(rule, phi, reference):
    assert lr_factor(rule, reference, reference, phi) == pytest.approx(1.0)


@given(phi=phis, reference=st.integers(1, 1000), factors=st.tuples(st.integers(1, 64), st.integers(1, 64)))
def test_efficiency_is_a_fraction_that_falls_with_the_batch(phi, reference, factors):
    small, large = sorted(factors)
    worth = [statistical_efficiency(factor * reference, reference, phi) for factor in (small, large)]
    assert 0 < worth[1] <= worth[0] * (1 + 1e-9)
    assert worth[0] <= 1 + 1e-9


@given(phi=st.floats(0, 1e6), more=st.floats(0, 1e6), factor=st.integers(1, 64))
def test_a_noisier_gradient_never_makes_a_large_batch_worth_less(phi, more, factor):
    assert statistical_efficiency(64 * factor, 64, phi + more) >= statistical_efficiency(64 * factor, 64, phi) - 1e-12


def test_the_three_faces_of_one_number_agree():
    scale, phi, reference = 8.0, 1000.0, 256
    gain = adascale_gain(scale, phi, reference)
    assert statistical_efficiency(2048, reference, phi) == pytest.approx(gain / scale)
    # Progress per second in reference steps is goodput in reference batches.
    assert goodput(2048, 0.5, reference, phi) / reference == pytest.approx(gain / 0.5)


def test_adam_takes_the_root_of_what_sgd_takes():
    assert lr_factor("adam", 1024, 256, 512.0) == pytest.approx(math.sqrt(lr_factor("adascale", 1024, 256, 512.0)))


def test_an_unknown_noise_scale_is_cautious_and_an_infinite_one_linear():
    assert lr_factor("adascale", 1024, 256, None) == 1.0
    assert lr_factor("adascale", 1024, 256, math.inf) == 4.0
    assert lr_factor("linear", 1024, 256) == 4.0


def test_a_slew_reaches_its_target_in_small_steps():
    factor, steps = 1.0, 0
    while factor != 2.0:
        following = slewed(factor, 2.0)
        assert following <= factor * 1.02 + 1e-12
        factor, steps = following, steps + 1
    assert steps == math.ceil(math.log(2) / math.log(1.02))
    assert slewed(2.0, 1.0) == pytest.approx(1.96)


@pytest.mark.parametrize("step_time_s", [0.0, -1.0, math.nan, math.inf])
def test_goodput_refuses_a_step_time_that_cannot_be(step_time_s):
    with pytest.raises(ValueError, match="positive, finite"):
        goodput(256, step_time_s, 256, 100.0)


@given(
    times=st.tuples(st.floats(0.01, 1.0), st.floats(0.01, 2.0)),
    batches=st.tuples(st.integers(1, 500), st.integers(1, 2000)),
    gain=st.floats(0.0, 0.3),
    reference=st.integers(1, 500),
)
def test_a_larger_batch_pays_from_its_break_even_noise_scale_on(times, batches, gain, reference):
    rows, larger = batches[0], batches[0] + batches[1]
    bound = break_even_noise_scale(rows, times[0], larger, times[1], gain)

    def pays(phi):
        return goodput(larger, times[1], reference, phi) / goodput(rows, times[0], reference, phi) - 1 - gain

    assert bound >= 0
    if math.isinf(bound):
        assert pays(math.inf) <= 1e-9
    else:
        assert pays(bound * 1.001 + 1e-6) > -1e-9
        if bound > 0:
            assert pays(bound) == pytest.approx(0.0, abs=1e-6)
            assert pays(bound * 0.999) < 1e-9
