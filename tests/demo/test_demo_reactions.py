"""Answers to a script are judged by what is known to have happened, not by what a policy believed."""

from __future__ import annotations

import io
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rex_ray.control.commands import StartSearch, TellTrial
from rex_ray.control.events import (
    Event,
    GroupStarted,
    SearchFailed,
    SearchFinished,
    StepObserved,
    Ticked,
    TrialProposed,
)
from rex_ray.control.journal import Entry
from rex_ray.control.notes import Applied, Decided, Note
from rex_ray.core.search_problem import SearchProblem
from rex_ray.core.types import Problem, WorkerSpec
from rex_ray.demo.adaptation import SearchOutcome, search_outcome
from rex_ray.demo.comparison import truth_of
from rex_ray.demo.reactions import EventOutcome, first_reaction_steps
from rex_ray.demo.scenarios import DEFAULT_POLICIES, make_settings, scenario_names
from rex_ray.demo.script import ScriptedEvent, episodes_of
from rex_ray.demo.settings import contestant
from rex_ray.demo.summary import RunSummary, summarise
from rex_ray.demo.table import print_summary
from rex_ray.demo.trace import RunTrace
from rex_ray.demo.truth import Truth
from rex_ray.policies.base import Proposal
from rex_ray.scenario import load_profile, slowdown_factor
from rex_ray.worker.emulation import EmulationSpec

DEVICES = ("T4", "T4", "V100", "V100")
NORMAL, WITHOUT_2 = (33, 33, 95, 95), (49, 49, 9, 149)
SLOW = ScriptedEvent(rank=2, factor=2.0, onset_step=20, num_steps=30)
ALL = ScriptedEvent(rank=None, factor=1.5, onset_step=70, num_steps=10)
FLAPPING = ScriptedEvent(rank=3, factor=2.0, onset_step=100, num_steps=5, repeats=3, pause_steps=5)
SCRIPT = (SLOW, ALL, FLAPPING)
NUM_STEPS = 150


def truth() -> Truth:
    return truth_of(EmulationSpec(workload="resnet50", episodes=episodes_of(SCRIPT)), DEVICES, 256)


def journal(moves: list[tuple[int, tuple[int, ...]]], *, lag_steps: int = 4, kind: str = "reallocate") -> list[Entry]:
    """A run that decides ``(step, shares)`` and applies them ``lag_steps`` later, at the exact times."""
    exact = truth()
    workers = tuple(WorkerSpec(rank=rank, device=device) for rank, device in enumerate(DEVICES))
    problem = Problem(workers=workers, global_batch_size=256, max_global_batch_size=256, dataset_size=10_000)
    first = Decided(step=-1, kind="first", reason="", version=1, proposal=Proposal(local_batch_sizes=NORMAL))
    entries: list[tuple[Event, tuple[Note, ...]]] = [(GroupStarted(generation="g", problem=problem), (first,))]
    rows, version, planned = NORMAL, 1, dict(moves)
    due: tuple[int, tuple[int, ...]] | None = None
    for step in range(NUM_STEPS):
        notes: list[Note] = []
        if step == 0:
            notes.append(Applied(step=0, version=1, local_batch_sizes=NORMAL, lag_steps=1))
        if due is not None and due[0] == step:
            rows = due[1]
            notes.append(Applied(step=step, version=version, local_batch_sizes=rows, lag_steps=lag_steps))
            due = None
        if step in planned:
            version += 1
            proposal = Proposal(local_batch_sizes=planned[step])
            notes.append(Decided(step=step, kind=kind, reason="", version=version, proposal=proposal))
            due = (step + lag_steps, planned[step])
        own_us = np.round(1e6 * exact.own_s(rows, exact.slowdowns(step))).astype(np.int64)
        observed = StepObserved(
            generation="g",
            epoch=0,
            step=step,
            allocation_version=version,
            num_rows=np.array(rows),
            data_us=0 * own_us,
            compute_us=own_us,
            sync_us=own_us.max() - own_us,
            step_us=0 * own_us + own_us.max(),
        )
        entries.append((observed, tuple(notes)))
    return [Entry(number=k, event=event, commands=(), notes=notes) for k, (event, notes) in enumerate(entries)]


def judged(moves, **options) -> RunSummary:
    return summarise("x", journal(moves, **options), truth(), target_accuracy=0.9, script=SCRIPT)


