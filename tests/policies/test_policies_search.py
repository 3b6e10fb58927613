"""Searches beyond the exact split: when they are asked for, what they cost, and what is believed of their answers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_worlds import group, observed
from pure_searcher import PureSearcher

from rex_ray.control.commands import CancelSearch, StartSearch, TellTrial
from rex_ray.control.controller import Controller
from rex_ray.control.events import Event, SearchFinished, TrialProposed
from rex_ray.control.journalled import JournalledController
from rex_ray.control.notes import Decided, Found
from rex_ray.control.reading import read_journal
from rex_ray.control.replay import replay
from rex_ray.control.vocabulary import CODEC
from rex_ray.core.observations import AllocationApplied, TrialRequested
from rex_ray.core.types import Allocation
from rex_ray.policies import base
from rex_ray.policies.base import Finding, Proposal, Reallocate
from rex_ray.policies.registry import make_policy
from rex_ray.policies.seams import Alarm, SearchView
from rex_ray.policies.search.beyond_curves import AxSearch
from rex_ray.policies.search.duel import rank_test
from rex_ray.policies.search.rules import SearchRules
from rex_ray.policies.search.state import AskedSearch, Candidate, Placing, SearchState, TimedTrial, Vouched
from rex_ray.policies.search.watch import hope
from rex_ray.policies.split.doubted import DoubtedModel
from rex_ray.policies.split.spline import SplineSplit
from rex_ray.scenario import Episode, NoiseModel, StepTimeShape, true_optimum
from rex_ray.sim import Scenario, SimulatedRun, mixed_cluster, simulate

MIXED = ("T4", "T4", "V100", "V100")
QUIET = NoiseModel.quiet()
TILES = StepTimeShape(tile_rows=32)


def resnet50(shape: StepTimeShape | None = None, noise: NoiseModel = QUIET, **changes) -> Scenario:
    return mixed_cluster(MIXED, "resnet50", global_batch_size=256, shape=shape, noise=noise, **changes)


def play(scenario: Scenario, num_steps: int, searcher: Any = None, **options) -> SimulatedRun:
    policy = make_policy("rex", {"growth": "off"} | options)
    return simulate(Controller(policy), scenario, num_steps=num_steps, searcher=searcher or PureSearcher())


def true_s(scenario: Scenario, sizes: Sequence[int]) -> float:
    return max(line.quiet_time_s(rows, sizes) for line, rows in zip(scenario.timelines, sizes, strict=True))


def findings(run: SimulatedRun, part: str = "search") -> list[Finding]:
    return [note.finding for note in run.notes if isinstance(note, Found) and note.finding.part == part]


@dataclass(frozen=True)
class Line:
    """A worker whose own time is written down: ``truth(step, rank, rows, all_rows)`` seconds."""

    rank: int
    truth: Callable[[int, int, int, Sequence[int]], float]

    def own_times(self, start: int, stop: int, num_rows: int, all_rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        truth = [self.truth(step, self.rank, num_rows, all_rows) for step in range(start, stop)]
        return np.zeros(stop - start), np.array(truth)


def written(truth: Callable[[int, int, int, Sequence[int]], float], rows: int = 128, num_workers: int = 2) -> Scenario:
    lines = tuple(Line(rank, truth) for rank in range(num_workers))
    return Scenario(problem=group(["T4"] * num_workers, rows), timelines=lines)  # type: ignore[arg-type]


class Scripted:
    """A search that proposes given candidates in turn and ends with the one told best."""

    latency_steps = 2

    def __init__(self, *candidates: tuple[int, ...]) -> None:
        self.candidates = candidates
        self.told: list[tuple[int, float]] = []
        self.cancelled = 0

    def carry_out(self, command: StartSearch | TellTrial | CancelSearch) -> Sequence[Event]:
        match command:
            case StartSearch(search_id=search_id, problem=problem):
                if problem.kind == "model":
                    return [SearchFinished(search_id=search_id, local_batch_sizes=problem.plan, objective=0.0)]
                self.told = []
                return [TrialProposed(search_id=search_id, trial=0, local_batch_sizes=self.candidates[0])]
            case TellTrial(search_id=search_id):
                self.told.append((command.trial, command.objective))
                if len(self.told) < len(self.candidates):
                    shares = self.candidates[len(self.told)]
                    return [TrialProposed(search_id=search_id, trial=len(self.told), local_batch_sizes=shares)]
                trial, objective = min(self.told, key=lambda told: told[1])
                shares = self.candidates[trial]
                return [SearchFinished(search_id=search_id, local_batch_sizes=shares, objective=objective)]
        self.cancelled += 1
        return []


def tiled(step: int, rank: int, rows: int, all_rows: Sequence[int]) -> float:
    """Two workers, the second twice as fast, both computing whole tiles of 32 rows."""
    del step, all_rows
    return math.ceil(rows / 32) * (0.08 if rank == 0 else 0.04) + 0.01


# ------------------------------------------------------------------ what a search is good for


def test_with_tiles_a_measured_search_adopts_a_plan_faster_than_the_exact_split_and_keeps_it():
    scenario = resnet50(TILES)
    best_s = true_optimum(scenario.timelines, 256).step_time_s
    exact, searched = (play(scenario, 700, search=search) for search in ("off", "auto"))
    assert true_s(scenario, exact.allocations[-1][1].local_batch_sizes) > 1.1 * best_s
    assert true_s(scenario, searched.allocations[-1][1].local_batch_sizes) <= 1.001 * best_s
    assert searched.total_s < 0.95 * exact.total_s
    assert searched.allocations[-1][0] < 400, "curves that go on disagreeing do not move what was measured"
    (adopted,) = [found for found in findings(searched) if found.verdict == "winner adopted"]
    assert adopted.evidence["p_value"] < 0.05
    assert adopted.evidence["measured_gain"] > 0.1
    assert adopted.evidence["effect"] == 1.0
    assert adopted.evidence["num_samples"] == 40


def test_curves_that_erred_are_not_taken_for_changes_of_speed():
    """Eight workers whose every other size falls into another tile: a trigger that trusts the curves cries wolf."""
    shape, devices = StepTimeShape(tile_rows=32), ("T4",) * 4 + ("V100",) * 4
    scenario = mixed_cluster(
        devices, "resnet50", global_batch_size=512, shape=shape, noise=NoiseModel.dedicated(), seed=0
    )
    run = play(scenario, 450)
    best_s = true_optimum(scenario.timelines, 512).step_time_s
    assert true_s(scenario, run.allocations[-1][1].local_batch_sizes) <= 1.001 * best_s
    assert [found.verdict for found in findings(run, "trigger") if found.verdict in ("slow", "recovered")] == []


def test_a_doubted_model_speaks_of_what_runs_and_of_memory_only():
    _, _, model, _ = in_mid_trial()
    doubted = DoubtedModel(inner=model, sizes=(96, 32))
    assert doubted.own_s((96, 32)).tolist() == model.own_s((96, 32)).tolist()
    assert doubted.own_s(np.array([64, 64])) is None
    assert doubted.step_time_s(128) is None
    assert model.step_time_s(128) is not None
    assert doubted.search_problem("model", (64, 64), 5).plan == model.search_problem("model", (64, 64), 5).plan


@pytest.mark.parametrize("seed", range(3))
def test_e13_on_smooth_curves_a_search_moves_nothing_and_says_that_the_exact_split_stands(seed):
    scenario = resnet50(noise=NoiseModel.dedicated(), seed=seed)
    searcher = PureSearcher()
    searched, exact = play(scenario, 350, searcher), play(scenario, 350, search="off")
    assert [start.problem.kind for start in searcher.started] == ["model"]
    assert [found.verdict for found in findings(searched)] == ["exact split stands"]
    assert searched.allocations == exact.allocations


def test_contention_is_left_to_the_iterated_exact_split():
    scenario = resnet50(StepTimeShape(contention=0.6, hosts=(0, 0, 1, 1)))
    run = play(scenario, 300)
    best_s = true_optimum(scenario.timelines, 256).step_time_s
    assert true_s(scenario, run.allocations[-1][1].local_batch_sizes) <= 1.01 * best_s


def test_a_search_follows_a_start_a_change_of_batch_and_an_event():
    searcher = PureSearcher()
    episode = Episode(rank=0, start_step=150, num_steps=400, factor=2.0)
    play(resnet50(episodes=(episode,)), 350, searcher)
    assert [start.problem.kind for start in searcher.started] == ["model", "model"]
    assert "measured" not in {start.problem.kind for start in searcher.started}


@given(
    rises=st.lists(st.lists(st.integers(0, 3), min_size=12, max_size=12), min_size=2, max_size=3),
    cut=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    lower=st.integers(0, 2),
    upper=st.integers(6, 12),
)
def test_no_split_saves_more_than_what_is_hoped_for(rises, cut, lower, upper):
    """Against every split of small instances with times that grow in steps, plateaus included."""
    n = len(rises)
    tables = [np.concatenate([[0.0], 1.0 + np.cumsum(steps)]) for steps in rises]
    sizes = [min(max(rows, lower), upper) for rows in cut[:n]]
    own_s = np.array([table[rows] for table, rows in zip(tables, sizes, strict=True)])
    splits = itertools.product(range(lower, upper + 1), repeat=n)
    best_s = min(
        max(table[rows] for table, rows in zip(tables, split, strict=True))
        for split in splits
        if sum(split) == sum(sizes)
    )
    promised = hope(own_s, np.array(sizes), np.full(n, lower), np.full(n, upper))
    assert best_s >= (1 - promised) * own_s.max() - 1e-12


def test_balanced_shares_are_not_searched_however_wrong_the_curves_were():
    """Every rank takes a quarter longer than its curve said at the new size, all alike: nothing is to be gained."""

    def truth(step: int, rank: int, rows: int, all_rows: Sequence[int]) -> float:
        del step, all_rows
        return (0.1 + 0.004 * rows) if rank == 0 and rows > 50 else 0.26 + 0.0001 * rows

    searcher = PureSearcher()
    run = play(written(truth), 300, searcher)
    assert len(run.allocations) > 1
    assert {start.problem.kind for start in searcher.started} == {"model"}


# ------------------------------------------------------------------ A B A B


def test_a_better_plan_is_measured_in_turn_with_the_incumbent_and_stays():
    run = play(written(tiled), 400, Scripted((32, 96), (48, 80)))
    shares = [allocation.local_batch_sizes for _, allocation in run.allocations]
    assert shares[-1] == (32, 96)
    incumbent = shares[shares.index((32, 96)) - 1]
    assert shares[-4:] == [incumbent, (32, 96), incumbent, (32, 96)]
    assert [found.verdict for found in findings(run)][-1] == "winner adopted"


def test_a_plan_that_was_fast_in_its_trial_alone_is_put_back():
    """Luck: the candidate's first ten steps were fast, and never again."""
    runs: list[int] = []

    def lucky(step: int, rank: int, rows: int, all_rows: Sequence[int]) -> float:
        if all_rows[0] != 40:
            return tiled(step, rank, rows, all_rows)
        runs.append(step)
        return tiled(step, rank, rows, all_rows) * (0.9 if step - runs[0] < 14 else 1.0)

    run = play(written(lucky), 420, Scripted((40, 88)))
    shares = [allocation.local_batch_sizes for _, allocation in run.allocations]
    stands = next(found for found in findings(run) if found.verdict == "incumbent stands")
    assert "p_value" in stands.evidence, "it came to a duel"
    last = max(at for at, sizes in enumerate(shares) if sizes == (40, 88))
    before = shares[shares.index((40, 88)) - 1]
    assert shares[last + 1] == before, "the incumbent is put back"
    assert shares.count((40, 88)) == 2 + (shares[shares.index((40, 88)) + 1] != before)


