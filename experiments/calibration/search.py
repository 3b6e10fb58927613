"""What a search adds to the exact split, and what it costs: on curves, and where the curves lack a structure.

The whole ``rex`` policy runs in virtual time, once with the split alone and once with the search, whose questions go to
the live helper process with Ax in it. Judged is the true, quiet step time of the shares that a run ends with, against
those of the run without a search and against the true optimum, which is found by exhaustive means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments._search_problems import SPEEDS, search_problem
from experiments._searcher import HelperSearcher, decide
from experiments.calibration._bounds import Budget, Result
from experiments.search_cost import DECISION_GOAL_S, NUM_WORKERS, measure_decisions
from rex_ray.control.controller import Controller
from rex_ray.control.notes import Decided
from rex_ray.core.split import CurveSet, exact_split
from rex_ray.policies.registry import make_policy
from rex_ray.scenario import NoiseModel, StepTimeShape, true_optimum
from rex_ray.search.helper import SearchHelper
from rex_ray.sim import Scenario, SimulatedRun, mixed_cluster, simulate

__all__ = ["measure", "shapes_of"]

WORST_GOAL = 1.005
"""A search may not end in shares slower than the exact split's by more than this factor."""

WORKLOAD, ROWS_PER_WORKER = "resnet50", 64
NOISE = NoiseModel.dedicated()
NUM_STEPS = 900

QUICK_WORLDS = ("smooth", "tile 32", "loader cap")


def shapes_of(num_workers: int) -> dict[str, StepTimeShape]:
    """Return the worlds by name: what a curve per worker can say, and what it cannot."""
    pairs = tuple(rank // 2 for rank in range(num_workers))
    return {
        "smooth": StepTimeShape(),
        "contention": StepTimeShape(contention=0.6, hosts=pairs),
        "tile 8": StepTimeShape(tile_rows=8),
        "tile 32": StepTimeShape(tile_rows=32),
        "loader cap": StepTimeShape(loader_rows_per_s=250.0),
    }


def measure(budget: Budget) -> Result:
    """Play every world with and without searches; time whole decisions on curves."""
    with HelperSearcher() as searcher:
        # First, so that the import of Ax falls to the decision that is told apart.
        cost = measure_decisions(searcher.helper, budget.scaled(3, 1), budget.seed)
        on_curves = [
            _on_curves(searcher.helper, num_workers, speeds, budget.seed)
            for num_workers in (NUM_WORKERS[:1] if budget.quick else NUM_WORKERS)
            for speeds in SPEEDS
        ]
        rows = [
            _compared(shape, name, num_workers, seed, searcher)
            for num_workers, num_seeds in _plan(budget)
            for name, shape in shapes_of(num_workers).items()
            if name in QUICK_WORLDS or not budget.quick
            for seed in range(budget.seed, budget.seed + num_seeds)
        ]
    return Result(
        figures={
            "ax_worst_ratio_to_exact": max(row["to_exact"] for row in (*rows, *on_curves)),
            "ax_tile32_ratio_to_optimum": max(row["to_optimum"] for row in rows if row["world"] == "tile 32"),
            "ax_decision_s": cost.decision_s,
            "ax_decision_cpu_s": cost.decision_cpu_s,
        },
        tables={"measured time": rows, "on curves": on_curves, "decisions": cost.rows},
        notes=[
            f"a decision is a question and its answer, the helper warm; slowest median (goal {DECISION_GOAL_S:.0f} s)",
            "ax_decision_cpu_s is the helper's processor time; on a busy machine a niced helper takes longer than that",
            f"the first decision of a helper, with the import of Ax, took {cost.first_s:.1f} s",
            f"measured time: {WORKLOAD}, {ROWS_PER_WORKER} rows a worker, half T4 and half V100, {NUM_STEPS} steps",
            "a switch takes 10 steps there, growth is off, searches answer after 20 steps",
            "total_ratio is the whole run's time over that of the run without a search: what trials cost is in it",
            "on curves the exact split is optimal: a ratio of 1 says that the search ends with it",
        ],
    )


def _plan(budget: Budget) -> Sequence[tuple[int, int]]:
    """Return ``(workers, seeds)``."""
    return ((4, 1),) if budget.quick else ((4, 2), (8, 1), (16, 1))


@dataclass(frozen=True, slots=True)
class _End:
    """Where a run ended: true step time of its last shares, its duration, and what it did to get there."""

    step_s: float
    total_s: float
    num_searches: dict[str, int]
    num_switches: int


def _compared(shape: StepTimeShape, name: str, num_workers: int, seed: int, searcher: HelperSearcher) -> dict[str, Any]:
    devices = ("T4",) * (num_workers // 2) + ("V100",) * (num_workers // 2)
    scenario = mixed_cluster(
        devices, WORKLOAD, global_batch_size=ROWS_PER_WORKER * num_workers, noise=NOISE, shape=shape, seed=seed
    )
    best_s = true_optimum(scenario.timelines, ROWS_PER_WORKER * num_workers).step_time_s
    exact, searched = _play(scenario, "off", None), _play(scenario, "auto", searcher)
    return {
        "world": name,
        "num_workers": num_workers,
        "seed": seed,
        "rho": NOISE.rho,
        "sd": NOISE.sd,
        "steps": NUM_STEPS,
        "exact_to_optimum": exact.step_s / best_s,
        "to_optimum": searched.step_s / best_s,
        "to_exact": searched.step_s / exact.step_s,
        "total_ratio": searched.total_s / exact.total_s,
        "model_searches": searched.num_searches.get("model", 0),
        "measured_searches": searched.num_searches.get("measured", 0),
        "switches": searched.num_switches,
    }


def _play(scenario: Scenario, search: str, searcher: HelperSearcher | None) -> _End:
    policy = make_policy("rex", {"growth": "off", "search": search})
    run = simulate(Controller(policy), scenario, num_steps=NUM_STEPS, searcher=searcher)
    sizes = run.allocations[-1][1].local_batch_sizes
    own_s = [line.quiet_time_s(rows, sizes) for line, rows in zip(scenario.timelines, sizes, strict=True)]
    return _End(
        step_s=max(own_s),
        total_s=run.total_s,
        num_searches=_searches(run),
        num_switches=len(run.allocations) - 1,
    )


def _searches(run: SimulatedRun) -> dict[str, int]:
    asked: dict[str, int] = {}
    for note in run.notes:
        if isinstance(note, Decided) and note.kind == "search":
            kind = "measured" if "mismatch" in note.evidence else "model"
            asked[kind] = asked.get(kind, 0) + 1
    return asked


def _on_curves(helper: SearchHelper, num_workers: int, speeds: str, seed: int) -> dict[str, Any]:
    """Have a search on curves, and compare its answer with the exact split by the same curves."""
    problem = search_problem(num_workers, speeds)
    answer = decide(helper, problem, seed).reply
    workers = CurveSet(problem.curves())
    plan = exact_split(problem.curves(), problem.global_batch_size, problem.lower, problem.upper)
    found_s = float(workers.own_s(np.array(answer.local_batch_sizes)).max())
    return {
        "num_workers": num_workers,
        "speeds": speeds,
        "seed": seed,
        "trials": answer.num_trials,
        "to_exact": found_s / plan.step_time_s,
    }
