"""The controller in virtual time, over a scenario or over a recording."""

from __future__ import annotations

from rex_ray.sim.engine import Learner, Searcher, SimulatedRun, simulate
from rex_ray.sim.recorded import RecordedRun, compare_decisions, feed_recorded
from rex_ray.sim.world import Scenario, mixed_cluster

__all__ = [
    "Learner",
    "RecordedRun",
    "Scenario",
    "Searcher",
    "SimulatedRun",
    "compare_decisions",
    "feed_recorded",
    "mixed_cluster",
    "simulate",
]