def test_trials_that_beat_nothing_lead_to_no_duel():
    run = play(written(tiled), 250, Scripted((64, 64), (100, 28)))
    stands = next(found for found in findings(run) if found.verdict == "incumbent stands")
    assert "p_value" not in stands.evidence
    shares = [allocation.local_batch_sizes for _, allocation in run.allocations]
    at = shares.index((100, 28))
    assert shares[at + 1] == shares[at - 2], "and what ran before them runs again"
    assert shares.count((64, 64)) == 2, "at the start and in its trial"


def test_a_hopeless_trial_is_told_after_three_steps_and_unfit_ones_are_refused_at_once():
    searcher = Scripted((127, 1), (64, 65), (-1, 129), (32, 64, 32), (32, 96))
    run = play(written(tiled), 400, searcher)
    assert [math.isfinite(objective) for _, objective in searcher.told] == [True, False, False, False, True]
    hopeless = next(found for found in findings(run) if found.verdict == "trial 0")
    assert hopeless.evidence["num_samples"] == 3
    assert run.allocations[-1][1].local_batch_sizes == (32, 96)


def test_the_rank_test_knows_ties_order_and_memory():
    slow, fast = [1.0, 1.1, 1.2, 1.3] * 5, [0.9, 0.8, 0.7, 0.6] * 5
    assert rank_test(slow, fast, 0.0)[0] < rank_test(slow, fast, 0.6)[0] < 0.05
    assert rank_test(slow, fast, 0.0)[1] == 1.0
    assert rank_test(fast, slow, 0.6)[0] > 0.95
    assert rank_test([1.0] * 20, [1.0] * 20, 0.6) == (0.5, 0.0)


