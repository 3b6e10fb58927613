"""The command line of experiments that sweep cells: where to play them, how many at once, what to record."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from experiments._harness import Findings, Settings
from experiments._page import main as run_with_page
from experiments.lab.cells import Cell, Result
from experiments.lab.study import Study
from experiments.lab.sweep import run_cells

__all__ = ["Runner", "main"]

Runner: TypeAlias = Callable[[Sequence[Cell]], list[Result]]


def main(name: str, study: Callable[[Settings, Runner], Study], argv: Sequence[str]) -> None:
    """Run an experiment as ``_page.main`` does, its cells by a sweep; with ``--record DIR``, write all of it there.

    Args:
        name: the module's name under ``experiments``.
        study: the experiment.
        argv: arguments.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--out", type=Path, default=Path("out/lab"))
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--record", type=Path)
    known, others = parser.parse_known_args(argv)

    def measure(settings: Settings) -> Findings:
        # A quick run is over before a cluster has started.
        jobs = 0 if known.jobs is None and settings.quick else known.jobs
        found = study(settings, lambda cells: run_cells(name, cells, out=known.out, jobs=jobs))
        if known.record is not None:
            # Matplotlib is slow to import, and is not wanted otherwise.
            from experiments.lab.record import record  # noqa: PLC0415

            record(known.record, name, shlex.join(["python", "-m", f"experiments.{name}", *argv]), settings, found)
        return found.findings

    measure.__doc__ = f"{study.__doc__} Also: --record DIR (tables and charts), --jobs N (0: no Ray), --out DIR."
    run_with_page(name, measure, others)
