"""The controller's six invariants, each by name, and all of them against any sequence of events."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from control_worlds import Restless, allocations_in, problem_of, started, step_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rex_ray.control.commands import ApplyAllocation, Command
from rex_ray.control.controller import TRANSITIONS, Controller
from rex_ray.control.events import (
    DrainNoticed,
    Event,
    GroupStarted,
    IncidentReported,
    MemoryLimited,
    MetricReported,
    RunEnded,
    SaveAsked,
    ScheduleReported,
    SearchFailed,
    SearchFinished,
    StepObserved,
    TelemetryGap,
    Ticked,
    TrialProposed,
    WorkerLost,
)
from rex_ray.control.notes import Applied, Decided, Deferred, Dropped, Found, Measured, Refused, Withdrawn
from rex_ray.control.phases import Ended, Phase, Running, Starting, Switching, Waiting
from rex_ray.control.vocabulary import CODEC
from rex_ray.core.curves import StepTimeCurve
from rex_ray.core.errors import IllegalEventError, InfeasibleError
from rex_ray.core.search_problem import SearchProblem
from rex_ray.core.types import Allocation, StepFlag
from rex_ray.policies.base import ChangeGlobalBatch, Finding, Keep, Proposal, Reallocate, RequestWorldSize, Search
from rex_ray.policies.registry import make_policy

SECOND = 1_000_000


class Scripted:
    """Returns prepared decisions, one per observed step; then keeps."""

    name = "scripted"

    def __init__(self, *script, first=(16, 16)):
        self.script, self.first = script, first

    def init(self, problem, prior=None, current=None):
        return Proposal(local_batch_sizes=self.first), 0

    def decide(self, state, observation, rng):
        if not isinstance(observation, StepObserved):
            return Keep(reason=f"saw {type(observation).__name__}"), state
        decision = self.script[state] if state < len(self.script) else Keep(reason="script over")
        return decision, state + 1


def move(*sizes: int, gain: float | None = None) -> Reallocate:
    return Reallocate(proposal=Proposal(local_batch_sizes=sizes), reason=f"to {sizes}", predicted_gain=gain)


def running(policy, mode="auto") -> Controller:
    controller = Controller(policy, mode=mode)
    controller.handle(started())
    return controller


def snapshot(controller: Controller) -> str:
    return json.dumps(CODEC.encode(controller.state))


# --- the six invariants, one by one -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stale", "reason"),
    [
        (step_of(1, 1, generation="older"), "StepObserved of another group"),
        (step_of(1, 0), "StepObserved of an unknown version"),
        (step_of(1, 2), "StepObserved of an unknown version"),
    ],
)
def test_invariant_1_stale_evidence_is_dropped_and_counted(stale, reason):
    controller = running(Scripted(Keep(reason="first"), move(20, 12)))
    controller.handle(step_of(0, 1))
    assert controller.handle(stale) == ()
    assert controller.state.policy_state == 1, "the policy never saw it"
    assert controller.state.dropped == {reason: 1}
    assert Dropped(step=0, reason=reason, count=1) in controller.take_notes()


def test_invariant_2_one_switch_at_a_time_later_wishes_are_noted_as_deferred():
    controller = running(Scripted(move(20, 12), move(24, 8), move(24, 8), move(20, 12)))
    (first,) = allocations_in(controller.handle(step_of(0, 1)))
    assert (first.version, first.local_batch_sizes) == (2, (20, 12))
    controller.take_notes()
    for step in (1, 2, 3):
        assert controller.handle(step_of(step, 1)) == ()
    deferred = [note for note in controller.take_notes() if isinstance(note, Deferred)]
    assert [note.proposal.local_batch_sizes for note in deferred] == [(24, 8)], "said once, and never of its own wish"


def test_invariant_2_an_unapplied_allocation_is_republished_and_then_withdrawn():
    controller = running(Scripted(Keep(reason="first"), move(20, 12)))
    controller.handle(step_of(0, 1))
    controller.handle(Ticked(now_us=100 * SECOND))
    (late,) = allocations_in(controller.handle(step_of(1, 1)))
    published = [allocations_in(controller.handle(Ticked(now_us=(100 + s) * SECOND))) for s in range(1, 31)]
    assert [bool(commands) for commands in published[:6]] == [False, True] * 3
    assert all(allocation == late for commands in published[:29] for allocation in commands)
    ((old,),) = published[29:]
    assert (old.version, old.local_batch_sizes) == (late.version + 1, (16, 16))
    (withdrawn,) = [note for note in controller.take_notes() if isinstance(note, Withdrawn)]
    assert (withdrawn.version, withdrawn.by_version, withdrawn.waited_us) == (2, 3, 30 * SECOND)
    # A withdrawal is published again for ever, but never withdrawn in its turn.
    later = [allocations_in(controller.handle(Ticked(now_us=(130 + s) * SECOND))) for s in range(1, 100)]
    assert {allocation.version for commands in later for allocation in commands} == {3}


def test_invariant_2_where_steps_are_long_a_switch_is_given_the_time_of_32_steps():
    controller = running(Scripted(Keep(reason="first"), move(20, 12)))
    controller.handle(step_of(0, 1, own_us=(2 * SECOND, 2 * SECOND)))
    controller.handle(step_of(1, 1, own_us=(2 * SECOND, 2 * SECOND)))
    controller.handle(Ticked(now_us=63 * SECOND))
    assert not any(isinstance(note, Withdrawn) for note in controller.take_notes())
    controller.handle(Ticked(now_us=64 * SECOND))
    assert any(isinstance(note, Withdrawn) for note in controller.take_notes())


def test_invariant_2_a_withdrawn_allocation_that_arrives_late_is_known_for_what_it_is():
    controller = running(Scripted(move(20, 12)))
    controller.handle(step_of(0, 1))
    controller.handle(step_of(5, 1))
    controller.handle(Ticked(now_us=31 * SECOND))
    controller.handle(step_of(6, 2))
    assert isinstance(controller.phase, Switching)
    (applied,) = (note for note in controller.take_notes() if isinstance(note, Applied) and note.version == 2)
    assert applied.lag_steps == 6, "counted from its own decision, not from the withdrawal's"
    assert controller.phase.allocation.local_batch_sizes == (20, 12)
    controller.handle(step_of(7, 3))
    assert isinstance(controller.phase, Running)
    assert controller.phase.allocation == Allocation(version=3, local_batch_sizes=(16, 16))


def test_invariant_3_applied_means_the_first_complete_step_under_the_new_version():
    controller = running(Scripted(move(20, 12)))
    controller.handle(step_of(0, 1))
    for step in range(1, 8):
        controller.handle(step_of(step, 1))
        assert isinstance(controller.phase, Switching)
    controller.take_notes()
    controller.handle(step_of(8, 2))
    assert isinstance(controller.phase, Running)
    assert controller.take_notes() == (Applied(step=8, version=2, local_batch_sizes=(20, 12), lag_steps=8),)


def test_invariant_4_versions_rise_over_groups_resumes_and_restores():
    controller = running(Restless())
    versions = [controller.phase.pending.allocation.version]
    versions += [a.version for a in allocations_in(controller.handle(step_of(0, 1)))]
    restored = Controller(Restless())
    restored.restore(CODEC.decode(json.loads(snapshot(controller))))
    versions += [a.version for a in allocations_in(restored.handle(started("next", step=1)))]
    resumed = Allocation(version=40, local_batch_sizes=(8, 24))
    versions += [a.version for a in allocations_in(restored.handle(started("third", step=1, allocation=resumed)))]
    assert versions == [1, 2, 3, 41]


def test_invariant_5_a_policys_nonsense_costs_a_note_and_nothing_else():
    nonsense = [
        move(20, 13),
        move(33, -1),
        move(16, 8, 8),
        move(32, 0),
        ChangeGlobalBatch(proposal=Proposal(local_batch_sizes=(500, 500)), reason="far too much"),
    ]
    controller = running(Scripted(*nonsense, move(20, 12)))
    for step in range(len(nonsense)):
        assert controller.handle(step_of(step, 1)) == ()
        assert [type(note) for note in controller.take_notes()][-1] is Refused
    assert allocations_in(controller.handle(step_of(9, 1)))[0].local_batch_sizes == (20, 12)


def test_invariant_6_the_policy_learns_of_an_application_from_the_groups_steps_alone():
    controller = running(Restless())
    assert controller.state.policy_state == (), "the first allocation is no more than published yet"
    controller.handle(step_of(0, 1, rows=(31, 1)))
    assert controller.state.policy_state == (31, 1)
    pending = controller.phase.pending.allocation
    controller.handle(Ticked(now_us=3 * SECOND))
    assert controller.state.policy_state == (31, 1)
    controller.handle(step_of(1, pending.version))
    assert controller.state.policy_state == pending.local_batch_sizes


# --- modes, groups, searches, illegal events --------------------------------------------------------------------------


def test_advise_decides_and_notes_but_publishes_only_the_first_allocation():
    controller = running(Scripted(move(20, 12, gain=0.2), move(20, 12, gain=0.2), move(8, 24)), mode="advise")
    assert controller.phase.pending.allocation.local_batch_sizes == (16, 16)
    for step in range(3):
        assert controller.handle(step_of(step, 1)) == ()
    advice = [note for note in controller.take_notes() if isinstance(note, Decided) and note.kind == "reallocate"]
    assert [(note.version, note.proposal.local_batch_sizes) for note in advice] == [(None, (20, 12)), (None, (8, 24))]


def test_advice_is_noted_again_only_where_it_is_another_and_one_kind_does_not_hide_the_other():
    def grow(*sizes, rate):
        return ChangeGlobalBatch(proposal=Proposal(local_batch_sizes=sizes, lr_factor=rate), reason="more")

    answers = [move(20, 12), grow(100, 100, rate=2.0), move(20, 12), grow(102, 98, rate=2.1), grow(130, 70, rate=2.1)]
    controller = running(Scripted(*answers), mode="advise")
    for step in range(6):
        controller.handle(step_of(step, 1))
    advice = [note.proposal.local_batch_sizes for note in controller.take_notes() if isinstance(note, Decided)]
    assert advice[1:] == [(20, 12), (100, 100), (130, 70)]


def test_advise_leaves_resumed_shares_alone_whatever_the_policy_would_begin_with():
    controller = Controller(Restless(), mode="advise")
    current = Allocation(version=5, local_batch_sizes=(10, 22), lr_factor=1.5)
    (first,) = allocations_in(controller.handle(started(allocation=current)))
    assert first == Allocation(version=6, local_batch_sizes=(10, 22), lr_factor=1.5)


def test_advise_begins_with_what_a_smaller_group_can_run_of_a_batch_that_had_grown():
    controller = Controller(make_policy("rex"), mode="advise")
    grown = Allocation(version=5, local_batch_sizes=(64,) * 4, lr_factor=1.5)
    event = GroupStarted(generation="g", problem=problem_of(2, 32, most=50), step=9, allocation=grown)
    (first,) = allocations_in(controller.handle(event))
    assert first.local_batch_sizes == (50, 50)
    assert first.lr_factor <= 1.5
    (note,) = [note for note in controller.take_notes() if isinstance(note, Decided)]
    assert "100 rows, since it cannot run the 256 rows" in note.reason


def test_off_keeps_equal_shares_and_asks_nobody():
    controller = running(Restless(), mode="off")
    commands = [controller.handle(step_of(step, 1)) for step in range(20)]
    assert controller.state.phase.allocation.local_batch_sizes == (16, 16)
    assert commands == [()] * 20


def test_a_group_that_asks_twice_is_given_the_same_answer():
    controller = Controller(Restless())
    assert controller.handle(started()) == controller.handle(started())
    controller.handle(step_of(0, 1))
    pending = controller.phase.pending.allocation
    assert allocations_in(controller.handle(started())) == [pending]


def test_a_lost_worker_ends_the_groups_evidence_and_the_next_group_inherits_what_was_learnt():
    controller = running(make_policy("rex"))
    for step in range(12):
        controller.handle(step_of(step, 1, own_us=(90_000, 30_000)))
    learnt = controller.state.policy_state.inner.split.book
    controller.handle(WorkerLost(generation="g", rank=1, reason="SIGKILL"))
    assert isinstance(controller.phase, Waiting)
    assert controller.handle(step_of(12, 1)) == ()
    controller.handle(started("h", num_workers=3, step=8))
    assert controller.state.policy_state.inner.split.book.learnt
    assert not learnt.learnt
    controller.handle(WorkerLost(generation="g", rank=0, reason="an echo of the old group"))
    assert isinstance(controller.phase, Starting)


def test_an_impossible_group_is_infeasible_and_changes_nothing():
    controller = Controller(make_policy("bsp"))
    before = snapshot(controller)
    with pytest.raises(InfeasibleError):
        controller.handle(GroupStarted(generation="g", problem=problem_of(2, 64, most=20)))
    assert snapshot(controller) == before


@pytest.mark.parametrize(
    "event",
    [
        step_of(5, 1),  # not after the newest
        step_of(9, 1, rows=(16, 8, 8), own_us=(1, 2, 3)),  # another number of ranks
        Ticked(now_us=SECOND),  # time runs back
    ],
)
def test_an_illegal_event_raises_changes_nothing_and_tells_the_story(event):
    controller = running(Scripted())
    controller.handle(Ticked(now_us=2 * SECOND))
    controller.handle(step_of(5, 1))
    before = snapshot(controller)
    with pytest.raises(IllegalEventError) as caught:
        controller.handle(event)
    assert snapshot(controller) == before
    assert "GroupStarted" in str(caught.value)
    assert "StepObserved(step=5, version=1" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_nothing_is_legal_after_the_end():
    controller = running(Scripted())
    controller.handle(RunEnded(reason="finished"))
    assert controller.phase == Ended(reason="finished")
    for event in (step_of(0, 1), Ticked(now_us=1), started("h"), RunEnded(reason="finished")):
        with pytest.raises(IllegalEventError, match="illegal in phase Ended"):
            controller.handle(event)


def test_the_table_says_what_happens_to_every_event_in_every_phase_but_the_last():
    assert set(TRANSITIONS) == set(Phase.__args__)
    for phase, handlers in TRANSITIONS.items():
        assert set(handlers) == (set() if phase is Ended else set(Event.__args__))


def test_a_change_is_measured_against_what_was_before():
    controller = running(Scripted(*[Keep(reason="-")] * 15, move(20, 12, gain=0.4)))
    for step in range(16):
        controller.handle(step_of(step, 1, own_us=(100_000, 40_000)))
    for step in range(16, 19):
        controller.handle(step_of(step, 2, own_us=(900_000, 900_000), flags=StepFlag.WARM_UP))
    for step in range(19, 40):
        controller.handle(step_of(step, 2, own_us=(50_000, 70_000)))
    (measured,) = [note for note in controller.take_notes() if isinstance(note, Measured)]
    assert (measured.before_us, measured.after_us, measured.predicted_gain) == (100_000, 70_000, 0.4)
    assert measured.gain == pytest.approx(0.3)


def test_a_change_that_answers_a_slowdown_is_measured_against_the_slow_steps():
    controller = running(Scripted(*[Keep(reason="-")] * 15, move(20, 12, gain=0.4)))
    for step in range(20):
        slow = step >= 12
        controller.handle(step_of(step, 1, own_us=(200_000 if slow else 100_000, 40_000)))
    for step in range(20, 40):
        controller.handle(step_of(step, 2, own_us=(120_000, 60_000)))
    (measured,) = [note for note in controller.take_notes() if isinstance(note, Measured)]
    assert (measured.before_us, measured.after_us) == (200_000, 120_000)


def rate(factor: float, *sizes: int) -> ChangeGlobalBatch:
    return ChangeGlobalBatch(proposal=Proposal(local_batch_sizes=sizes, lr_factor=factor), reason="another rate")


def test_another_learning_rate_while_a_change_is_being_measured_does_not_disturb_that():
    keeps = [Keep(reason="-")] * 5
    controller = running(Scripted(*keeps * 3, move(20, 12, gain=0.4), *keeps, rate(2.0, 20, 12)))
    for step in range(16):
        controller.handle(step_of(step, 1, own_us=(100_000, 40_000)))
    for step in range(16, 23):
        controller.handle(step_of(step, 2, own_us=(50_000, 70_000)))
    assert isinstance(controller.state.phase, Switching)
    for step in range(23, 40):
        controller.handle(step_of(step, 3, own_us=(50_000, 70_000)))
    (measured,) = [note for note in controller.take_notes() if isinstance(note, Measured)]
    assert (measured.before_us, measured.after_us, measured.predicted_gain) == (100_000, 70_000, 0.4)
    assert measured.version == 2, "the change's own, and not the rate's"


def test_another_learning_rate_ends_no_search():
    controller = running(Scripted(search_for((20, 12)), rate(2.0, 16, 16)))
    controller.handle(step_of(0, 1))
    commands = controller.handle(step_of(1, 1))
    assert [type(command).__name__ for command in commands] == ["ApplyAllocation"]


def search_for(plan: tuple[int, ...]) -> Search:
    curve = StepTimeCurve(knot_rows=np.array([0.0, 64.0]), knot_s=np.array([0.1, 0.5]), max_trusted_rows=128)
    problem = SearchProblem(
        kind="measured",
        plan=plan,
        incumbent=(16, 16),
        lower=(1, 1),
        upper=(64, 64),
        shapes=(curve,),
        shape_of=(0, 0),
        scales=(1.0, 1.5),
        max_trials=10,
    )
    return Search(problem=problem, reason="?")


def test_searches_are_started_answered_once_and_called_off_with_their_group():
    search = search_for((20, 12))
    controller = running(Scripted(search, search))
    (start,) = controller.handle(step_of(0, 1))
    assert start.search_id.startswith("g/1/32/measured/")
    assert controller.handle(step_of(1, 1)) == (), "one search is enough"
    done = SearchFinished(search_id=start.search_id, local_batch_sizes=(20, 12), objective=-2.0)
    controller.handle(done)
    assert controller.state.last_reason == "saw SearchResult"
    controller.handle(done)
    assert controller.state.dropped == {"result of a stale search": 1}

    other = running(Scripted(search))
    other.handle(step_of(0, 1))
    commands = other.handle(started("h"))
    assert [type(command).__name__ for command in commands] == ["CancelSearch", "ApplyAllocation"]


def test_a_trial_is_the_policys_to_run_and_any_other_switch_ends_the_search():
    controller = running(Scripted(search_for((20, 12)), *[Keep(reason="-")] * 3, move(24, 8)))
    (start,) = controller.handle(step_of(0, 1))
    controller.handle(TrialProposed(search_id=start.search_id, trial=0, local_batch_sizes=(8, 24)))
    assert controller.state.last_reason == "saw TrialRequested"
    commands = [command for step in range(1, 6) for command in controller.handle(step_of(step, 1))]
    assert [type(command).__name__ for command in commands] == ["CancelSearch", "ApplyAllocation"]
    controller.handle(TrialProposed(search_id=start.search_id, trial=1, local_batch_sizes=(8, 24)))
    assert controller.state.dropped == {"trial of a stale search": 1}

    mine = replace(move(24, 8), search_id="?")
    controller = running(Scripted(search_for((20, 12)), mine))
    (start,) = controller.handle(step_of(0, 1))
    (apply,) = controller.handle(step_of(1, 1))
    assert type(apply).__name__ == "ApplyAllocation", "a search's own switch does not end it"


@pytest.mark.parametrize(
    ("search_id", "gain", "kind"), [("s", None, "trial"), ("s", 0.2, "reallocate"), (None, None, "reallocate")]
)
def test_shares_that_a_search_runs_to_time_them_are_a_trial_whether_it_is_over_or_not(search_id, gain, kind):
    controller = running(Scripted(replace(move(24, 8), search_id=search_id, predicted_gain=gain)))
    controller.handle(step_of(0, 1))
    assert [note.kind for note in controller.take_notes() if isinstance(note, Decided)][-1] == kind


def test_findings_are_noted_when_their_verdict_changes_and_then_ever_more_rarely():
    def keep(verdict):
        return Keep(reason="-", findings=(Finding(part="growth", verdict=verdict, reason="because"),))

    controller = running(Scripted(*[keep("keep")] * 9, keep("unknown"), keep("keep")))
    for step in range(11):
        controller.handle(step_of(step, 1))
    found = [
        (note.step, note.finding.verdict, note.count) for note in controller.take_notes() if isinstance(note, Found)
    ]
    assert found == [(0, "keep", 1), (1, "keep", 2), (3, "keep", 4), (7, "keep", 8), (9, "unknown", 1), (10, "keep", 1)]


def test_another_world_size_is_asked_for_and_not_waited_for():
    controller = running(Scripted(RequestWorldSize(num_workers=4, reason="it pays")))
    (command,) = controller.handle(step_of(0, 1))
    assert (command.num_workers, command.reason) == (4, "it pays")


# --- all of it at once ------------------------------------------------------------------------------------------------


QUIET = (DrainNoticed, IncidentReported, MemoryLimited, MetricReported, SaveAsked, ScheduleReported)
SEARCHES = (SearchFailed, SearchFinished, TrialProposed)


def each(*events: type[Event], to: set[type[Phase]]) -> dict[type[Event], set[type[Phase]]]:
    return dict.fromkeys(events, to)


MODEL: dict[type[Phase], dict[type[Event], set[type[Phase]]]] = {
    Waiting: {
        **each(*QUIET, *SEARCHES, StepObserved, TelemetryGap, Ticked, WorkerLost, to={Waiting}),
        GroupStarted: {Starting, Waiting},
        RunEnded: {Ended},
    },
    Starting: {
        **each(*QUIET, *SEARCHES, GroupStarted, TelemetryGap, Ticked, to={Starting}),
        StepObserved: {Starting, Running, Switching},
        WorkerLost: {Starting, Waiting},
        RunEnded: {Ended},
    },
    Running: {
        **each(*QUIET, Ticked, to={Running}),
        **each(*SEARCHES, StepObserved, TelemetryGap, to={Running, Switching}),
        GroupStarted: {Starting, Running},
        WorkerLost: {Running, Waiting},
        RunEnded: {Ended},
    },
    Switching: {
        **each(*QUIET, *SEARCHES, TelemetryGap, Ticked, to={Switching}),
        StepObserved: {Switching, Running},
        GroupStarted: {Starting, Switching},
        WorkerLost: {Switching, Waiting},
        RunEnded: {Ended},
    },
    Ended: {},
}
"""The switch protocol: where each event can lead from each phase. What is not here is illegal."""


class Eager(Scripted):
    """Answers what it is told to, whatever it is shown."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def decide(self, state, observation, rng):
        return self.answer or Keep(reason="-"), state


