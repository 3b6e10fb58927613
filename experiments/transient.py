"""The same clusters when workers slow down for a while and recover: what is left of a method's lead.

    python -m experiments.transient --json FILE [--record DIR] [--page docs/results.md] [--quick]

Slowdowns begin .3, 1 and 2.4 times per 1,000 steps of a worker, with the lengths and factors that were measured on a
production cluster; three published disturbances stand beside them. Whoever hears of a slowdown 10 steps late, and knows
all else, is ``oracle_delayed``: no method that has to measure can be asked for more.
"""

from __future__ import annotations

import sys

from experiments._harness import Findings, Settings
from experiments.lab.alibaba import DATA_DIR
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

_RATE = "random:1"
_RATES = ("random:0.3", _RATE, "random:2.4")
_METHODS = (*FIXED_BATCH, *GROWING, "rex", "rex-no-trigger", *CONTROLS)
_NUM_SEEDS = 10
# The other rates, and traces, whose seeds differ by less.
_OTHER_SEEDS, _TRACE_SEEDS = 5, 3


def cells_of(settings: Settings, task: str) -> list[Cell]:
    """Return the matrix, whole seeds first, so that an interrupted sweep has some seeds of everything."""
    rates = (_RATE,) if settings.quick else (_RATE, *(rate for rate in _RATES if rate != _RATE))
    published = ["lbb", "dlb", *(["alibaba:3"] if _has_recordings() else [])]
    cells: list[Cell] = []
    for k in range(2 if settings.quick else _NUM_SEEDS):
        seed = settings.seed + k
        for rate in rates if k < _OTHER_SEEDS else (_RATE,):
            # The ablation stands at one rate: with the real search, a run of it takes most of a minute.
            trained = [method for method in _METHODS if method != "rex-no-trigger" or rate == _RATE]
            cells += real_cells(task, trained, seed=seed, disturbance=rate)
        if k < _TRACE_SEEDS:
            for cluster in TRACES[:1] if settings.quick else TRACES:
                for rate in rates:
                    cells += trace_cells(cluster, _METHODS, seed=seed, disturbance=rate)
            for disturbance in () if settings.quick else published:
                cells += trace_cells(HEADLINE, _METHODS, seed=seed, disturbance=disturbance)
    return cells


def _has_recordings() -> bool:
    return (DATA_DIR / "traces").is_dir()


def study(settings: Settings, run: Runner) -> Study:
    """Compare time to accuracy on mixed clusters whose workers slow down for a while."""
    task = real_task(quick=settings.quick)
    cells = cells_of(settings, task)
    compared = Comparison(cells=cells, results=run(cells))
    figures: dict[str, float] = {}
    for world in compared.worlds():
        rate = "" if world.disturbance == _RATE else "_" + world.disturbance.removeprefix("random:")
        place = "" if world.learner == task else f"_trace_{world.cluster}"
        figures |= figures_of(compared, world, place + rate)
    return Study(
        findings=Findings(
            figures=figures,
            tables={"transient": compared.times(), "transient_resources": compared.resources()},
            settings={
                "task": task,
                "headline": HEADLINE,
                "headline_disturbance": _RATE,
                "bsp_B": REFERENCE_BATCHES[task],
                "trace_bsp_B": 256,
                "num_seeds": len({cell.seed for cell in cells}),
                "pilot_seeds": ",".join(map(str, PILOT_SEEDS)),
                "charges": "host",
                "recordings": "yes" if _has_recordings() else "none at hand: no row for alibaba",
            },
        ),
        comparison=compared,
        headline=compared.worlds()[0],
        target=load_task(task).recipe.target,
    )


if __name__ == "__main__":
    main("transient", study, sys.argv[1:])
