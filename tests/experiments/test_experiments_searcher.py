"""Searches of simulated runs, by the live helper process."""

from __future__ import annotations

import pytest

from experiments._search_problems import SPEEDS, search_problem
from experiments._searcher import HelperSearcher
from rex_ray.control.commands import CancelSearch, StartSearch, TellTrial
from rex_ray.control.events import Event, SearchFinished, TrialProposed
from rex_ray.core.search_problem import objective_of


def measured(searcher: HelperSearcher, seed: int) -> list[Event]:
    """A whole measured search on tiles of 32 rows, of four workers of two speeds."""
    problem = search_problem(4, "two speeds", "measured", max_trials=6)
    curves = problem.curves()
    events = list(searcher.carry_out(StartSearch(search_id="a", seed=seed, problem=problem)))
    while isinstance(trial := events[-1], TrialProposed):
        rows = [-(-b // 32) * 32 for b in trial.local_batch_sizes]
        own_s = tuple(float(curve.predict_s(b)) for curve, b in zip(curves, rows, strict=True))
        told = TellTrial(search_id="a", trial=trial.trial, objective=objective_of(own_s), own_s=own_s)
        events += searcher.carry_out(told)
    return events


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_seed_has_one_answer_whatever_the_helper_searched_before() -> None:
    with HelperSearcher() as searcher:
        first, other, again = (measured(searcher, seed) for seed in (1, 2, 1))
        assert first == again
        assert isinstance(other[-1], SearchFinished)
        for speeds in SPEEDS:
            question = StartSearch(search_id="b", seed=1, problem=search_problem(8, speeds))
            (answer,) = searcher.carry_out(question)
            assert isinstance(answer, SearchFinished)
        assert searcher.num_searches == 5
        assert searcher.cpu_s > 0.0


def test_a_search_that_was_never_begun_leads_to_no_event() -> None:
    with HelperSearcher() as searcher:
        assert searcher.carry_out(CancelSearch(search_id="none", reason="never begun")) == ()
        assert searcher.carry_out(TellTrial(search_id="none", trial=0, objective=0.0)) == ()
