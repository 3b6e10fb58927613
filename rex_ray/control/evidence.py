"""What a complete step does: evidence for the policy, and the only proof that an allocation was applied."""

from __future__ import annotations

import statistics
from dataclasses import replace

from rex_ray.control.decisions import ask
from rex_ray.control.events import StepObserved
from rex_ray.control.notes import Applied, Measured, Note
from rex_ray.control.outcome import Outcome, Rules, drop
from rex_ray.control.phases import ControllerState, Gauge, Publication, Running, Starting, Switching
from rex_ray.core.changed import changed
from rex_ray.core.errors import IllegalEventError
from rex_ray.core.observations import AllocationApplied
from rex_ray.core.types import StepFlag

__all__ = ["observe_step"]

_FEWEST_BEFORE = 4
"""Steps before a switch that stand for the old shares, even where it was taken up sooner."""


def observe_step(rules: Rules, state: ControllerState, event: StepObserved) -> Outcome:
    """A complete step: evidence, and the only proof that an allocation was applied."""
    phase = state.phase
    assert isinstance(phase, Starting | Running | Switching)
    if event.generation != phase.group.generation:
        return drop(state, "StepObserved of another group")
    if event.step <= state.last_step:
        raise IllegalEventError(f"step {event.step} came after step {state.last_step}: steps must come in order")
    if len(event.num_rows) != phase.group.problem.num_workers:
        raise IllegalEventError(
            f"step {event.step} has {len(event.num_rows)} ranks in a group of {phase.group.problem.num_workers}"
        )
    if not isinstance(phase, Starting) and event.allocation_version == phase.allocation.version:
        return _judge_step(rules, state, event)
    if isinstance(phase, Starting | Switching) and event.allocation_version == phase.pending.allocation.version:
        running = Running(group=phase.group, allocation=phase.pending.allocation)
        return _apply(rules, state, event, running, phase.pending).then(lambda now: _judge_step(rules, now, event))
    if (
        isinstance(phase, Switching)
        and (late := phase.withdrawn)
        and event.allocation_version == late.allocation.version
    ):
        # Taken up too late: true all the same, until what withdraws it is applied in its turn.
        still = replace(phase, allocation=late.allocation, withdrawn=None)
        return _apply(rules, state, event, still, late).then(lambda now: _judge_step(rules, now, event))
    return drop(state, "StepObserved of an unknown version")


def _apply(
    rules: Rules, state: ControllerState, event: StepObserved, phase: Running | Switching, published: Publication
) -> Outcome:
    """The first complete step under what was published: it is applied, and measured against what was before."""
    assert isinstance(state.phase, Starting | Switching)
    old_rows = state.phase.allocation.global_batch_size if isinstance(state.phase, Switching) else 0
    lag_steps = event.step - published.decided_step
    # What called for the change was at work by the time it was decided; before that, it may not have been.
    past = state.gauge.slowest_us[-max(_FEWEST_BEFORE, lag_steps) :]
    is_same = isinstance(state.phase, Switching) and (
        state.phase.allocation.local_batch_sizes == phase.allocation.local_batch_sizes
    )
    # Another learning rate alone leaves the times what they were, and what is being measured of them under way.
    gauge = (
        state.gauge
        if is_same
        else Gauge(
            before_us=int(statistics.median(past)) if past and old_rows else None,
            before_rows=old_rows,
            version=phase.allocation.version,
            predicted_gain=published.predicted_gain,
        )
    )
    applied = Applied(
        step=event.step,
        version=phase.allocation.version,
        local_batch_sizes=phase.allocation.local_batch_sizes,
        lag_steps=lag_steps,
    )
    # Here and not at every step: only another allocation has a rank run other rows, but for an epoch's tail.
    row_limits = state.row_limits.with_run(phase.group.problem.workers, event.num_rows.tolist())
    now = replace(state, phase=phase, gauge=gauge, unheeded={}, row_limits=row_limits)
    told = ask(rules, now, AllocationApplied(allocation=phase.allocation, step=event.step))
    return replace(told, notes=(applied, *told.notes))


def _judge_step(rules: Rules, state: ControllerState, event: StepObserved) -> Outcome:
    gauge: Gauge = state.gauge
    notes: tuple[Note, ...] = ()
    if event.flags == StepFlag.NONE:
        gauge, notes = _gauge(rules, state, event)
    told = ask(rules, state, event, last_step=event.step, step_us=int(event.step_us.max()), gauge=gauge)
    return replace(told, notes=(*notes, *told.notes)) if notes else told


def _gauge(rules: Rules, state: ControllerState, event: StepObserved) -> tuple[Gauge, tuple[Note, ...]]:
    """Take in a clean step; once there are enough since a change, say what it brought."""
    gauge = state.gauge
    slowest_us = (*gauge.slowest_us[1 - rules.gauge_steps :], int(event.own_us.max()))
    if gauge.before_us is None or len(slowest_us) < rules.gauge_steps:
        return changed(gauge, slowest_us=slowest_us), ()
    after_us = int(statistics.median(slowest_us))
    per_row = (after_us / max(1, int(event.num_rows.sum()))) / (max(1, gauge.before_us) / gauge.before_rows)
    measured = Measured(
        step=event.step,
        version=gauge.version,
        before_us=gauge.before_us,
        after_us=after_us,
        gain=1.0 - per_row,
        predicted_gain=gauge.predicted_gain,
    )
    return Gauge(slowest_us=slowest_us), (measured,)