def controller_in(phase: type[Phase]) -> Controller:
    """A controller in a phase, with group "g" after "f", which runs version 2; a search is under way where one can."""
    policy = Eager(None)
    controller = Controller(policy)
    if phase is Waiting:
        return controller
    controller.handle(started("f"))
    controller.handle(started("g"))
    if phase is Starting:
        return controller
    policy.answer = search_for((20, 12))
    controller.handle(step_of(0, 2))
    if phase is Switching:
        policy.answer = replace(move(20, 12), search_id="?")
        controller.handle(step_of(1, 2))
    policy.answer = None
    if phase is Ended:
        controller.handle(RunEnded(reason="finished"))
    return controller


def events_for(controller: Controller) -> list[Event]:
    """Every kind of event, of the running group, of another one, and of searches that are known and are not."""
    step, version = controller.state.last_step + 1, controller.state.next_version - 1
    events: list[Event] = [
        Ticked(now_us=controller.state.now_us),
        Ticked(now_us=controller.state.now_us + 40 * SECOND),
        RunEnded(reason="finished"),
        MetricReported(generation="g", epoch=0, step=0, elapsed_us=1),
        started("h", step=step),
    ]
    for generation in ("f", "g"):
        events += [
            started(generation, step=step),
            WorkerLost(generation=generation, rank=0, reason="killed"),
            TelemetryGap(generation=generation, last_step=0, waited_us=1),
            DrainNoticed(generation=generation, ranks=(0,), left_us=None, reason="drained"),
            SaveAsked(generation=generation, reason="by hand"),
            IncidentReported(generation=generation, rank=0, step=0, kind="storage", message="it was full"),
            MemoryLimited(generation=generation, rank=0, step=0, device="T4", num_rows=64),
            ScheduleReported(generation=generation, epoch=0, step=0, cursor=0, num_epochs=3, learning_rate=0.1),
            *(step_of(step, v, generation=generation) for v in (version - 1, version, version + 7)),
        ]
    for search_id in (*controller.state.searches, "unknown"):
        events += [
            TrialProposed(search_id=search_id, trial=0, local_batch_sizes=(8, 24)),
            SearchFinished(search_id=search_id, local_batch_sizes=(8, 24), objective=-1.0),
            SearchFailed(search_id=search_id, reason="no"),
        ]
    return events


