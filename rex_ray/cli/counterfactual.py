"""What a run would have been under other policies: an estimate, played by the engine in the run's fitted world."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rex_ray.cli.fitted_world import NOWHERE, FittedWorld
from rex_ray.control.journal import Header
from rex_ray.control.replay import controller_for
from rex_ray.core.errors import ConfigError, InfeasibleError
from rex_ray.core.types import FloatArray, IntArray, read_only
from rex_ray.report.computing.equal import allocated_rows
from rex_ray.report.computing.run_curves import GroupTimes, RunCurves, fit_run
from rex_ray.report.facts import Estimate
from rex_ray.report.reading.schema import NoiseSeries, RunData
from rex_ray.scenario import LearningCurve
from rex_ray.sim import Scenario, SimulatedRun, StepNorms, TraceLearner, simulate
from rex_ray.sim.gradients import NoisyGradients

__all__ = ["OTHERS", "counterfactuals"]

OTHERS = ("bsp", "dlb", "lb_bsp", "pollux", "rex")
"""Policies that a run is compared with, with their default options."""

_MOST_WORKER_STEPS, _FEWEST_STEPS = 10_000, 400
"""What one replay may play. Five policies by three seeds of it take some ten seconds of one processor core."""

_PATIENCE = 1.5
"""Times the run's own steps that a policy may take; what is left then is taken at its later pace."""

_LAG_STEPS = 10


def counterfactuals(run: RunData, header: Header, *, seeds: Sequence[int] = (0, 1, 2)) -> tuple[Estimate, ...]:
    """Estimate the run's time under its own policy, replayed, and under ``OTHERS``; nothing where it has no curves.

    Args:
        run: the run.
        header: its journal's first header: policy, options, mode.
        seeds: of the controller, and of which steps' noise falls on which step.

    Returns:
        Own policy first. Own times are never measurements either: how far the replay of the run's own policy is from
        the run is what the method is worth on it.
    """
    curves = fit_run(run)
    if curves is None:
        return ()
    played = _Replays(run=run, curves=curves, seeds=tuple(seeds))
    own = replace(header, first_event=0, driver=0)
    others = [Header(seed=header.seed, mode="auto", policy=name) for name in OTHERS if name != header.policy]
    found = [played.estimate(own, None), *(played.estimate(other, header.policy) for other in others)]
    reference = next((estimate.seconds for estimate in found if estimate is not None), None)
    if found[0] is None or reference is None:
        return ()
    return tuple(replace(one, to_run=one.seconds / reference) for one in found if one is not None)


