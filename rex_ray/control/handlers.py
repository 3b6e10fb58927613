"""What each event but a step does: pure functions of rules, state and event. ``controller`` has the table of them.

A handler that raises has changed nothing: the new state is a value that it did not get to return.
"""

from __future__ import annotations

from dataclasses import replace

from rex_ray.control.codec import CodecError
from rex_ray.control.commands import ApplyAllocation, Command, RequestCheckpoint
from rex_ray.control.decisions import ask, cancel_searches, fault_of, publish, publish_command
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
    TelemetryGap,
    Ticked,
    TrialProposed,
    WorkerLost,
)
from rex_ray.control.notes import Decided, Withdrawn
from rex_ray.control.outcome import Outcome, Rules, drop
from rex_ray.control.phases import (
    ControllerState,
    Ended,
    Gauge,
    Group,
    Publication,
    Running,
    Starting,
    Switching,
    Waiting,
)
from rex_ray.control.remembered import remembered
from rex_ray.core.changed import changed
from rex_ray.core.errors import IllegalEventError, InfeasibleError
from rex_ray.core.observations import SearchResult, TrialRequested
from rex_ray.core.types import Allocation
from rex_ray.policies.base import Proposal
from rex_ray.policies.limits import equal_shares, resumed_shares, whole_rows

__all__ = [
    "begin_group",
    "drop_event",
    "end_run",
    "end_search",
    "limit_memory",
    "lose_worker",
    "miss_telemetry",
    "note_metric",
    "remind_group",
    "request_save",
    "request_trial",
    "tell_time",
]

_REMEMBERED_GROUPS = 16


def begin_group(rules: Rules, state: ControllerState, event: GroupStarted) -> Outcome:
    """A group formed: ask the policy for its first allocation and publish it."""
    phase = state.phase
    if isinstance(phase, Starting | Running | Switching) and phase.group.generation == event.generation:
        return _answer_again(state, phase)
    if event.generation in state.earlier:
        return drop(state, "GroupStarted of an earlier group")
    event = replace(event, problem=state.row_limits.within(event.problem))
    if fault := state.row_limits.fault_of(event.problem):
        raise InfeasibleError(fault)
    first, policy_state = rules.policy.init(event.problem, _prior(rules, state, event), event.allocation)
    if rules.mode == "advise":
        first = _unadvised(event, first)
    if fault := fault_of(first, event.problem):
        raise InfeasibleError(f"policy {rules.policy.name!r} cannot begin: {fault}")
    version = max(state.next_version, 1 + (event.allocation.version if event.allocation else 0))
    allocation = Allocation(version=version, local_batch_sizes=first.local_batch_sizes, lr_factor=first.lr_factor)
    group = Group(generation=event.generation, problem=event.problem, first_version=version)
    pending = Publication(
        allocation=allocation,
        reason=_first_reason(event, first),
        decided_step=event.step - 1,
        first_us=state.now_us,
        last_us=state.now_us,
    )
    begun = replace(
        _without_searches(state),
        phase=Starting(group=group, pending=pending),
        next_version=version + 1,
        last_step=event.step - 1,
        step_us=0,
        policy_state=policy_state,
        last_reason=pending.reason,
        unheeded={},
        gauge=Gauge(),
        last_generation=event.generation,
        earlier=_superseded(state, event.generation),
    )
    decided = Decided(step=event.step - 1, kind="first", reason=pending.reason, version=version, proposal=first)
    cancelled: tuple[Command, ...] = cancel_searches(state, "another worker group formed")
    return Outcome(state=begun, commands=(*cancelled, publish_command(group, pending)), notes=(decided,))


def _prior(rules: Rules, state: ControllerState, event: GroupStarted) -> object | None:
    """What the policy begins with: its own memory, else that of an earlier life of the run."""
    if state.policy_state is not None or event.memory is None:
        return state.policy_state
    try:
        return remembered(rules.policy, event.memory, event.problem.global_batch_size)
    except CodecError:
        return None  # whoever read it has said so; a controller that must learn anew is no fault