def test_every_pair_of_phase_and_event_is_reached_and_leads_where_the_model_says_and_nowhere_else():
    assert {phase: set(events) for phase, events in MODEL.items()} == {p: set(e) for p, e in TRANSITIONS.items()}
    reached = {phase: {event: set() for event in events} for phase, events in MODEL.items()}
    for phase in MODEL:
        for number in range(len(events_for(controller_in(phase)))):
            for answer in (None, move(24, 8)):
                controller = controller_in(phase)
                controller._rules.policy.answer = answer
                event = events_for(controller)[number]
                assert type(controller.phase) is phase
                if phase is Ended:
                    before = snapshot(controller)
                    with pytest.raises(IllegalEventError):
                        controller.handle(event)
                    assert snapshot(controller) == before
                    continue
                controller.handle(event)
                assert type(controller.phase) in MODEL[phase][type(event)], (phase, event)
                reached[phase][type(event)].add(type(controller.phase))
    # After its own loss a group that is superseded stays out, too.
    controller = controller_in(Starting)
    controller.handle(WorkerLost(generation="g", rank=0, reason="killed"))
    controller.handle(started("f"))
    reached[Waiting][GroupStarted].add(type(controller.phase))
    assert reached == MODEL


def test_a_group_whose_place_was_taken_does_not_take_it_back_and_a_lost_one_may_come_back():
    controller = Controller(Restless())
    for generation in ("f", "g"):
        controller.handle(started(generation))
    assert controller.handle(started("f")) == ()
    assert controller.phase.group.generation == "g"
    assert controller.state.dropped == {"GroupStarted of an earlier group": 1}
    controller.handle(WorkerLost(generation="g", rank=0, reason="said by mistake"))
    assert len(allocations_in(controller.handle(started("g")))) == 1
    for number in range(100):
        controller.handle(started(f"h{number}"))
    assert len(controller.state.earlier) <= 16


