"""From a public record of training runs to ``rex_ray/scenario/learning.toml``: noise scales and epochs to the target.

    python -m experiments.learning_table --curves FILE

``FILE`` has one row per epoch and run with the columns ``model, global_batch_size, progress, iteration, metric,
grad_sqr, grad_var, source_repo, commit``; the record itself is not part of this project.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rex_ray.core.types import FloatArray

__all__ = ["main", "table"]

# Progress of the knots as parts of the way to the target: dense at the start, where phi rises tenfold in an epoch.
_KNOTS = np.array([0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0])
# Epochs behind the target say nothing about the way to it.
_PAST_THE_END = 1.05
# Runs whose noise scales are averaged: up to this multiple of the reference batch, the range that growth moves in.
_WIDEST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """How a model of the record appears in the table; targets as in Pollux, table 1, where the record has them."""

    model: str
    workload: str
    metric: str
    threshold: float
    rising: bool
    dataset_size: int | None = None


_ENTRIES = (
    _Entry(
        model="cifar10",
        workload="resnet18",
        metric="validation accuracy 94 %",
        threshold=0.94,
        rising=True,
        dataset_size=50_000,
    ),
    _Entry(
        model="imagenet",
        workload="resnet50",
        metric="validation accuracy 75 %",
        threshold=0.75,
        rising=True,
        dataset_size=1_281_167,
    ),
    _Entry(model="bert", workload="bert", metric="F1 88 %", threshold=88.0, rising=True),
    _Entry(model="deepspeech2", workload="deepspeech2", metric="word error rate 25 %", threshold=25.0, rising=False),
    _Entry(model="yolov3", workload="yolov3", metric="validation loss 13.0", threshold=13.0, rising=False),
    _Entry(model="ncf", workload="ncf", metric="hit rate 69 %", threshold=0.69, rising=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One training run, one value per epoch."""

    progress: FloatArray
    iteration: FloatArray
    metric: FloatArray
    ratio: FloatArray  # grad_var / grad_sqr


def table(curves: Path) -> str:
    """Return the text of the table's entries."""
    runs: dict[str, dict[int, _Run]] = defaultdict(dict)
    sources: dict[str, tuple[str, str]] = {}
    grouped: dict[tuple[str, int], list[dict[str, str]]] = defaultdict(list)
    with curves.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            grouped[row["model"], int(row["global_batch_size"])].append(row)
            sources[row["model"]] = (row["source_repo"], row["commit"])
    for (model, batch), rows in grouped.items():
        runs[model][batch] = _run(rows)
    return "\n".join(_text(entry, runs[entry.model], *sources[entry.model]) for entry in _ENTRIES)


def _run(rows: list[dict[str, str]]) -> _Run:
    ordered = sorted(rows, key=lambda row: float(row["progress"]))
    read = {name: np.array([float(row[name]) for row in ordered]) for name in ("progress", "iteration", "metric")}
    squared, variance = (np.array([float(row[name]) for row in ordered]) for name in ("grad_sqr", "grad_var"))
    with np.errstate(divide="ignore", invalid="ignore"):
        return _Run(**read, ratio=variance / squared)


def _text(entry: _Entry, runs: dict[int, _Run], repo: str, commit: str) -> str:
    reference = min(runs)
    first = runs[reference]
    per_epoch = round(float(np.diff(first.iteration).mean()))
    size = entry.dataset_size or per_epoch * reference
    reached = {
        batch: _epochs(run, entry, batch / size) for batch, run in sorted(runs.items()) if _crossing(run, entry) >= 0
    }
    end = float(first.progress[_crossing(first, entry)])
    at = _KNOTS * end
    used = [run for batch, run in runs.items() if batch <= _WIDEST * reference]
    phi = [
        reference * math.exp(float(np.mean([_log_ratio(run, at, index) for run in used]))) for index in range(at.size)
    ]
    return f"""[[learning]]
workload = "{entry.workload}"
target = "{entry.metric}"
dataset_size = {size}
reference_batch_size = {reference}
progress_epochs = {[round(float(value) * reference / size, 2) for value in at]}
noise_scale = {[float(f"{value:.3g}") for value in phi]}
measured_batch_sizes = {list(reached)}
measured_epochs = {[round(value, 2) for value in reached.values()]}
source = {{ repo = "{repo}", commit = "{commit}", path = "simulator/traces/{entry.model}/validation-*.csv" }}
"""


def _crossing(run: _Run, entry: _Entry) -> int:
    """Index of the first epoch whose metric reaches the target, -1 if none does."""
    there = run.metric >= entry.threshold if entry.rising else run.metric <= entry.threshold
    return int(there.argmax()) if there.any() else -1


def _epochs(run: _Run, entry: _Entry, epochs_per_iteration: float) -> float:
    return float(run.iteration[_crossing(run, entry)]) * epochs_per_iteration


def _log_ratio(run: _Run, at: FloatArray, index: int) -> float:
    """Mean log ratio over the epochs nearer to this knot than to any other, or of the nearest epoch."""
    usable = np.isfinite(run.ratio) & (run.ratio > 0) & (run.progress <= _PAST_THE_END * at[-1])
    progress, ratio = run.progress[usable], run.ratio[usable]
    mine = np.abs(progress[:, None] - at).argmin(axis=1) == index
    if not mine.any():
        mine = np.arange(progress.size) == np.abs(progress - at[index]).argmin()
    return float(np.log(ratio[mine]).mean())


def main() -> None:
    """Print the table's entries."""
    parser = argparse.ArgumentParser(prog="python -m experiments.learning_table", description=__doc__)
    parser.add_argument("--curves", type=Path, required=True, metavar="FILE", help="one row per epoch and run")
    sys.stdout.write(table(parser.parse_args().curves))


if __name__ == "__main__":
    main()