def _superseded(state: ControllerState, generation: str) -> tuple[str, ...]:
    """The groups whose place was taken, the newest last: one of them that asks late must not take it back.

    A group that was only lost is none of them yet: perhaps it was not lost after all.
    """
    last = state.last_generation
    earlier = state.earlier if last in (None, generation) else (*state.earlier, last)
    return earlier[-_REMEMBERED_GROUPS:]


def _first_reason(event: GroupStarted, first: Proposal) -> str:
    resumed, rows = event.allocation, first.global_batch_size
    if resumed is None:
        return "first allocation of the group"
    if rows == resumed.global_batch_size:
        return f"first allocation of the group: the {rows} rows resumed from are kept"
    return (
        f"first allocation of the group: {rows} rows, since it cannot run the {resumed.global_batch_size} rows "
        f"resumed from, learning rate x{first.lr_factor:.4g} instead of x{resumed.lr_factor:.4g}"
    )


def _unadvised(event: GroupStarted, advised: Proposal) -> Proposal:
    """What a group runs that only wants advice: what it resumes from, else equal shares of the reference batch.

    A batch that grew in a larger group is cut as the policy says: this one may not hold it.
    """
    current = event.allocation
    if current is None:
        return Proposal(local_batch_sizes=equal_shares(event.problem, event.problem.global_batch_size))
    is_cut = advised.global_batch_size < current.global_batch_size
    rows = advised.global_batch_size if is_cut else whole_rows(event.problem, current.global_batch_size)
    shares = resumed_shares(event.problem, current, rows) or equal_shares(event.problem, rows)
    return Proposal(local_batch_sizes=shares, lr_factor=advised.lr_factor if is_cut else current.lr_factor)


def _answer_again(state: ControllerState, phase: Starting | Running | Switching) -> Outcome:
    """The group asked twice (an answer was lost): the newest allocation once more, nothing begins anew."""
    if isinstance(phase, Starting | Switching):
        return Outcome(state=state, commands=(publish_command(phase.group, phase.pending),))
    command = ApplyAllocation(
        generation=phase.group.generation, allocation=phase.allocation, reason="the group asked again"
    )
    return Outcome(state=state, commands=(command,))


def lose_worker(rules: Rules, state: ControllerState, event: WorkerLost) -> Outcome:
    """A rank died: nothing that the group still sends is evidence, and no switch of it will complete."""
    if event.generation != _generation(state):
        return drop_event(rules, state, event)
    waiting = Waiting(reason=f"rank {event.rank} was lost: {event.reason}")
    commands = cancel_searches(state, waiting.reason)
    return Outcome(state=replace(_without_searches(state), phase=waiting, gauge=Gauge()), commands=commands)


def request_save(rules: Rules, state: ControllerState, event: DrainNoticed | SaveAsked) -> Outcome:
    """The group is to save: somebody asks for it, or what was trained since the last save is about to be lost."""
    if event.generation != _generation(state):
        return drop_event(rules, state, event)
    reason = event.reason if isinstance(event, SaveAsked) else _farewell(event)
    command = RequestCheckpoint(generation=event.generation, number=state.num_events, reason=reason)
    return Outcome(state=state, commands=(command,))


def _farewell(event: DrainNoticed) -> str:
    when = "soon" if event.left_us is None else f"in {event.left_us / 1e6:.0f} s"
    who = f"rank{'s' if len(event.ranks) > 1 else ''} {', '.join(map(str, event.ranks))}"
    return f"{who} will be taken away {when} ({event.reason})"


def end_run(_: Rules, state: ControllerState, event: RunEnded) -> Outcome:
    """The run is over; its searches have nothing left to improve."""
    commands = cancel_searches(state, "the run ended")
    return Outcome(state=replace(_without_searches(state), phase=Ended(reason=event.reason)), commands=commands)


def note_metric(
    _: Rules, state: ControllerState, event: MetricReported | IncidentReported | ScheduleReported
) -> Outcome:
    """Metrics, incidents and schedules are for the journal; no decision depends on them."""
    del event
    return Outcome(state=state)


