"""A language model on WikiText-2 on mixes of K80, P100 and V100: real SGD, in the virtual time of measured cards.

    python -m experiments.wikitext --json FILE [--record DIR] [--page docs/results.md] [--quick]

Step times are one study's, of an LSTM on WikiText-2 at 5 to 80 rows per card. It measured no T4, so there is none here;
its times of several cards at once do not say what a reduction takes, so none is counted. Training is real: a small
LSTM on the validation text, evaluated on the test text (the training text is not at hand), a row being 35 words. A
quick run trains on digits instead, which shows the way and nothing of a language model.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from experiments._harness import Findings, Row, Scalar, Settings
from experiments._matrix import Played, play_all, seeded
from experiments.lab.cells import Cell, Result
from experiments.lab.command import Runner, main
from experiments.lab.fixed import BATCH_OPTION
from experiments.lab.study import Study
from experiments.lab.summary import ratio, spread
from experiments.lab.tasks import REFERENCE_BATCHES
from workloads.learning.tasks import load_task

__all__ = ["CLUSTERS", "METHODS", "cell_of", "method_rows", "study"]

_TASK, _QUICK_TASK = "wikitext2", "digits"
_REFERENCE = 32
CLUSTERS = ("2xK80,2xP100,2xV100-gavel", "3xP100,3xV100-gavel", "4xK80,2xV100-gavel")
"""The first is the headline. All methods that keep the batch train one and the same way, whatever the cluster."""

METHODS = (
    "bsp", "dlb", "lb_bsp", "omnilearn", "pollux", "cannikin", "rex-no-growth", "rex", "rex, not charged",
    "oracle", "balanced 64", "balanced 128", "equal 64", "equal 128",
)  # fmt: skip
"""``balanced`` and ``equal`` keep the batch that is named: what a sweep over batches would see."""

_QUICK_METHODS = ("bsp", "dlb", "rex", "rex, not charged", "oracle")
# Every seed is a training of two minutes for each way through the data, and so is each other batch.
_NUM_SEEDS, _FEW_SEEDS = 5, 2
_FEW = ("pollux", "cannikin", "balanced 64", "balanced 128", "equal 64", "equal 128")


def cell_of(method: str, cluster: str, task: str) -> Cell:
    """Return the run of a method, seed 0.

    A step takes some ten milliseconds here, so methods are charged the .75 ms that measuring was seen to take of the
    host rather than its part of a longer step; oracle and fixed batches are charged nothing.
    """
    reference = _REFERENCE if task == _TASK else REFERENCE_BATCHES[task]
    cell = Cell(
        method=method,
        workload="lstm",
        cluster=cluster,
        learner=task,
        global_batch_size=reference,
        network="none",
        charges="host",
    )
    kind, _, batch = method.partition(" ")
    if kind in {"balanced", "equal"}:
        return replace(cell, method=f"best_fixed_{kind}", options={BATCH_OPTION: int(batch)}, charges="none")
    if method == "rex, not charged":
        return replace(cell, method="rex", charges="none")
    return replace(cell, charges="none") if method == "oracle" else cell


def method_rows(played: Played, cluster: str, task: str, seeds_of: dict[str, Sequence[int]]) -> list[Row]:
    """Return one row per method: median time to the target, in pairs against bsp and the oracle."""
    rows: list[Row] = []
    for method, seeds in seeds_of.items():
        mine, bsp, oracle = (
            _results(played, cell_of(name, cluster, task), seeds) for name in (method, "bsp", "oracle")
        )
        found = spread(mine)
        against = ratio(mine, oracle)
        row: dict[str, Scalar] = {
            "cluster": cluster,
            "method": method,
            "seeds": len(seeds),
            "missed": found.num_missed,
            "tta_s": _finite(found.median_s, 2),
            "to_bsp": _finite(ratio(mine, bsp).value, 4),
            "to_oracle": _finite(against.value, 4),
            "low": _finite(against.low, 4),
            "high": _finite(against.high, 4),
            "B": f"{min(run.smallest_batch for run in mine)}-{max(run.largest_batch for run in mine)}",
            "total_s": round(median(run.total_s for run in mine), 2),
            "metric": round(median(run.final_metric or math.nan for run in mine), 3),
        }
        rows.append(row)
    return rows


def _results(played: Played, cell: Cell, seeds: Sequence[int]) -> list[Result]:
    return [played[one] for one in seeded(cell, seeds)]


def _finite(value: float, digits: int) -> float | None:
    return round(value, digits) if math.isfinite(value) else None


def study(settings: Settings, run: Runner) -> Study:
    """Train a language model on mixes of three kinds of cards."""
    task = _QUICK_TASK if settings.quick else _TASK
    clusters = CLUSTERS[:1] if settings.quick else CLUSTERS
    seeds_of = _seeds_of(settings)
    named = [
        (method, cell)
        for cluster in clusters
        for method, seeds in seeds_of.items()
        for cell in seeded(cell_of(method, cluster, task), seeds)
    ]
    played = play_all((cell for _, cell in named), run)
    rows = [row for cluster in clusters for row in method_rows(played, cluster, task, seeds_of)]
    compared = played.comparison(named)
    return Study(
        findings=Findings(
            figures=_figures(rows),
            tables={"wikitext": rows},
            settings={
                "task": task,
                "target": load_task(task).recipe.target,
                "bsp_B": cell_of("bsp", CLUSTERS[0], task).global_batch_size,
                "network": "none",
                "charges": "host",
            },
        ),
        comparison=compared,
        headline=compared.worlds()[0],
        target=load_task(task).recipe.target,
        metric="perplexity" if task == _TASK else "accuracy",
    )


def _seeds_of(settings: Settings) -> dict[str, Sequence[int]]:
    if settings.quick:
        return {method: range(settings.seed, settings.seed + 1) for method in _QUICK_METHODS}
    counts = {method: _FEW_SEEDS if method in _FEW else _NUM_SEEDS for method in METHODS}
    return {method: range(settings.seed, settings.seed + count) for method, count in counts.items()}


def _figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the figures of every cluster; the headline's have no ending."""
    figures: dict[str, float] = {}
    for row in rows:
        if row["method"] not in {"rex", "rex, not charged"}:
            continue
        ending = "" if row["cluster"] == CLUSTERS[0] else f"_{str(row['cluster']).replace(',', '_')}"
        name = "rex" if row["method"] == "rex" else "rex_not_charged"
        for column, other in (("to_bsp", "bsp"), ("to_oracle", "oracle")):
            value = row[column]
            if value is not None:
                figures[f"tta_ratio_{name}_{other}{ending}"] = float(value)
    return figures


if __name__ == "__main__":
    main("wikitext", study, sys.argv[1:])
