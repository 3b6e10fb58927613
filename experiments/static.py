"""Every synchronous method on clusters whose speeds differ and do not change: time to accuracy, and who wastes what.

    python -m experiments.static --json FILE [--record DIR] [--page docs/results.md] [--quick]

The headline is four T4 and four V100 with real SGD on real images; the other clusters are driven by measured noise
scales. Control is charged for what it costs beside the steps; oracles and fixed batches pay nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from experiments._harness import Findings, Settings
from experiments.lab.cells import Cell
from experiments.lab.command import Runner, Study, main
from experiments.lab.fixed import PILOT_SEEDS
from experiments.lab.headline import HEADLINE, figures_of
from experiments.lab.tables import Comparison
from experiments.lab.tasks import REFERENCE_BATCHES, real_task

__all__ = ["cells_of", "study"]

_FIXED_BATCH = ("bsp", "dlb", "lb_bsp", "omnilearn")
_GROWING = ("pollux", "growth10", "cannikin")
_CONTROLS = ("oracle", "oracle_delayed", "best_fixed_equal", "best_fixed_balanced")
_METHODS = (*_FIXED_BATCH, *_GROWING, "rex", *_CONTROLS)
_TRACES = ("4xT4,4xV100", "4xT4,4xV100-gavel", "2xT4,2xV100", "2xT4,2xV100-gavel")
_NUM_SEEDS = 10
# Each of these trains a way of its own, a minute or more of a core; the others share theirs, or are the point.
_NUM_GROWING_SEEDS = 3


def cells_of(settings: Settings, task: str) -> list[Cell]:
    """Return the matrix, whole seeds first, so that an interrupted sweep has some seeds of everything."""
    seeds = [settings.seed + k for k in range(2 if settings.quick else _NUM_SEEDS)]
    cells: list[Cell] = []
    for k, seed in enumerate(seeds):
        cells += _real(task, seed, [m for m in _METHODS if m not in _GROWING or k < _NUM_GROWING_SEEDS])
        for cluster in _TRACES[:1] if settings.quick else _TRACES:
            world = Cell(method="", workload="resnet18", cluster=cluster, seed=seed, charges="measured")
            cells += [replace(world, method=method) for method in _METHODS]
    return cells


def _real(task: str, seed: int, methods: Sequence[str]) -> list[Cell]:
    world = Cell(
        method="",
        workload="resnet18",
        cluster=HEADLINE,
        seed=seed,
        learner=task,
        global_batch_size=REFERENCE_BATCHES[task],
        charges="measured",
    )
    return [replace(world, method=method, search="helper" if method == "rex" else "none") for method in methods]


def study(settings: Settings, run: Runner) -> Study:
    """Compare time to accuracy on static mixed clusters."""
    task = real_task(quick=settings.quick)
    cells = cells_of(settings, task)
    compared = Comparison(cells=cells, results=run(cells))
    figures = {}
    for world in compared.worlds():
        is_headline = world.learner == task
        figures |= figures_of(compared, world, "" if is_headline else f"_trace_{world.cluster}")
    return Study(
        findings=Findings(
            figures=figures,
            tables={"static": compared.times(), "static_resources": compared.resources()},
            settings={
                "task": task,
                "headline": HEADLINE,
                "bsp_B": REFERENCE_BATCHES[task],
                "trace_bsp_B": 256,
                "num_seeds": len({cell.seed for cell in cells}),
                "pilot_seeds": ",".join(map(str, PILOT_SEEDS)),
                "charges": "measured",
            },
        ),
        comparison=compared,
        headline=compared.worlds()[0],
    )


if __name__ == "__main__":
    main("static", study, sys.argv[1:])