def limit_memory(_: Rules, state: ControllerState, event: MemoryLimited) -> Outcome:
    """A worker ran out of memory: what the present group runs it will not run for long, the next one keeps off it."""
    return Outcome(state=replace(state, row_limits=state.row_limits.with_failure(event.device, event.num_rows)))


def drop_event(_: Rules, state: ControllerState, event: Event) -> Outcome:
    """No evidence: it belongs to no group, or to one that is gone."""
    return drop(state, f"{type(event).__name__} of another group")


def tell_time(_: Rules, state: ControllerState, event: Ticked) -> Outcome:
    """Time passed, and nothing waits for it."""
    return Outcome(state=_at(state, event))


def remind_group(rules: Rules, state: ControllerState, event: Ticked) -> Outcome:
    """Time passed during a switch: publish again what may be lost, take back what is not taken up."""
    state = _at(state, event)
    phase = state.phase
    assert isinstance(phase, Starting | Switching)
    pending = phase.pending
    if isinstance(phase, Switching) and not pending.withdraws:
        waited_us = state.now_us - pending.first_us
        if waited_us >= max(rules.withdraw_after_us, rules.withdraw_after_steps * state.step_us):
            return _withdraw(state, phase, waited_us)
    if state.now_us - pending.last_us < rules.republish_after_us:
        return Outcome(state=state)
    again = replace(phase, pending=replace(pending, last_us=state.now_us))
    return Outcome(state=replace(state, phase=again), commands=(publish_command(phase.group, pending),))


def _withdraw(state: ControllerState, phase: Switching, waited_us: int) -> Outcome:
    old = Proposal(local_batch_sizes=phase.allocation.local_batch_sizes, lr_factor=phase.allocation.lr_factor)
    late = phase.pending
    reason = f"allocation {late.allocation.version} was not taken up within {waited_us / 1e6:.0f} s"
    note = Withdrawn(
        step=state.last_step, version=late.allocation.version, by_version=state.next_version, waited_us=waited_us
    )
    return replace(publish(state, phase, old, reason=reason, withdrawn=late), notes=(note,))


def miss_telemetry(rules: Rules, state: ControllerState, event: TelemetryGap) -> Outcome:
    """No complete step for a while: the policy is told that its evidence is old."""
    return ask(rules, state, event) if event.generation == _generation(state) else drop_event(rules, state, event)


def end_search(rules: Rules, state: ControllerState, event: SearchFinished | SearchFailed) -> Outcome:
    """A search ended: its candidate is shown to the policy, which judges it like its own."""
    if event.search_id not in state.searches:
        return drop(state, "result of a stale search")
    if isinstance(event, SearchFinished):
        result = SearchResult(
            search_id=event.search_id,
            local_batch_sizes=event.local_batch_sizes,
            objective=event.objective,
            reason="the search finished",
        )
    else:
        result = SearchResult(search_id=event.search_id, local_batch_sizes=None, objective=None, reason=event.reason)
    remaining = tuple(search_id for search_id in state.searches if search_id != event.search_id)
    return ask(rules, replace(state, searches=remaining), result)


def request_trial(rules: Rules, state: ControllerState, event: TrialProposed) -> Outcome:
    """A search wants a candidate measured: the policy decides whether it is run."""
    if event.search_id not in state.searches:
        return drop(state, "trial of a stale search")
    request = TrialRequested(search_id=event.search_id, trial=event.trial, local_batch_sizes=event.local_batch_sizes)
    return ask(rules, state, request)


def _at(state: ControllerState, event: Ticked) -> ControllerState:
    if event.now_us < state.now_us:
        raise IllegalEventError(f"time went back from {state.now_us} to {event.now_us} microseconds")
    return changed(state, now_us=event.now_us)


def _generation(state: ControllerState) -> str | None:
    return state.phase.group.generation if isinstance(state.phase, Starting | Running | Switching) else None


def _without_searches(state: ControllerState) -> ControllerState:
    return replace(state, searches=()) if state.searches else state
