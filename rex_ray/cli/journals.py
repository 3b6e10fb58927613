"""The commands about runs that were made, all from their journals: ``rex-ray replay``, ``report`` and ``audit``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rex_ray.cli import completing
from rex_ray.cli.output import EXIT_FINDING, JsonOption, write_json
from rex_ray.cli.streams import answer_console
from rex_ray.core.errors import ConfigError

__all__ = ["audit", "replay", "report"]

RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run's storage folder, or the rex_ray or journal folder inside it.",
        show_default=False,
        autocompletion=completing.runs,
    ),
]


def replay(
    run: RunArgument,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 unless every command and note comes out the same.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Feed a run's journal to a fresh controller: its decisions, and whether they come out the same.

    Example: rex-ray replay runs/cifar10 --check
    """
    from rex_ray.cli.replaying import print_replay, replay_document  # noqa: PLC0415

    found = replay_document(run)
    if as_json:
        write_json(found)
    else:
        print_replay(found, answer_console())
    if check and not found["is_identical"]:
        raise typer.Exit(EXIT_FINDING)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Storage folders of runs; several are compared.",
            show_default=False,
            autocompletion=completing.runs,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write; - for standard output.",
            show_default="RUN/report.html; of several runs compare.html",
        ),
    ] = None,
    estimates: Annotated[
        bool,
        typer.Option(
            "--estimates/--no-estimates", help="Replay the run's curves under other policies; takes some seconds."
        ),
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as one JSON document; a page only with --output.")
    ] = False,
) -> None:
    """Write one self-contained HTML page on a run, or on several side by side.

    Example: rex-ray report runs/bsp runs/rex --output compare.html
    """
    from rex_ray.cli.reporting import page_of, report_runs, write_page  # noqa: PLC0415

    to_stdout = output == Path("-")
    if to_stdout and as_json:
        raise ConfigError("--json and --output - both want standard output: leave one out")
    reports = report_runs(runs, with_estimates=estimates)
    if to_stdout:
        sys.stdout.write(page_of(reports))
    elif output is not None or not as_json:
        target = write_page(reports, output or (runs[0] / "report.html" if len(runs) == 1 else Path("compare.html")))
        if not as_json:
            sys.stdout.write(f"{target}\n")
    if as_json:
        write_json({"runs": [one.document() for one in reports]})


def audit(
    run: RunArgument,
    copies: Annotated[
        int | None,
        typer.Option(min=1, max=9999, help="Permuted copies.", show_default="what some seconds allow, 39 at least"),
    ] = None,
    block: Annotated[
        int,
        typer.Option(
            min=1,
            help="Steps that stay together: more than noise remembers (at a correlation of .9, 3 % is left of 32).",
        ),
    ] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the permutations.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure how often the slowdown trigger is wrong on a run's own times, by permuting them.

    Example: rex-ray audit runs/cifar10 --copies 99
    """
    from rex_ray.cli.auditing import audit_document, print_audit  # noqa: PLC0415

    found = audit_document(run, num_copies=copies, block_steps=block, seed=seed)
    if as_json:
        write_json(found)
    else:
        print_audit(found, answer_console())
