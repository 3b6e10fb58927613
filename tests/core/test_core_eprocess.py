"""Laws of the bet on signs: never in the gambler's favour under the null, and soon decided where there is something."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.eprocess import SignBet
from rex_ray.core.errors import ConfigError

BET = SignBet()


def smallest_p_of_runs(signs: np.ndarray) -> np.ndarray:
    """Smallest anytime-valid p of each run, ``signs`` of shape ``[runs, looks]``."""
    wealth, smallest = BET.begin(signs.shape[:1]), np.ones(len(signs))
    for look in range(signs.shape[1]):
        wealth = BET.bet(wealth, look, signs[:, look])
        smallest = np.minimum(smallest, BET.p_value(wealth, look + 1))
    return smallest


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_runs_that_ever_err_are_few_however_often_one_looks(alpha):
    rng = np.random.default_rng(1)
    signs = np.where(rng.random((4000, 1000)) < BET.null_chance, 1.0, -1.0)
    share = np.mean(smallest_p_of_runs(signs) < alpha)
    assert share <= alpha + 3 * np.sqrt(alpha * (1 - alpha) / 4000)


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), max_size=30))
def test_the_game_is_fair_at_the_null_chance(signs):
    wealth, num_bets = BET.begin(), 0
    for sign in signs:
        wealth, num_bets = BET.bet(wealth, num_bets, sign), num_bets + 1
    held = wealth + 1 / (num_bets + 1)
    won, lost = (BET.bet(wealth, num_bets, sign) + 1 / (num_bets + 2) for sign in (1.0, -1.0))
    assert BET.null_chance * won + (1 - BET.null_chance) * lost == pytest.approx(held)


def test_positive_signs_throughout_are_believed_after_ten_looks_also_when_they_begin_late():
    assert smallest_p_of_runs(np.ones((1, 10)))[0] < 0.05
    late = np.concatenate([-np.ones(200), np.ones(25)])[None]
    assert smallest_p_of_runs(late)[0] < 0.05


@pytest.mark.parametrize("nothing", [0.0, np.nan, np.inf, -np.inf])
def test_what_has_no_sign_is_no_bet(nothing):
    wealth = BET.bet(BET.begin(), 0, 1.0)
    after = BET.bet(wealth, 1, nothing)
    assert after + 1 / 3 == pytest.approx(wealth + 1 / 2)


def test_wealth_stays_finite_for_ever():
    wealth = np.full(3, 1e12)
    assert np.isfinite(BET.bet(wealth, 10**6, 1.0)).all()
    assert float(BET.p_value(wealth, 10**6)) == pytest.approx(1e-12)


@pytest.mark.parametrize("bad", [{"null_chance": 1.0}, {"assumed_chances": (0.5,)}, {"assumed_chances": (1.0,)}])
def test_bets_that_cannot_win_are_refused(bad):
    with pytest.raises(ConfigError, match="bet on signs"):
        SignBet(**bad)