def test_a_reaction_counts_from_the_onset_to_the_newest_step_known_and_the_switchs_lag_stands_beside_it():
    run = judged([(27, WITHOUT_2), (58, NORMAL)])
    slow, cluster, flapping = run.events
    assert (slow.decision_step, slow.reaction_steps, slow.applied_step, slow.lag_steps) == (27, 7, 31, 4)
    assert (slow.recovery_decision_step, slow.recovery_steps) == (58, 8)
    assert slow.moves == 2
    assert slow.device == "V100"
    assert run.first_reaction_steps == 7
    assert (cluster.moves, flapping.moves) == (0, 0)
    assert run.false_reallocations == 0


def test_a_run_that_never_moves_has_no_reaction_and_the_oracles_gap_is_what_that_costs():
    run = judged([])
    assert run.first_reaction_steps is None
    assert [event.moves for event in run.events] == [0, 0, 0]
    exact = truth()
    slow = exact.slowdowns(20)
    by_hand = 30 * (exact.step_s(NORMAL, slow) - exact.best_step_s(256, slow))
    by_hand += 15 * (exact.step_s(NORMAL, exact.slowdowns(100)) - exact.best_step_s(256, exact.slowdowns(100)))
    assert run.full_time_s - run.oracle_s == pytest.approx(by_hand, abs=1e-3)
    assert run.gap_to_oracle_pct == pytest.approx(100 * by_hand / run.oracle_s, abs=0.01)
    assert run.shares_gap_pct == pytest.approx(100 * by_hand / run.oracle_s, rel=1e-6)


def test_an_answer_to_a_cluster_wide_slowdown_is_a_move_that_brings_nothing():
    run = judged([(75, (40, 40, 88, 88))])
    assert run.events[1].moves == 1
    assert run.false_reallocations == 1


def test_moves_that_the_truth_justifies_are_not_false_and_trials_are_no_moves():
    assert judged([(27, WITHOUT_2), (58, NORMAL)]).false_reallocations == 0
    # Taken only after the worker had recovered: too late, hence false.
    late = judged([(50, WITHOUT_2), (58, NORMAL)])
    assert late.false_reallocations == 1
    assert late.events[0].reaction_steps is None
    trials = judged([(27, WITHOUT_2), (58, NORMAL)], kind="trial")
    assert trials.false_reallocations == 0
    assert trials.events[0].moves == 0


def test_shares_that_are_only_half_way_back_are_not_back():
    run = judged([(27, WITHOUT_2), (55, (45, 45, 32, 134)), (62, NORMAL)])
    assert run.events[0].recovery_steps == 12


def test_flapping_moves_are_counted_over_all_of_it():
    moves = [(102, (49, 49, 149, 9)), (107, NORMAL), (112, (49, 49, 149, 9)), (117, NORMAL), (139, (40, 30, 93, 93))]
    assert judged(moves).events[2].moves == 5


def outcome(reaction_steps: int | None, kind="slowdown") -> EventOutcome:
    return EventOutcome(
        kind=kind, rank=0, device="T4", factor=2.0, onset_step=0, end_step=9, moves=0, reaction_steps=reaction_steps
    )


def test_the_first_reaction_of_a_run_is_its_slowest_and_one_missed_event_makes_it_none():
    assert first_reaction_steps([outcome(3), outcome(9), outcome(None, kind="flapping")]) == 9
    assert first_reaction_steps([outcome(3), outcome(None)]) is None
    assert first_reaction_steps([outcome(None, kind="cluster-wide")]) is None


@given(st.lists(st.integers(2, 252), min_size=1, max_size=8), st.integers(0, NUM_STEPS - 1))
def test_no_shares_are_quicker_than_the_oracle_at_any_step(rows, step):
    exact = truth()
    for first in rows:
        split = (1, 1, first, 254 - first)
        slowdowns = exact.slowdowns(step)
        assert exact.step_s(split, slowdowns) >= exact.best_step_s(256, slowdowns) * (1 - 1e-9)


def test_the_oracle_of_fewer_rows_than_workers_gives_them_to_the_quickest():
    exact = truth()
    assert sum(exact.best_split(2)) == 2
    assert exact.best_step_s(1) == min(exact.own_s((1, 1, 1, 1)))
    entries = journal([])
    trace = RunTrace.from_events(entry.event for entry in entries)
    assert exact.oracle_s(trace).shape == (NUM_STEPS,)


