"""What the two headline experiments share: who is compared, on which cluster, and the figures that judge the claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from experiments.lab.cells import Cell
from experiments.lab.summary import accuracy_delta
from experiments.lab.tables import Comparison
from experiments.lab.tasks import REFERENCE_BATCHES

__all__ = ["CONTROLS", "FIXED_BATCH", "GROWING", "HEADLINE", "TRACES", "figures_of", "real_cells", "trace_cells"]

HEADLINE = "4xT4,4xV100"
"""The cluster of the paper's tables that real SGD is run on."""

TRACES = (HEADLINE, "4xT4,4xV100-gavel", "2xT4,2xV100", "2xT4,2xV100-gavel")
"""The clusters that measured noise scales are run on, both profiles of the V100 among them."""

FIXED_BATCH = ("bsp", "dlb", "lb_bsp", "omnilearn")
"""Methods that keep the reference batch: all of them train one and the same way."""

GROWING = ("pollux", "growth10", "cannikin")
"""Published methods that change the batch: each trains ways of its own."""

CONTROLS = ("oracle", "oracle_delayed", "best_fixed_equal", "best_fixed_balanced")
"""See ``methods.CONTROLS``."""

_APART = (
    *("bsp", "rex", "oracle", "best_fixed_equal", *GROWING, "rex-no-trigger"),
    *("best_fixed_balanced", *FIXED_BATCH[1:], "oracle_delayed"),
)

_OTHERS = ("bsp", "best_fixed_equal", "best_fixed_balanced", "oracle", "oracle_delayed")
_NAMES = {"oracle_delayed": "ratio_rex_oracle_delayed"}


def real_cells(task: str, methods: Sequence[str], *, seed: int, disturbance: str = "none") -> list[Cell]:
    """Return the headline's cells of one seed; whoever searches has the real helper.

    They come in an order in which those that train the same way are not begun together, so that one trains it and the
    others read it.
    """
    return [
        Cell(
            method=method,
            workload="resnet18",
            cluster=HEADLINE,
            seed=seed,
            learner=task,
            global_batch_size=REFERENCE_BATCHES[task],
            disturbance=disturbance,
            charges="host",
            search="helper" if method.startswith("rex") else "none",
        )
        for method in sorted(methods, key=_APART.index)
    ]


def trace_cells(cluster: str, methods: Sequence[str], *, seed: int, disturbance: str = "none") -> list[Cell]:
    """Return the cells of one seed that measured noise scales drive; no searches, which cost most of a run's time."""
    # Replayed jobs bring their own noise.
    noise = "quiet" if disturbance.startswith("alibaba") else "dedicated"
    return [
        Cell(
            method=method,
            workload="resnet18",
            cluster=cluster,
            seed=seed,
            noise=noise,
            disturbance=disturbance,
            charges="host",
        )
        for method in methods
    ]


def figures_of(compared: Comparison, world: Cell, suffix: str) -> dict[str, float]:
    """Return the figures of one world, each name with the suffix; those that a missed target leaves open are left out.

    Ratios are of median times to the target; ``accuracy_delta`` is against bsp, in points; ``overhead_pct`` is what
    control costs beside the steps, in per cent of them.
    """
    figures: dict[str, float] = {}
    methods = compared.methods(world)
    for other in _OTHERS:
        if other in methods:
            figures[_NAMES.get(other, f"tta_ratio_rex_{other}")] = compared.ratio(world, "rex", other).value
    mine, baseline = compared.pairs(world, "rex", "bsp")
    if all(result.final_metric is not None for result in (*mine, *baseline)):
        delta = accuracy_delta(mine, baseline)
        figures |= {"accuracy_delta_points": delta.points, "accuracy_delta_lo90": delta.lowest_90}
    figures |= {
        "rii_bsp": median(result.rii for result in baseline),
        "rii_rex": median(result.rii for result in mine),
        "overhead_pct": median(100 * result.charged_s / (result.total_s - result.charged_s) for result in mine),
    }
    clean = suffix.replace(",", "_").replace(":", "_")
    return {f"{name}{clean}": value for name, value in figures.items() if math.isfinite(value)}
