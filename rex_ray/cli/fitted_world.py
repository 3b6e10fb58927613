"""A recorded run's worker group as a world for the engine: fitted curves, and speeds and noise step by step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rex_ray.core.types import FloatArray, IntArray, Problem, frozen
from rex_ray.report.computing.run_curves import GroupTimes, RunCurves
from rex_ray.scenario import DeviceProfile, NetworkModel, RecordedNoise, Source, WorkerTimeline
from rex_ray.sim import Scenario

__all__ = ["NOWHERE", "FittedWorld"]

NOWHERE = Source(repo="", commit="", path="")
"""The source of what a run measured itself."""

# More than a device is known to hold: the engine's profiles need a number, and the problem's limits count beside it.
_ROOMY = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedWorld:
    """One worker group as the run's curves describe it.

    Attributes:
        curves: the run's.
        group: which group.
        places: the steps, by their places in the group, whose speeds and noise are played in this order.
        problem: what a policy is asked to solve.
        switch_lag_steps: steps from a decision to the first step under it.
    """

    curves: RunCurves
    group: GroupTimes
    places: IntArray
    problem: Problem
    switch_lag_steps: int

    def scenario(self, seed: int) -> Scenario:
        """Return the world of one seed: slowdowns where they were, noise of other steps of the same worker."""
        group = self.group
        noise = self._noise()
        profiles = [self._profile(kind) for kind in range(len(self.curves.kinds))]
        shift = 0 if seed == 0 else (seed * 7919) % len(noise)
        values = group.level[self.places] * np.roll(noise, shift, axis=0)[: len(self.places)]
        timelines = tuple(
            WorkerTimeline(
                profile=profiles[int(group.kinds[rank])],
                rank=rank,
                seed=seed,
                noise=RecordedNoise(frozen(np.ascontiguousarray(values[:, rank]))),
                speed_factor=curve.scale,
            )
            for rank, curve in enumerate(group.curves)
        )
        return Scenario(
            problem=replace(self.problem, learnt=()),
            timelines=timelines,
            network=NetworkModel(base_s=max(0.0, float(np.median(group.rest_s)))),
            switch_lag_steps=self.switch_lag_steps,
        )

    def _noise(self) -> FloatArray:
        """Return every clean step's own time over what rows and lasting speeds explain, shape ``[clean steps, n]``."""
        data, group = self.group.data, self.group
        clean = data.steady & (data.num_rows > 0).all(axis=1)
        noise: FloatArray = (group.ratio / group.level)[clean]
        if not len(noise):
            return np.ones((len(self.places), data.num_workers))
        if len(noise) < len(self.places):
            noise = np.resize(noise, (len(self.places), data.num_workers))
        return noise

    def _profile(self, kind: int) -> DeviceProfile:
        evidence = self.curves.kinds[kind]
        return DeviceProfile(
            device=evidence.device,
            workload="measured",
            local_batch_sizes=tuple(evidence.sizes.keys.tolist()),
            step_time_s=tuple(evidence.sizes.middle.tolist()),
            max_local_batch_size=_ROOMY,
            source=NOWHERE,
            curve=replace(evidence.fit.shape, scale=1.0),
        )
