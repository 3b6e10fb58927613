"""What every experiment shares: its command line, the JSON that it writes and the tables that it prints.

An experiment is a function from ``Settings`` to ``Findings``. It never parses arguments, prints or writes::

    def measure(settings: Settings) -> Findings: ...

    if __name__ == "__main__":
        main("overhead", measure)

The JSON has the same five keys for all of them: ``name``, ``command``, ``settings``, ``figures`` (flat: name to
number), ``tables`` (name to a list of rows).
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from rich.console import Console
from rich.table import Table

from rex_ray.core.types import FloatArray
from workloads.arguments import Parser, output_file, refusing, whole

__all__ = ["Findings", "Row", "Settings", "bootstrap_median", "main", "parsed_apart", "print_table", "to_document"]

Scalar: TypeAlias = float | int | str | bool | None
Row: TypeAlias = Mapping[str, Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line asked for.

    Attributes:
        quick: a smaller run that shows the way works; its figures are wider, not wrong.
        seed: every random choice of the experiment follows from it.
    """

    quick: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What an experiment found.

    Attributes:
        figures: flat names to finite numbers; a figure that could not be measured is left out, never NaN.
        tables: rows for people; the first row's keys are the columns.
        settings: what the experiment itself chose (counts, sizes, targets), beside the command line's.
    """

    figures: Mapping[str, float]
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    settings: Mapping[str, Scalar] = field(default_factory=dict)


def bootstrap_median(values: FloatArray, *, seed: int, num_resamples: int = 4000) -> tuple[float, float, float]:
    """Median of ``values`` with its 95 % percentile bootstrap interval.

    Args:
        values: one independent value per pair or run, shape ``[k]``.
        seed: seeds the resampling.
        num_resamples: resamples; the interval's ends move by less than 1 % of its width beyond some thousands.

    Returns:
        ``(median, low, high)``.

    Raises:
        ValueError: no value, or one that is not finite.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.size == 0 or not np.isfinite(sample).all():
        raise ValueError(f"the bootstrap needs finite values, got {sample.tolist()}")
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(sample, size=(num_resamples, sample.size)), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(sample)), float(low), float(high)


def to_document(name: str, command: str, settings: Settings, findings: Findings) -> dict[str, object]:
    """The JSON document of one run.

    Raises:
        ValueError: a figure that is not a finite number, or a table whose rows differ in their columns.
    """
    for key, value in findings.figures.items():
        if not math.isfinite(value):
            raise ValueError(f"figure {key!r} of experiment {name!r} is {value}; leave out what was not measured")
    for key, rows in findings.tables.items():
        if len({tuple(row) for row in rows}) > 1:
            raise ValueError(f"the rows of table {key!r} of experiment {name!r} have different columns")
    return {
        "name": name,
        "command": command,
        "settings": {"quick": settings.quick, "seed": settings.seed, **findings.settings},
        "figures": {key: float(value) for key, value in findings.figures.items()},
        "tables": {key: [dict(row) for row in rows] for key, rows in findings.tables.items()},
    }


def print_tables(findings: Findings, console: Console) -> None:
    """Print every table, then the figures as a table of their own."""
    figures: list[Row] = [{"figure": name, "value": value} for name, value in findings.figures.items()]
    for title, rows in {**findings.tables, "figures": figures}.items():
        print_table(title, rows, console)


def print_table(title: str, rows: Sequence[Row], console: Console) -> None:
    """Print one table; the first row's keys are its columns."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(rows[0] if rows else ()):
        # The first column names the row: a name cut short is no name.
        table.add_column(column, no_wrap=index == 0, overflow="fold" if index == 0 else "ellipsis")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    console.print(table)


def parsed_apart(parser: Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse those options that a wrapper of ``main`` adds, and return the others' arguments beside them.

    What cannot work ends the process, in one line and with exit code 2.
    """
    with refusing():
        return parser.parse_known_args(argv)


def main(
    name: str,
    measure: Callable[[Settings], Findings],
    argv: Sequence[str] | None = None,
    *,
    apart: Sequence[Parser] = (),
) -> None:
    """Parse the command line, measure, print the tables and write the JSON.

    What cannot work ends the process before the measurement, in one line and with exit code 2.

    Args:
        name: the module's name under ``experiments``.
        measure: the experiment.
        argv: arguments; default ``sys.argv[1:]``.
        apart: what ``parsed_apart`` was given; the help has their options too.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog=f"python -m experiments.{name}", description=measure.__doc__, parents=apart)
    parser.add_argument("--json", type=output_file, required=True, metavar="FILE", help="where to write the findings")
    parser.add_argument("--quick", action="store_true", help="a smaller run: wider intervals, same code")
    parser.add_argument("--seed", type=whole(0), default=0, help="of every random choice (default: 0)")
    with refusing():
        parsed = parser.parse_args(arguments)

    settings = Settings(quick=parsed.quick, seed=parsed.seed)
    findings = measure(settings)
    command = shlex.join(["python", "-m", f"experiments.{name}", *arguments])
    document = to_document(name, command, settings, findings)
    # Written before anything is printed: a broken pipe must not cost the findings of a long run.
    parsed.json.parent.mkdir(parents=True, exist_ok=True)
    parsed.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print_tables(findings, Console())


def _text(value: Scalar) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.5g}"
        case None:
            return "-"
        case _:
            return str(value)
