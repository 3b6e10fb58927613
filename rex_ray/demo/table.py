"""The demo's tables: one row per policy, times also relative to the first, and what the scenario was about below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from rex_ray.demo.reactions import EventOutcome
from rex_ray.demo.settings import DemoSettings, ScenarioName
from rex_ray.demo.summary import RunSummary

__all__ = ["print_summary"]


def print_summary(runs: Sequence[RunSummary], settings: DemoSettings, console: Console) -> None:
    """Print what ``summary.json`` holds, for people.

    Args:
        runs: the first one is what the others are compared with.
        settings: which scenario, and what "trained" meant.
        console: where to.
    """
    tables: dict[ScenarioName, Callable[[], Sequence[Table]]] = {
        "static": lambda: [_static_table(runs, settings.target_accuracy)],
        "transient": lambda: [_transient_table(runs), _event_table(runs)],
        "growth": lambda: [_growth_table(runs, settings), _change_table(runs)],
        "tiles": lambda: [_tiles_table(runs)],
    }
    for table in tables[settings.scenario]():
        if table.row_count:
            console.print(table)


def _table(title: str, caption: str, first: Sequence[str], columns: Sequence[str]) -> Table:
    table = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in first:
        table.add_column(column, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _static_table(runs: Sequence[RunSummary], target_accuracy: float) -> Table:
    first = runs[0]
    optimum = first.optimum_local_batch_sizes
    table = _table(
        f"time to accuracy {target_accuracy:g} and median step time, against {first.policy}",
        f"best: the cluster's exact optimum, {_shares(optimum)} rows in {1e3 * first.optimum_step_s:.0f} ms; 'x "
        "best' is the step time of the run's second half over it. imbal.: max / mean of the workers' own times, "
        "minus 1. RII: share of the cluster's peak rate that went unused. found: first step from which the shares "
        "stay within 10 % of the best. once: whether each row was seen exactly once per epoch.",
        ["policy"],
        ("target in", "step", "x best", "imbal.", "RII", "found", "shares", "once"),
    )
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
            _once(run),
        )
    return table


def _transient_table(runs: Sequence[RunSummary]) -> Table:
    first = runs[0]
    table = _table(
        f"{first.num_steps} steps with scripted slowdowns, against {first.policy}",
        f"oracle: the best shares at every step, known at once and without noise, {first.oracle_s:.1f} s; shares: the "
        "part of the gap that is due to shares, by exact times; the rest is noise and the machine. reaction: slowest "
        "first re-split after the onset of a lasting slowdown of one worker, in steps to the newest one known at the "
        "decision. false: moves that do not make the step shorter by the exact times.",
        ["policy"],
        ("all steps", "over oracle", "shares", "reaction", "moves", "false", "once"),
    )
    for run in runs:
        table.add_row(
            run.policy,
            _time(run.full_time_s, first.full_time_s, unit="s"),
            f"{run.gap_to_oracle_pct:+.1f} %",
            f"{run.shares_gap_pct:+.1f} %",
            "-" if run.first_reaction_steps is None else f"{run.first_reaction_steps} steps",
            str(run.reallocations),
            str(run.false_reallocations),
            _once(run),
        )
    return table


def _event_table(runs: Sequence[RunSummary]) -> Table:
    """A row per event and policy, without policies that never moved."""
    shown = [run for run in runs if any(event.moves for event in run.events)]
    table = _table(
        "each event, in steps",
        "reaction: from onset to the decision; lag: from there to the first step under the new shares; back: newest "
        "step known when shares near the optimum were asked for again, after the event's end. A good answer to a "
        "cluster-wide slowdown is no move.",
        ["event", "policy"],
        ("reaction", "lag", "back", "moves"),
    )
    for index, event in enumerate(runs[0].events if shown else ()):
        who = "everybody" if event.rank is None else f"rank {event.rank} ({event.device})"
        label = f"{who} {event.factor:g}x, {event.onset_step}-{event.end_step - 1}"
        for run in shown:
            table.add_row(label if run is shown[0] else "", run.policy, *_answer(run.events[index]))
    return table


def _answer(event: EventOutcome) -> tuple[str, str, str, str]:
    figures = (event.reaction_steps, event.lag_steps, event.recovery_steps)
    reaction, lag, back = ("-" if steps is None or event.kind != "slowdown" else str(steps) for steps in figures)
    return reaction, lag, back, str(event.moves)


def _growth_table(runs: Sequence[RunSummary], settings: DemoSettings) -> Table:
    first = runs[0]
    table = _table(
        f"{first.num_epochs} epochs of the same rows, global batch from {settings.global_batch_size} to at most "
        f"{settings.growth_factor * settings.global_batch_size}, against {first.policy}",
        f"target: accuracy {settings.target_accuracy:g} on the test rows ({settings.data}).",
        ["policy"],
        ("all steps", "target in", "accuracy", "steps", "batch", "LR factor", "once"),
    )
    for run in runs:
        last = run.batch_changes[-1] if run.batch_changes else None
        table.add_row(
            run.policy,
            _time(run.full_time_s, first.full_time_s, unit="s"),
            _time(run.time_to_target_s, first.time_to_target_s, unit="s"),
            "-" if run.final_accuracy is None else f"{run.final_accuracy:.4f}",
            str(run.num_steps),
            str(sum(run.local_batch_sizes)),
            f"{last.lr_factor if last else 1.0:.2f}",
            _once(run),
        )
    return table


def _change_table(runs: Sequence[RunSummary]) -> Table:
    table = _table("changes of the global batch", "", ["policy", "step", "batch", "LR factor"], [])
    table.add_column("why")
    for run in runs:
        for change in run.batch_changes:
            batch = f"{change.before} > {change.after}"
            table.add_row(run.policy, str(change.step), batch, f"{change.lr_factor:.2f}", change.reason)
    return table


def _tiles_table(runs: Sequence[RunSummary]) -> Table:
    first = runs[0]
    optimum = first.optimum_local_batch_sizes
    table = _table(
        f"shares where the truth is stairs, against {first.policy}",
        f"best: the exact optimum of the stairs, {_shares(optimum)} rows in {1e3 * first.optimum_step_s:.0f} ms. "
        "exact: step time of the last shares by the true curves, without noise. step: median of the run's second half. "
        "trials: candidates that a search had measured / told back.",
        ["policy"],
        ("exact", "x best", "step", "shares", "searches", "trials", "once"),
    )
    for run in runs:
        searches = run.searches
        table.add_row(
            run.policy,
            _time(run.exact_step_s, first.exact_step_s, unit="ms"),
            f"{run.exact_step_s / run.optimum_step_s:.3f}",
            f"{1e3 * run.settled_median_step_s:.0f} ms",
            _shares(run.local_batch_sizes),
            str(searches.started),
            f"{searches.trials} / {searches.told}",
            _once(run),
        )
    return table


def _once(run: RunSummary) -> str:
    return "yes" if run.rows_seen_exactly_once else "NO"


def _shares(local_batch_sizes: Sequence[int]) -> str:
    return "/".join(map(str, local_batch_sizes))


def _time(value: float | None, reference: float | None, *, unit: Literal["s", "ms"]) -> str:
    """A time, and below it its change against the reference."""
    if value is None:
        return "never"
    text = f"{value:.1f} s" if unit == "s" else f"{1e3 * value:.0f} ms"
    return text if not reference or value == reference else f"{text}\n{100 * (value / reference - 1):+.0f} %"