# ------------------------------------------------------------------ what may come in between


def test_a_trial_that_is_held_back_is_proposed_again():
    """A cool-down defers every trial; the search takes longer and comes to the same end."""
    prompt, late = (play(written(tiled), 900, Scripted((48, 80), (32, 96)), cooldown_steps=wait) for wait in (0, 40))
    run_prompt, run_late = ([a.local_batch_sizes for _, a in run.allocations] for run in (prompt, late))
    assert run_late == run_prompt
    assert late.allocations[-1][0] > prompt.allocations[-1][0] + 100


@pytest.mark.parametrize("lag_steps", [2, 25])
def test_a_slow_switch_only_delays(lag_steps):
    scenario = replace(written(tiled), switch_lag_steps=lag_steps)
    run = play(scenario, 900, Scripted((48, 80), (32, 96)))
    reference = play(written(tiled), 900, Scripted((48, 80), (32, 96)))
    assert [a.local_batch_sizes for _, a in run.allocations] == [a.local_batch_sizes for _, a in reference.allocations]


def in_mid_trial(**rules: Any) -> tuple[AxSearch, SearchState, Any, int]:
    """A search part whose trial (96, 32) of a batch in shares (64, 64) has just been put in place."""
    part, split = AxSearch(rules=SearchRules(**rules)), SplineSplit()
    problem = group(["T4", "T4"], 128)
    _, book = split.init(problem, None, None, 128)
    state, step = part.init(problem, None), 0
    for version, sizes in enumerate([(80, 48), (64, 64)], start=1):
        applied = AllocationApplied(allocation=Allocation(version=version, local_batch_sizes=sizes), step=step)
        state = part.applied(state, applied, split.model(book))
        book = split.applied(book, applied)
        for _ in range(40):
            shown = observed(step, sizes, [tiled(0, rank, rows, sizes) * 1e6 for rank, rows in enumerate(sizes)])
            book = split.observe(book, shown)
            asked, state = part.observe(state, shown, split.model(book), SearchView())
            if isinstance(asked, base.Search) and asked.problem.kind == "model":
                state = replace(state, stage=None, wants_model=False)
            step += 1
    assert isinstance(state.stage, AskedSearch)
    assert state.stage.kind == "measured"
    request = TrialRequested(search_id="s", trial=0, local_batch_sizes=(96, 32))
    decision, state = part.trial(state, request, split.model(book))
    assert isinstance(decision, Reallocate)
    assert decision.search_id == "s"
    again, _ = part.observe(state, observed(step, (64, 64), [170_000] * 2), split.model(book), SearchView())
    assert isinstance(again, Reallocate)
    assert again.proposal == decision.proposal, "asked for until it is applied"
    applied = AllocationApplied(allocation=Allocation(version=3, local_batch_sizes=(96, 32)), step=step)
    return part, part.applied(state, applied, split.model(book)), split.model(book), step


