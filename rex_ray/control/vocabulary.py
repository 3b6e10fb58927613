"""The closed list of what a journal may hold."""

from __future__ import annotations

from rex_ray.control import commands, events, notes, phases
from rex_ray.control.codec import Codec
from rex_ray.core import curves, memory, row_limits, search_problem, step_time, types
from rex_ray.policies import (
    base,
    composition,
    dlb,
    rollback,
    seams,
    wrappers,
)
from rex_ray.policies.growth import blocks, health, pace, pool
from rex_ray.policies.growth import state as growth_state
from rex_ray.policies.search import state as search_state
from rex_ray.policies.split import affine, fixed, moving, probing, runs, spline, throughput, windowed
from rex_ray.policies.trigger import baseline as trigger_baseline
from rex_ray.policies.trigger import memory as trigger_memory

__all__ = ["CODEC"]

CODEC = Codec(
    [
        # core
        types.Allocation,
        types.Problem,
        types.StepFlag,
        types.WorkerSpec,
        curves.StepTimeCurve,
        memory.KindMemory,
        memory.MemoryBook,
        row_limits.RowLimits,
        search_problem.SearchProblem,
        step_time.LearntShape,
        step_time.StepTimeBook,
        # events
        events.DrainNoticed,
        events.GroupStarted,
        events.IncidentReported,
        events.MemoryLimited,
        events.MetricReported,
        events.RunEnded,
        events.SaveAsked,
        events.ScheduleReported,
        events.SearchFailed,
        events.SearchFinished,
        events.StepObserved,
        events.TelemetryGap,
        events.Ticked,
        events.TrialProposed,
        events.WorkerLost,
        # commands
        commands.ApplyAllocation,
        commands.CancelSearch,
        commands.RequestCheckpoint,
        commands.RequestWorldSize,
        commands.StartSearch,
        commands.TellTrial,
        # notes
        notes.Applied,
        notes.Decided,
        notes.Deferred,
        notes.Dropped,
        notes.Found,
        notes.Measured,
        notes.Refused,
        notes.Withdrawn,
        # the controller's memory
        phases.ControllerState,
        phases.Ended,
        phases.Gauge,
        phases.Group,
        phases.Publication,
        phases.Running,
        phases.Starting,
        phases.Switching,
        phases.Waiting,
        # the policies' memories
        base.ChangeGlobalBatch,
        base.Finding,
        base.Proposal,
        base.Reallocate,
        composition.CompositionState,
        dlb.EpochSplitState,
        blocks.NoiseBlocks,
        health.Health,
        pace.BatchTrial,
        pace.Pace,
        pool.FadingLine,
        pool.NoisePool,
        growth_state.GrowthState,
        spline.SplineSplitState,
        affine.AffineState,
        fixed.EqualSplitState,
        moving.MoveMemory,
        runs.RunLog,
        runs.ShareRun,
        throughput.ThroughputSample,
        throughput.ThroughputState,
        windowed.WindowedState,
        probing.ProbingState,
        rollback.RollBackState,
        search_state.AskedSearch,
        search_state.Candidate,
        search_state.Duel,
        search_state.Patience,
        search_state.Placing,
        search_state.Quest,
        search_state.SearchLedger,
        search_state.SearchState,
        search_state.ShareWatch,
        search_state.TimedTrial,
        search_state.Vouched,
        seams.BatchPlan,
        seams.Shares,
        trigger_baseline.Baseline,
        trigger_memory.Footing,
        trigger_memory.Limits,
        trigger_memory.Past,
        trigger_memory.TriggerState,
        trigger_memory.Watch,
        wrappers.CooldownState,
    ]
)
"""Writes and reads every value of ours; a new class of state is added here, or writing it fails at once."""
