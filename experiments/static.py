"""Every synchronous method on clusters whose speeds differ and do not change: time to accuracy, and who wastes what.

    python -m experiments.static --json FILE [--record DIR] [--page docs/results.md] [--quick]

The headline is four T4 and four V100 with real SGD on real images; the other clusters are driven by measured noise
scales. Control is charged for what it costs beside the steps; oracles and fixed batches pay nothing.
"""

from __future__ import annotations

import sys

from experiments._harness import Findings, Settings
from experiments.lab.cells import Cell
from experiments.lab.command import Runner, main
from experiments.lab.fixed import PILOT_SEEDS
from experiments.lab.headline import (
    CONTROLS,
    FIXED_BATCH,
    GROWING,
    HEADLINE,
    TRACES,
    figures_of,
    real_cells,
    trace_cells,
)
from experiments.lab.study import Study
from experiments.lab.tables import Comparison
from experiments.lab.tasks import REFERENCE_BATCHES, real_task
from workloads.learning.tasks import load_task

__all__ = ["cells_of", "study"]

_METHODS = (*FIXED_BATCH, *GROWING, "rex", *CONTROLS)
_NUM_SEEDS = 10


def cells_of(settings: Settings, task: str) -> list[Cell]:
    """Return the matrix, whole seeds first, so that an interrupted sweep has some seeds of everything."""
    cells: list[Cell] = []
    for k in range(2 if settings.quick else _NUM_SEEDS):
        seed = settings.seed + k
        cells += real_cells(task, _METHODS, seed=seed)
        for cluster in TRACES[:1] if settings.quick else TRACES:
            cells += trace_cells(cluster, _METHODS, seed=seed)
    return cells


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
                "charges": "host",
            },
        ),
        comparison=compared,
        headline=compared.worlds()[0],
        target=load_task(task).recipe.target,
    )


if __name__ == "__main__":
    main("static", study, sys.argv[1:])