def test_an_alarm_in_mid_trial_ends_the_search_and_the_split_goes_first():
    part, state, model, step = in_mid_trial()
    assert part.busy(state)
    alarm = Alarm(factors={0: 2.0}, verdict="slow", reason="rank 0 is slow")
    told, state = part.observe(state, observed(step, (96, 32), [250_000, 50_000]), model, SearchView(alarm=alarm))
    assert isinstance(told, Finding)
    assert told.verdict == "search ended"
    assert not part.busy(state), "nothing holds the split's answer to the alarm back"
    back, state = part.observe(state, observed(step + 1, (96, 32), [250_000, 50_000]), model, SearchView())
    assert isinstance(back, Reallocate)
    assert back.proposal.local_batch_sizes == (64, 64)
    assert back.search_id is None, "which also ends the search outside"
    moved = AllocationApplied(allocation=Allocation(version=4, local_batch_sizes=(30, 98)), step=step + 2)
    settled = part.applied(state, moved, model)
    assert isinstance(settled.stage, Placing), "asked for again, unless the split speaks up"
    trial = TrialRequested(search_id="s", trial=1, local_batch_sizes=(32, 96))
    refused, _ = part.trial(state, trial, model)
    assert isinstance(refused, base.TellTrial)
    assert refused.objective == math.inf


