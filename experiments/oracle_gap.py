"""How far methods are from the oracle, on whole training runs in the simulator, and which part loses how much.

    python -m experiments.oracle_gap --json FILE [--page docs/limits.md] [--quick]

Progress is made by measured noise scales (``TraceLearner``), step times are the public profiles' with the noise of
dedicated machines, and the controller is the production one; searches are answered by nobody.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np

from experiments._harness import Findings, Row, Scalar, Settings
from experiments._page import main
from rex_ray.control.controller import Controller
from rex_ray.core.types import FloatArray, Problem, WorkerSpec
from rex_ray.policies.registry import make_policy
from rex_ray.scenario import (
    LearningCurve,
    NoiseModel,
    WorkerTimeline,
    load_learning,
    load_network,
    load_profile,
    parse_cluster,
    random_episodes,
)
from rex_ray.sim import Scenario, ScriptedOracle, SimulatedRun, TraceLearner, oracle_run, simulate
from rex_ray.sim.gradients import NoisyGradients
from rex_ray.sim.oracle import largest_batch

__all__ = ["gap_row", "measure"]

_REFERENCE = 256
# A run that needs more has failed; the slowest, BSP at the reference batch, needs a fifth.
_MOST_STEPS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Method:
    """A policy with its options, under a name for the table."""

    name: str
    policy: str = "rex"
    options: Mapping[str, object] = field(default_factory=dict)


_REX = _Method(name="rex")
_METHODS = (
    _Method(name="bsp 256", policy="bsp"),
    _Method(name="dlb 256", policy="dlb"),
    _REX,
    _Method(name="rex, growth by goodput", options={"growth_rule": "goodput"}),
    _Method(name="rex, growth by a tenth", options={"growth_rule": "growth10"}),
    _Method(name="rex without trigger", options={"trigger": "off"}),
)
_STATIC = tuple(method for method in _METHODS if method.name != "rex without trigger")


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """A cluster, what it trains, and how often a worker slows down."""

    workload: str
    cluster: str
    per_1000: float = 0.0
    methods: tuple[_Method, ...] = _STATIC
    num_seeds: int = 3

    def timelines(self, seed: int, num_steps: int) -> tuple[WorkerTimeline, ...]:
        devices = parse_cluster(self.cluster)
        episodes = random_episodes(
            num_workers=len(devices), num_steps=num_steps, per_1000_worker_steps=self.per_1000, seed=seed
        )
        return tuple(
            WorkerTimeline(
                profile=load_profile(device, self.workload),
                rank=rank,
                seed=seed,
                noise=NoiseModel.dedicated(),
                episodes=episodes,
            )
            for rank, device in enumerate(devices)
        )


_WORLDS = (
    _World(workload="resnet18", cluster="2xT4,2xV100"),
    _World(workload="resnet18", cluster="4xT4,4xV100"),
    _World(workload="resnet18", cluster="4xT4,4xV100-gavel"),
    _World(workload="resnet18", cluster="4xT4,4xV100", per_1000=1.0, methods=_METHODS),
    _World(workload="resnet50", cluster="2xT4,2xV100", methods=(_REX,), num_seeds=1),
    _World(workload="resnet50", cluster="4xT4,4xV100", methods=(_REX,), num_seeds=1),
)


def gap_row(world: _World, method: _Method, num_seeds: int) -> Row:
    """Return one row: medians over seeds, parts in per cent of the oracle's time.

    ``split_pct`` is what the exact split (of the present speeds) would have saved at the very same batches,
    ``rate_pct`` what a learning rate that allows all of each batch's progress would have saved, and ``batch_pct`` the
    rest: other batches than the oracle's.
    """
    found = [_parts(world, method, seed) for seed in range(num_seeds)]
    gaps = [sum(parts.values()) for parts in found]
    row: dict[str, Scalar] = {
        "workload": world.workload,
        "cluster": world.cluster,
        "per_1000": world.per_1000,
        "method": method.name,
        "seeds": num_seeds,
        "gap_pct": round(median(gaps), 1),
        "lowest": round(min(gaps), 1),
        "highest": round(max(gaps), 1),
    }
    return row | {f"{part}_pct": round(median(parts[part] for parts in found), 1) for part in found[0]}


def _parts(world: _World, method: _Method, seed: int) -> dict[str, float]:
    learning = load_learning(world.workload)
    scenario = _scenario(world, learning, seed)
    learner = TraceLearner(learning=learning, reference_batch_size=_REFERENCE, gradients=NoisyGradients(seed=seed))
    controller = Controller(make_policy(method.policy, method.options), seed=seed)
    run = simulate(controller, scenario, num_steps=_MOST_STEPS, learner=learner)
    if not learner.is_done:
        raise RuntimeError(f"{method.name} did not reach the target in {_MOST_STEPS} steps")
    oracle_s = oracle_run(scenario.timelines, scenario.network, learning, _REFERENCE).total_s
    exact_s = _exactly_split_s(run, scenario)
    used = _share_of_progress(run, learning)
    rate_s = float((exact_s * (1 - used)).sum())
    split_s = run.total_s - float(exact_s.sum())
    batch_s = run.total_s - split_s - rate_s - oracle_s
    return {name: 100 * part / oracle_s for name, part in (("batch", batch_s), ("split", split_s), ("rate", rate_s))}


def _scenario(world: _World, learning: LearningCurve, seed: int) -> Scenario:
    devices = parse_cluster(world.cluster)
    # Episodes beyond the last step cost nothing, and BSP at the reference batch takes the most steps.
    num_steps = int(learning.epochs_to_target(_REFERENCE) * learning.dataset_size / _REFERENCE)
    lines = world.timelines(seed, num_steps)
    caps = [line.profile.max_local_batch_size for line in lines]
    problem = Problem(
        workers=tuple(
            WorkerSpec(rank=rank, device=device, max_local_batch_size=cap)
            for rank, (device, cap) in enumerate(zip(devices, caps, strict=True))
        ),
        global_batch_size=_REFERENCE,
        max_global_batch_size=largest_batch(_REFERENCE, learning.dataset_size, sum(caps)),
        dataset_size=learning.dataset_size,
    )
    return Scenario(problem=problem, timelines=lines, network=load_network(world.workload))


def _exactly_split_s(run: SimulatedRun, scenario: Scenario) -> FloatArray:
    """Duration of every step, had its rows been split exactly for the speeds of that moment, shape ``[steps]``."""
    oracle = ScriptedOracle(timelines=scenario.timelines, network=scenario.network, num_steps=len(run.steps))
    # An epoch's last rows may be fewer than workers, which no split of the oracle's knows.
    rows = np.array([max(int(step.num_rows.sum()), len(scenario.timelines)) for step in run.steps])
    return np.concatenate([oracle.step_s(int(rows[start]), start, stop - start) for start, stop in _runs(rows)])


def _runs(values: np.typing.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    borders = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), values.size]
    yield from pairwise(borders)


def _share_of_progress(run: SimulatedRun, learning: LearningCurve) -> FloatArray:
    """Progress of every step as a part of what its rows could have made, shape ``[steps]``."""
    replayed = TraceLearner(learning=learning, reference_batch_size=_REFERENCE)
    switches = dict(run.allocations)
    shares, factor = [], 1.0
    for index, step in enumerate(run.steps):
        factor = switches[index].lr_factor if index in switches else factor
        rows, before = int(step.num_rows.sum()), replayed.progress_rows
        possible = rows * float(learning.efficiency(rows, replayed.noise_scale))
        replayed.advance(rows, factor)
        shares.append((replayed.progress_rows - before) / possible)
    return np.array(shares)


def measure(settings: Settings) -> Findings:
    """Measure how far whole simulated runs are from the oracle."""
    worlds: Sequence[_World] = _WORLDS[:2] if settings.quick else _WORLDS
    rows = [
        gap_row(world, method, 1 if settings.quick else world.num_seeds)
        for world in worlds
        for method in ([_REX] if settings.quick else world.methods)
    ]
    figures = {
        f"gap_to_oracle_{row['workload']}_{len(parse_cluster(str(row['cluster'])))}_pct": row["gap_pct"]
        for row in rows
        if row["method"] == _REX.name and not row["per_1000"] and "gavel" not in str(row["cluster"])
    }
    return Findings(
        figures={name: float(value) for name, value in figures.items() if value is not None}, tables={"gap": rows}
    )


if __name__ == "__main__":
    main("oracle_gap", measure, sys.argv[1:])