class AnyRun(RuleBasedStateMachine):
    """Any sequence of events from a group that takes up allocations late, twice, or not at all."""

    def __init__(self):
        super().__init__()
        self.controller = Controller(Restless(), seed=3)
        self.events: list[Event] = []
        self.commands: list[Sequence[Command]] = []
        self.generation, self.num_workers, self.step, self.now_us = "none", 2, 0, 0
        self.running_version, self.published = 0, {}
        self.snapshots: list[tuple[int, str]] = []
        self.earlier: list[str] = []

    def tell(self, event: Event) -> Sequence[Command]:
        before = type(self.controller.phase)
        commands = self.controller.handle(event)
        assert type(self.controller.phase) in MODEL[before][type(event)]
        self.events.append(event)
        self.commands.append(commands)
        for command in commands:
            if isinstance(command, ApplyAllocation):
                assert command.generation == self.generation
                known = self.published.setdefault(command.allocation.version, command.allocation)
                assert known == command.allocation, "a version never changes its meaning"
                assert command.allocation.version <= max(self.published)
        return commands

    @rule(num_workers=st.integers(1, 4))
    def group_starts(self, num_workers):
        if self.generation != "none":
            self.earlier = [*self.earlier, self.generation][-16:]
        self.generation, self.num_workers = f"g{len(self.events)}", num_workers
        first = max(self.published, default=0) + 1
        self.tell(started(self.generation, num_workers=num_workers, step=self.step))
        assert max(self.published) == first
        self.running_version = first

    def run_step(self, version, generation=None):
        rows = self.published[version].local_batch_sizes if version in self.published else (1,) * self.num_workers
        rows = rows if len(rows) == self.num_workers else (1,) * self.num_workers
        self.tell(
            step_of(
                self.step,
                version,
                generation=generation or self.generation,
                rows=rows,
                own_us=[1000 * count + 10 for count in rows],
            )
        )
        self.step += 1

    @rule()
    def step_under_what_runs(self):
        self.run_step(self.running_version)

    @rule(data=st.data())
    def switch_and_step(self, data):
        later = [version for version in self.published if version >= self.running_version]
        if later:
            self.running_version = data.draw(st.sampled_from(later))
        self.run_step(self.running_version)

    @rule(version=st.integers(0, 3))
    def step_of_an_odd_version(self, version):
        self.run_step(version + max(self.published, default=0) * (version > 1))

    @rule()
    def step_of_another_group(self):
        self.run_step(self.running_version, generation="another")

    @rule(seconds=st.sampled_from([0, 1, 2, 31, 100]))
    def time_passes(self, seconds):
        self.now_us += seconds * SECOND
        self.tell(Ticked(now_us=self.now_us))

    @rule(stale=st.booleans())
    def worker_is_lost(self, stale):
        self.tell(WorkerLost(generation="another" if stale else self.generation, rank=0, reason="drawn"))

    @rule()
    def telemetry_is_missing(self):
        self.tell(TelemetryGap(generation=self.generation, last_step=self.step, waited_us=10 * SECOND))

    @rule(data=st.data())
    def an_earlier_group_asks(self, data):
        if self.earlier:
            before = self.controller.phase
            assert self.tell(started(data.draw(st.sampled_from(self.earlier)), step=self.step)) == ()
            assert self.controller.phase == before

    @rule()
    def the_group_asks_again(self):
        if isinstance(self.controller.phase, Starting | Running | Switching):
            (again,) = allocations_in(self.tell(started(self.generation, num_workers=self.num_workers)))
            assert again.version == max(self.published)

    @rule(stale=st.booleans(), kind=st.sampled_from(QUIET[:3]))
    def something_is_told(self, stale, kind):
        generation = "another" if stale else self.generation
        told = {
            DrainNoticed: {"ranks": (0,), "left_us": 1, "reason": "drained"},
            IncidentReported: {"rank": 0, "step": self.step, "kind": "storage", "message": "it was full"},
            MemoryLimited: {"rank": 0, "step": self.step, "device": "T4", "num_rows": 64},
        }
        self.tell(kind(generation=generation, **told[kind]))

    @rule(end=st.sampled_from([SearchFailed(search_id="?", reason="no"), None]))
    def a_stale_search_speaks(self, end):
        self.tell(end or TrialProposed(search_id="?", trial=0, local_batch_sizes=(1,) * self.num_workers))

    @rule()
    def metric_is_reported(self):
        self.tell(MetricReported(generation=self.generation, epoch=0, step=self.step, elapsed_us=1, metrics={"a": 0.5}))

    @rule()
    def snapshot_is_taken(self):
        self.snapshots.append((len(self.events), snapshot(self.controller)))

    @precondition(lambda self: self.step > 0 and isinstance(self.controller.phase, Running | Switching | Starting))
    @rule()
    def illegal_step_is_refused(self):
        before = snapshot(self.controller)
        if self.controller.state.last_step >= 0:
            event = step_of(
                0, 1, generation=self.generation, rows=(1,) * self.num_workers, own_us=(1,) * self.num_workers
            )
            with pytest.raises(IllegalEventError):
                self.controller.handle(event)
        assert snapshot(self.controller) == before

    @invariant()
    def at_most_one_allocation_is_under_way(self):
        phase = self.controller.phase
        if isinstance(phase, Switching):
            assert phase.pending.allocation.version == max(self.published)
            assert phase.allocation.version < phase.pending.allocation.version
            assert (phase.withdrawn is None) or phase.pending.withdraws

    @invariant()
    def the_policy_knows_what_runs(self):
        phase = self.controller.phase
        if isinstance(phase, Running | Switching):
            assert self.controller.state.policy_state == phase.allocation.local_batch_sizes

    def teardown(self):
        """Replay, whole and from every snapshot: the same commands, the same memory."""
        for first, written in [(0, snapshot(Controller(Restless(), seed=3))), *self.snapshots]:
            again = Controller(Restless(), seed=3)
            again.restore(CODEC.decode(json.loads(written)))
            assert [again.handle(event) for event in self.events[first:]] == self.commands[first:]
            assert snapshot(again) == snapshot(self.controller)


AnyRun.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestAnyRun = AnyRun.TestCase