def test_a_change_of_batch_in_mid_trial_ends_the_search():
    part, state, model, step = in_mid_trial()
    grown = AllocationApplied(allocation=Allocation(version=4, local_batch_sizes=(128, 128)), step=step)
    state = part.applied(state, grown, model)
    assert state.stage is None
    assert state.wants_model
    told, state = part.observe(state, observed(step, (128, 128), [330_000, 170_000]), model, SearchView())
    assert isinstance(told, Finding)
    assert told.verdict == "search ended"


def test_another_group_begins_without_a_search_and_remembers_what_searches_cost():
    part, state, *_ = in_mid_trial()
    fresh = part.init(group(["T4"] * 3, 90), replace(state, ledger=replace(state.ledger, lost_steps=7.0)))
    assert fresh.stage is None
    assert fresh.ledger.lost_steps == 7.0


def test_a_change_of_speed_within_a_trial_is_seen_without_a_trigger():
    part, state, model, step = in_mid_trial()
    for k in range(8):
        own = [170_000, 50_000 if k < 4 else 100_000]
        told, state = part.observe(state, observed(step + k, (96, 32), own), model, SearchView())
        if isinstance(told, Finding):
            break
    assert isinstance(told, Finding)
    assert told.verdict == "search ended"
    assert k == 5


@pytest.mark.parametrize("start", [60, 130])
def test_a_slowdown_during_a_measured_search_is_answered_all_the_same(start):
    episode = Episode(rank=0, start_step=start, num_steps=10_000, factor=2.0)
    scenario = resnet50(TILES, noise=NoiseModel.dedicated(), episodes=(episode,))
    run = play(scenario, 900)
    last = run.allocations[-1][1].local_batch_sizes
    best_s = true_optimum(scenario.timelines, 256, slowdowns=[2.0, 1.0, 1.0, 1.0]).step_time_s
    slow_s = max(
        line.quiet_time_s(rows, last, slowdown=2.0 if rank == 0 else 1.0)
        for rank, (line, rows) in enumerate(zip(scenario.timelines, last, strict=True))
    )
    assert slow_s <= 1.35 * best_s, "one tile of a slow worker is a third of the step"


def test_a_measured_winner_leaves_when_the_curves_promise_more_than_they_have_erred():
    part, state, *_ = in_mid_trial()
    won = Vouched(measured=Candidate(shares=(96, 32), slowest_s=0.2), margin=0.2)
    state = replace(state, stage=None, vouched=won)

    def offer(planned_s: float) -> Reallocate:
        return Reallocate(
            proposal=Proposal(local_batch_sizes=(64, 64)), reason="", evidence={"planned_step_time_s": planned_s}
        )

    assert part.holds(state, offer(0.17)) is not None
    assert part.holds(state, offer(0.15)) is None
    drifted = replace(state, vouched=replace(won, recent_s=(0.3,) * 20))
    assert part.holds(drifted, offer(0.25)) is None, "what runs is no longer what won"
    assert part.holds(replace(state, sizes=(64, 64)), offer(0.3)) is None


# ------------------------------------------------------------------ bounds


def test_a_search_that_never_answers_is_given_up_and_asked_again_ever_more_rarely():
    searcher = PureSearcher(silent=True)
    run = play(resnet50(), 1400, searcher)
    lost = [note.step for note in run.notes if isinstance(note, Found) and note.finding.verdict == "search lost"]
    assert len(lost) >= 2
    assert run.allocations == play(resnet50(), 1400, search="off").allocations


