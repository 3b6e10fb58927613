"""The controller in virtual time, over a scenario or over a recording; and the limits of any controller there."""

from __future__ import annotations

from rex_ray.sim.charges import FREE, Charges, charges_of
from rex_ray.sim.engine import SimulatedRun, simulate
from rex_ray.sim.learners import TraceLearner
from rex_ray.sim.limits import ClusterLimits, cluster_limits
from rex_ray.sim.oracle import Limits
from rex_ray.sim.recorded import RecordedRun, compare_decisions, feed_recorded
from rex_ray.sim.scripted_oracle import OracleRun, ScriptedOracle, oracle_run
from rex_ray.sim.seams import Learner, Searcher, StepNorms
from rex_ray.sim.step_times import StepTimes
from rex_ray.sim.world import Scenario, mixed_cluster, problem_of

__all__ = [
    "FREE",
    "Charges",
    "ClusterLimits",
    "Learner",
    "Limits",
    "OracleRun",
    "RecordedRun",
    "Scenario",
    "ScriptedOracle",
    "Searcher",
    "SimulatedRun",
    "StepNorms",
    "StepTimes",
    "TraceLearner",
    "charges_of",
    "cluster_limits",
    "compare_decisions",
    "feed_recorded",
    "mixed_cluster",
    "oracle_run",
    "problem_of",
    "simulate",
]
