"""The demo's table: one row per policy, times also relative to the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from rex_ray.demo.summary import RunSummary

__all__ = ["print_summary"]


def print_summary(runs: Sequence[RunSummary], target_accuracy: float, console: Console) -> None:
    """Print what ``summary.json`` holds, for people.

    Args:
        runs: the first one is what the others are compared with.
        target_accuracy: what "trained" meant.
        console: where to.
    """
    first = runs[0]
    optimum = first.optimum_local_batch_sizes
    table = Table(
        title=f"time to accuracy {target_accuracy:g} and median step time, against {first.policy}",
        caption=(
            f"best: the cluster's exact optimum, {_shares(optimum)} rows in {1e3 * first.optimum_step_s:.0f} ms; 'x "
            "best' is the step time of the run's second half over it. imbal.: max / mean of the workers' own times, "
            "minus 1. RII: share of the cluster's peak rate that went unused. found: first step from which the shares "
            "stay within 10 % of the best. once: whether each row was seen exactly once per epoch."
        ),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("policy", no_wrap=True)
    for column in ("target in", "step", "x best", "imbal.", "RII", "found", "shares", "once"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run.policy,
            _time(run.time_to_target_s, first.time_to_target_s, unit="s"),
            _time(run.median_step_s, first.median_step_s, unit="ms"),
            f"{run.ratio_to_optimum:.2f}",
            f"{run.imbalance:.2f}",
            f"{run.rii:.2f}",
            "-" if run.steps_to_split is None else f"step {run.steps_to_split}",
            _shares(run.local_batch_sizes),
            "yes" if run.rows_seen_exactly_once else "NO",
        )
    console.print(table)


def _shares(local_batch_sizes: Sequence[int]) -> str:
    return "/".join(map(str, local_batch_sizes))


def _time(value: float | None, reference: float | None, *, unit: Literal["s", "ms"]) -> str:
    """A time, and below it its change against the reference."""
    if value is None:
        return "never"
    text = f"{value:.1f} s" if unit == "s" else f"{1e3 * value:.0f} ms"
    return text if not reference or value == reference else f"{text}\n{100 * (value / reference - 1):+.0f} %"