def test_a_search_that_fails_changes_nothing():
    run = simulate(Controller(make_policy("rex", {"growth": "off"})), resnet50(TILES), num_steps=300)
    exact = play(resnet50(TILES), 300, search="off")
    assert run.allocations == exact.allocations
    assert findings(run)[0].verdict == "search lost"
    assert "no search helper" in findings(run)[0].reason


@pytest.mark.parametrize("budget", [0.0, 0.02])
def test_d6_trials_cost_no_more_than_their_budget_and_the_next_search_waits(budget):
    """Every candidate is 1.19 times as slow as the incumbent: too good to give up early, too bad to adopt."""
    candidates = tuple((60 + k % 4, 68 - k % 4) for k in range(10))
    scenario = written(lambda step, rank, rows, shares: 0.25 * (1.19 if 60 <= shares[0] < 64 else 1.0) if rank else 0.1)
    searcher = Scripted(*candidates)
    run = play(scenario, 1500, searcher, search_budget=budget)
    incumbent_s = 0.25
    lost = float(np.sum(np.maximum(run.step_s / incumbent_s - 1.0, 0.0)))
    decided = [note for note in run.notes if isinstance(note, Decided) and note.kind == "search"]
    mismatch = max(note.evidence.get("mismatch", 0.0) for note in decided)
    assert mismatch > 0.05
    one_trial = 0.19 * 30
    assert 0 < lost <= budget * 1500 + 200 * mismatch + one_trial


def test_advice_asks_the_curves_and_runs_nothing():
    searcher = PureSearcher()
    run = play(resnet50(TILES), 300, searcher, search="advise")
    assert {start.problem.kind for start in searcher.started} == {"model"}
    assert run.allocations == play(resnet50(TILES), 300, search="off").allocations
    by_hand = PureSearcher()
    play(resnet50(TILES), 200, by_hand, split="off")
    assert by_hand.started == []


def test_advice_of_a_search_is_said_once_and_holds_nothing_up():
    """Nobody takes it up: waiting for that would keep the trigger blind and the split's own advice back."""
    searcher = PureSearcher()
    run = play(resnet50(), 200, searcher, split="advise")
    assert len(searcher.started) == 1
    counts = {
        part: max(note.count for note in run.notes if isinstance(note, Found) and note.finding.part == part)
        for part in ("search", "split")
    }
    (advice,) = findings(run)
    assert advice.verdict == "advises"
    assert counts == {"search": 1, "split": 128}


@pytest.mark.parametrize("devices", [("T4",), ("T4", "T4"), ("V100",) * 5])
def test_workers_of_one_speed_are_not_searched(devices):
    searcher = PureSearcher()
    run = play(mixed_cluster(devices, "resnet50", global_batch_size=64 * len(devices), noise=QUIET), 200, searcher)
    assert searcher.started == [], "which would start a process"
    assert [found.verdict for found in findings(run)] == ["exact split stands"] * (len(devices) > 1)


# ------------------------------------------------------------------ the journal


def test_a_run_with_trials_replays_without_a_searcher():
    options = {"growth": "off"}
    run = play(written(tiled), 330, Scripted((48, 80), (32, 96)), **options)
    journalled, chunks = JournalledController.begin(policy="rex", policy_options=options, seed=0)
    files: dict[str, bytes] = {}
    for chunk in (*chunks, *(c for event in run.events for c in journalled.handle(event).chunks), *journalled.flush()):
        files[chunk[0]] = files.get(chunk[0], b"") + chunk[1]
    journal = read_journal(files)
    told = [type(event).__name__ for event in journal.events]
    assert told.count("TrialProposed") == 2
    assert told.count("SearchFinished") == 2
    report = replay(journal)
    assert report.differences == ()


def test_the_state_is_known_to_the_journal_at_every_stage():
    part, state, model, step = in_mid_trial()
    revived = CODEC.decode(CODEC.encode(state))
    assert isinstance(revived.stage, TimedTrial)
    shown = observed(step, (96, 32), [250_000, 50_000])
    for _ in range(12):
        (one, state), (other, revived) = (part.observe(s, shown, model, SearchView()) for s in (state, revived))
        assert one == other
        assert CODEC.encode(revived) == CODEC.encode(state)
