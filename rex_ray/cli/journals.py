"""The commands about runs that were made, all from their journals: ``rex-ray replay``, ``report`` and ``audit``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rex_ray.core.errors import ConfigError

__all__ = ["audit", "replay", "report"]

EXIT_DIFFERENT = 1

RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="A run's storage folder, or the rex_ray or journal folder inside it.", show_default=False
    ),
]


def replay(
    run: RunArgument,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 unless every command and note comes out the same.")
    ] = False,
) -> None:
    """Feed a run's journal to a fresh controller: its decisions, and whether they come out the same.

    Example: rex-ray replay runs/cifar10 --check
    """
    from rex_ray.cli.replaying import replay_run  # noqa: PLC0415

    if not replay_run(run, Console()) and check:
        raise typer.Exit(EXIT_DIFFERENT)


def report(
    run: RunArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write.", show_default="RUN/report.html")
    ] = None,
) -> None:
    """Write one self-contained HTML page on a run.

    Example: rex-ray report runs/cifar10 --output cifar10.html
    """
    from rex_ray.report.page.html import render_html  # noqa: PLC0415
    from rex_ray.report.reading.load import load_run  # noqa: PLC0415

    page = render_html(load_run(run))
    target = run / "report.html" if output is None else output
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        # A file in the place of the folder: the system says "File exists", which sounds as if nothing were replaced.
        why = f"{target.parent} is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(f"cannot write {target}: {why}; choose another file with --output") from error
    sys.stdout.write(f"{target}\n")


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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Measure how often the slowdown trigger is wrong on a run's own times, by permuting them.

    Example: rex-ray audit runs/cifar10 --copies 99
    """
    from rex_ray.cli.auditing import audit_document, print_audit  # noqa: PLC0415

    found = audit_document(run, num_copies=copies, block_steps=block, seed=seed)
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        print_audit(found, Console())