@dataclass(slots=True, kw_only=True, eq=False)
class _Replays:
    run: RunData
    curves: RunCurves
    seeds: tuple[int, ...]
    world: FittedWorld = field(init=False)
    learning: LearningCurve | None = field(init=False)
    target_rows: float = field(init=False)
    times: float = field(init=False)

    def __post_init__(self) -> None:
        group = max(self.curves.groups, key=lambda one: len(one.data.steps))
        assert group.data.problem is not None, "a journal's group has its problem"
        num_steps = len(group.data.steps)
        played = min(num_steps, max(_FEWEST_STEPS, _MOST_WORKER_STEPS // group.data.num_workers))
        places = _stretch(group, played)
        problem, rows = group.data.problem, group.data.num_rows.sum(axis=1)
        self.times = 1.0
        if played < num_steps:
            # The first half is the start and counts once, the second stands for the whole rest.
            self.times = (num_steps - played // 2) / (played - played // 2)
        lags = [row.lag_steps for row in self.run.decisions if row.lag_steps is not None and row.kind != "first"]
        self.world = FittedWorld(
            curves=self.curves,
            group=group,
            places=places,
            problem=problem if problem.dataset_size is not None else replace(problem, dataset_size=int(rows.sum())),
            switch_lag_steps=max(1, round(statistics.median(lags))) if lags else _LAG_STEPS,
        )
        self.learning = _learning(group, self.run.noise, played / num_steps)
        if self.learning is None:
            self.target_rows = float(rows[places].sum())
        else:
            self.target_rows = self.learning.target_rows

    def estimate(self, header: Header, own: str | None) -> Estimate | None:
        """Play a policy on every seed; None where it cannot run here at all."""
        totals: list[float] = []
        done = 1.0
        for seed in self.seeds:
            try:
                seconds, share = self._play(replace(header, seed=header.seed + seed), self.world.scenario(seed), seed)
            except (ConfigError, InfeasibleError):
                # A policy or an option of another version, or a batch that its rules cannot share out.
                return None
            totals.append(seconds)
            done = min(done, share)
        return Estimate(
            policy=header.policy,
            seconds=statistics.median(totals),
            low_s=min(totals),
            high_s=max(totals),
            to_run=1.0,
            num_replays=len(totals),
            remark=self._remark(header.policy, own, done),
        )

    def _play(self, header: Header, scenario: Scenario, seed: int) -> tuple[float, float]:
        """Return the seconds to the run's progress, and the share of it that was played."""
        learner: _Rows | TraceLearner = _Rows(target_rows=self.target_rows)
        if self.learning is not None:
            learner = TraceLearner(
                learning=self.learning,
                reference_batch_size=self.world.problem.global_batch_size,
                gradients=NoisyGradients(seed=seed),
            )
        most = math.ceil(_PATIENCE * len(self.world.places))
        trail = _Trail(learner=learner)
        played = simulate(controller_for(header), scenario, num_steps=most, learner=trail, keep="figures")
        return self._whole_s(played, trail), min(1.0, trail.progress_rows[-1] / self.target_rows)

    def _whole_s(self, played: SimulatedRun, trail: _Trail) -> float:
        """Return the seconds to all of the progress, its second half counted as often as it stands for."""
        made, at_s = np.array(trail.progress_rows), np.cumsum(played.step_s)
        total_s = played.total_s
        at_s *= total_s / at_s[-1]  # what the run was charged beside its steps is spread over them
        if not trail.is_done:
            # Cut off where it stands, a policy of small batches would pass for one that is as fast as the run.
            middle = (len(made) - 1) // 2
            pace = (made[-1] - made[middle]) / (at_s[-1] - at_s[middle])
            total_s += float((self.target_rows - made[-1]) / pace)
            made, at_s = np.append(made, self.target_rows), np.append(at_s, total_s)
        half_s = float(np.interp(self.target_rows / 2, made, at_s))
        return half_s + self.times * (total_s - half_s)

    def _remark(self, policy: str, own: str | None, done: float) -> str:
        said = []
        group = self.world.group
        if own is None:
            took = float(group.data.step_s.sum())
            said.append(f"the run's own policy, replayed; the steps themselves took {took:.1f} s")
        if len(self.curves.groups) > 1:
            said.append("the longest worker group only")
        if self.times > 1:
            said.append(
                f"from {len(self.world.places):,} of {len(group.data.steps):,} steps: the start and a later part"
            )
        if done < 1.0:
            said.append(f"played to {done:.0%} of the run's progress, the rest at its later pace")
        if policy != "bsp" and any(kind.sizes.keys[-1] < 1.3 * kind.sizes.keys[0] for kind in self.curves.kinds):
            said.append("some kind ran about one size only, so its curve at others is a guess")
        if self.learning is None and policy == "pollux":
            said.append("without measured gradient noise it never changes its batch")
        return "; ".join(said)


@dataclass(slots=True, kw_only=True)
class _Rows:
    """Progress counted in rows, where no gradient noise was measured."""

    target_rows: float
    progress_rows: float = 0.0

    @property
    def is_done(self) -> bool:
        return self.progress_rows >= self.target_rows

    def norms(self, step: int, num_rows: Sequence[int]) -> StepNorms | None:
        del step, num_rows
        return None

    def advance(self, num_rows: int, lr_factor: float) -> None:
        del lr_factor
        self.progress_rows += num_rows


@dataclass(slots=True, kw_only=True)
class _Trail:
    """A learner that remembers the progress after every step."""

    learner: _Rows | TraceLearner
    progress_rows: list[float] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.learner.is_done

    def norms(self, step: int, num_rows: Sequence[int]) -> StepNorms | None:
        return self.learner.norms(step, num_rows)

    def advance(self, num_rows: int, lr_factor: float) -> None:
        self.learner.advance(num_rows, lr_factor)
        self.progress_rows.append(self.learner.progress_rows)


def _stretch(group: GroupTimes, count: int) -> IntArray:
    """Return the places of ``count`` steps that stand for all: the first ones, and those most like the mean after."""
    num_steps = len(group.data.steps)
    if count >= num_steps:
        return np.arange(num_steps)
    first, later = count // 2, count - count // 2
    slow = np.concatenate([[0.0], np.cumsum(np.log(group.level).mean(axis=1))])
    starts = np.arange(first, num_steps - later + 1)
    mean = (slow[num_steps] - slow[first]) / (num_steps - first)
    nearest = int(starts[np.argmin(np.abs((slow[starts + later] - slow[starts]) / later - mean))])
    return np.concatenate([np.arange(first), np.arange(nearest, nearest + later)])


def _learning(group: GroupTimes, noise: NoiseSeries | None, share: float) -> LearningCurve | None:
    """Return how the run's noise scale went with its progress, ``share`` of it; None where it was not measured."""
    if noise is None or not np.isfinite(noise.noise_scale).any() or group.data.problem is None:
        return None
    known = np.isfinite(noise.noise_scale)
    at, phi = noise.steps[known].astype(np.float64), np.maximum(noise.noise_scale[known], 1.0)
    reference = group.data.problem.global_batch_size
    rows = group.data.num_rows.sum(axis=1)
    scale: FloatArray = np.exp(np.interp(group.data.steps, at, np.log(phi)))
    made = np.cumsum(rows * (scale + reference) / (scale + np.minimum(rows, allocated_rows(group.data))))
    picked = np.unique(np.linspace(0, len(rows) - 1, 200).astype(np.int64))
    progress = np.concatenate([[0.0], made[picked]]) * share
    return LearningCurve(
        workload="measured",
        target="the run's own progress",
        dataset_size=group.data.problem.dataset_size or int(rows.sum()),
        reference_batch_size=reference,
        progress_rows=read_only(progress, np.float64),
        noise_scale=read_only(np.concatenate([scale[:1], scale[picked]]), np.float64),
        measured_batch_sizes=(),
        measured_epochs=(),
        source=NOWHERE,
    )