@given(
    st.integers(0, 50),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(0, 9),
    st.floats(1.1, 4.0),
    st.integers(0, 120),
)
def test_an_events_episodes_are_what_it_says(onset, length, repeats, pause, factor, step):
    event = ScriptedEvent(rank=1, factor=factor, onset_step=onset, num_steps=length, repeats=repeats, pause_steps=pause)
    since = step - onset
    slow = 0 <= since < event.end_step - onset and since % (length + pause) < length
    assert slowdown_factor(event.episodes(), 1, step) == (factor if slow else 1.0)
    assert slowdown_factor(event.episodes(), 0, step) == 1.0
    assert max(episode.start_step + (episode.num_steps or 0) for episode in event.episodes()) == event.end_step


@pytest.mark.parametrize("scenario", scenario_names())
@pytest.mark.parametrize("quick", [False, True])
def test_every_scenario_can_be_run_and_names_what_it_compares(scenario, quick):
    settings = make_settings(scenario, quick=quick)
    assert settings.scenario == scenario
    labels = [who.label for who in settings.check(DEFAULT_POLICIES[settings.scenario])]
    assert labels == list(DEFAULT_POLICIES[settings.scenario])
    assert "Emulated: 2 T4" in settings.sentence()
    for event, later in pairwise(settings.script):
        assert later.onset_step >= event.end_step + 20, "the group must have time to come back"


def test_the_scripted_scenario_has_what_it_promises():
    settings = make_settings("transient")
    assert {(event.kind, event.factor) for event in settings.script} >= {("slowdown", 2.0), ("slowdown", 3.0)}
    assert {event.kind for event in settings.script} == {"slowdown", "cluster-wide", "flapping"}
    assert truth_of(settings.emulation(), DEVICES, settings.global_batch_size).optimum_step_s >= 0.1


def test_an_ablation_is_rex_with_one_part_left_out():
    assert contestant("rex-no-trigger").options == {"trigger": "off"}
    assert contestant("rex-no-search").options == {"search": "off"}
    assert contestant("dlb").options == {}


def test_where_the_truth_is_stairs_the_profiles_own_optimum_is_half_as_slow_again():
    settings = make_settings("tiles")
    exact = truth_of(settings.emulation(), DEVICES, settings.global_batch_size)
    assert exact.optimum == (32, 32, 96, 96)
    assert exact.step_s(NORMAL) > 1.4 * exact.optimum_step_s


def test_searches_are_counted_from_commands_and_events():
    problem = SearchProblem(
        kind="measured",
        plan=(2, 2),
        incumbent=(2, 2),
        lower=(1, 1),
        upper=(3, 3),
        shapes=(load_profile("T4", "resnet50").curve,),
        shape_of=(0, 0),
        scales=(1.0, 1.0),
        max_trials=2,
    )
    entries = [
        Entry(
            number=0,
            event=Ticked(now_us=1),
            commands=(StartSearch(search_id="s", seed=1, problem=problem),),
            notes=(),
        ),
        Entry(
            number=1,
            event=TrialProposed(search_id="s", trial=0, local_batch_sizes=(1, 3)),
            commands=(TellTrial(search_id="s", trial=0, objective=0.1),),
            notes=(),
        ),
        Entry(
            number=2,
            event=SearchFinished(search_id="s", local_batch_sizes=(1, 3), objective=0.1),
            commands=(),
            notes=(),
        ),
        Entry(number=3, event=SearchFailed(search_id="t", reason="dead"), commands=(), notes=()),
    ]
    assert search_outcome(entries) == SearchOutcome(started=1, trials=1, told=1, finished=1, failed=1)


@pytest.mark.parametrize("scenario", scenario_names())
def test_every_scenario_prints_its_table_and_names_each_policy_once_per_row(scenario):
    settings = make_settings(scenario)
    runs = [judged([]), judged([(27, WITHOUT_2), (58, NORMAL)])]
    out = io.StringIO()
    print_summary(runs, settings, Console(file=out, width=120))
    shown = out.getvalue()
    assert shown.count("\n x ") == 2
    if scenario == "transient":
        assert ["7", "4", "8", "2"] in [line.split()[-4:] for line in shown.splitlines()]
        assert "everybody 1.5x" in shown
