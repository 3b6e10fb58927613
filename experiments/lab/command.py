"""The command line of experiments that sweep cells: where to play them, how many at once, what to record."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TypeAlias

from experiments._harness import Findings, Settings, parsed_apart
from experiments._page import main as run_with_page
from experiments.lab.cells import Cell, Result
from experiments.lab.study import Study
from experiments.lab.sweep import run_cells
from workloads.arguments import Parser, output_folder, whole

__all__ = ["Runner", "main"]

Runner: TypeAlias = Callable[[Sequence[Cell]], list[Result]]


def main(name: str, study: Callable[[Settings, Runner], Study], argv: Sequence[str]) -> None:
    """Run an experiment as ``_page.main`` does, its cells by a sweep; with ``--record DIR``, write all of it there.

    Args:
        name: the module's name under ``experiments``.
        study: the experiment.
        argv: arguments.
    """
    parser = Parser(add_help=False)
    parser.add_argument(
        "--out",
        type=output_folder,
        default="out/lab",
        metavar="DIR",
        help="where played cells are kept (default: %(default)s)",
    )
    parser.add_argument("--jobs", type=whole(0), metavar="N", help="cells at once; 0: without Ray (default: the cores)")
    parser.add_argument("--record", type=output_folder, metavar="DIR", help="where to write tables and charts")
    known, others = parsed_apart(parser, argv)

    def measure(settings: Settings) -> Findings:
        # A quick run is over before a cluster has started.
        jobs = 0 if known.jobs is None and settings.quick else known.jobs
        found = study(settings, lambda cells: run_cells(name, cells, out=known.out, jobs=jobs))
        if known.record is not None:
            # Matplotlib is slow to import, and is not wanted otherwise.
            from experiments.lab.record import record  # noqa: PLC0415

            record(known.record, name, shlex.join(["python", "-m", f"experiments.{name}", *argv]), settings, found)
        return found.findings

    measure.__doc__ = study.__doc__
    run_with_page(name, measure, others, apart=[parser])
