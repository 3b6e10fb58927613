"""How often each judgement is wrong: ``python -m experiments.calibration --json FILE``, ``--quick``, ``--only A,B``.

Runs every module of this package on its share of the time: ten minutes in all on two quiet cores, under one with
``--quick``. A module that is missing or fails is named in the findings and in the exit code; the others still run. The
JSON is written anew after each of them, so that an interrupted run keeps what it had measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments._harness import Findings, Row, Settings, print_table, to_document
from experiments.calibration._bounds import Budget, Result
from experiments.calibration._figures import CHARTS, draw
from experiments.calibration._goals import FIGURES, verdicts
from workloads.arguments import Parser, output_file, refusing, whole

__all__ = ["MODULES", "Measure", "main"]

MODULES = ("gns", "growth", "trigger", "split", "search", "cost")
"""What is measured, in this order."""

Measure = Callable[[Budget], Result]

_LIBRARIES = ("rex-ray", "numpy", "scipy", "ax-platform")


class MissingModuleError(Exception):
    """A module that nobody has written yet."""


@dataclass(slots=True)
class _Run:
    """What has been measured so far."""

    budget: Budget
    figures: dict[str, float] = field(default_factory=dict)
    other_figures: dict[str, float] = field(default_factory=dict)
    tables: dict[str, Sequence[Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether every module asked for was measured."""
        return all(module["status"] == "ok" for module in self.modules.values())

    def is_measured(self, table: str) -> bool:
        """Whether the module that a table belongs to was measured."""
        return self.modules.get(table.partition(".")[0], {}).get("status") == "ok"

    def take(self, name: str, result: Result) -> None:
        """Add a module's findings; a named figure comes from the module that it belongs to alone."""
        named = {figure.name for figure in FIGURES if figure.module == name}
        for key, value in result.figures.items():
            (self.figures if key in named else self.other_figures)[key] = float(value)
        self.tables |= {f"{name}.{key}": rows for key, rows in result.tables.items()}
        self.notes.extend(f"{name}: {note}" for note in result.notes)

    def document(self, command: str) -> dict[str, object]:
        """The JSON: an experiment's five keys, and what a calibration adds to them."""
        settings = Settings(quick=self.budget.quick, seed=self.budget.seed)
        findings = Findings(figures=self.figures, tables=self.tables, settings={"level": 0.95})
        return to_document("calibration", command, settings, findings) | {
            "other_figures": self.other_figures,
            "notes": self.notes,
            "verdicts": verdicts(self.figures, self.tables),
            "modules": self.modules,
            "machine": _machine(),
        }


def load(name: str) -> Measure:
    """Return a module's ``measure``.

    Raises:
        MissingModuleError: there is no such module.
    """
    path = f"experiments.calibration.{name}"
    if find_spec(path) is None:
        raise MissingModuleError(f"there is no {path} yet")
    measure: Measure = importlib.import_module(path).measure
    return measure


def measure_one(run: _Run, name: str, loader: Callable[[str], Measure]) -> None:
    """Measure one module into ``run``; whatever goes wrong there is its own status."""
    started, cpu_started = time.perf_counter(), time.process_time()
    status: dict[str, Any] = {"status": "ok"}
    try:
        result = loader(name)(run.budget)
        _check(name, result)
        run.take(name, result)
    except MissingModuleError as error:
        status = {"status": "missing", "error": str(error)}
    except Exception as error:  # noqa: BLE001 - one module's fault must not cost the others' findings
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        status = {"status": "failed", "error": f"{type(error).__name__}: {error} ({place})"}
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    run.modules[name] = status | {"wall_s": round(wall_s, 2), "cpu_s": round(cpu_s, 2)}


def main(argv: Sequence[str] | None = None, loader: Callable[[str], Measure] = load) -> int:
    """Parse the command line, measure, write the JSON and its drawings, print the table.

    Args:
        argv: arguments; default ``sys.argv[1:]``.
        loader: finds a module's ``measure`` by name.

    Returns:
        The exit code: 1 where a module is missing or failed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parsed = _parse(arguments)
    names = [name for name in MODULES if name in parsed.only]
    command = shlex.join(["python", "-m", "experiments.calibration", *arguments])
    run = _Run(Budget(quick=parsed.quick, seed=parsed.seed))
    parsed.json.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    for name in names:
        _say(started, f"{name} ...")
        measure_one(run, name, loader)
        _write(parsed.json, run.document(command))
        module = run.modules[name]
        took = f"after {module['wall_s']} s (cpu {module['cpu_s']} s)"
        _say(started, f"{name}: {module['status']} {took} {module.get('error', '')}".rstrip())
    drawings = draw(run.tables)
    for title, svg in drawings.items():
        parsed.json.with_name(f"{parsed.json.stem}-{title}.svg").write_text(svg, encoding="utf-8")
    _print(run)
    absent = [chart.name for chart in CHARTS if run.is_measured(chart.table) and chart.name not in drawings]
    more = f"; not drawn, since their tables have changed: {', '.join(absent)}" if absent else ""
    _say(started, f"written: {parsed.json} and {len(drawings)} drawings beside it{more}")
    return 0 if run.is_whole else 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.calibration", description=__doc__)
    parser.add_argument("--json", type=output_file, required=True, metavar="FILE", help="where to write the findings")
    parser.add_argument("--quick", action="store_true", help="about a tenth of the time: same code, wider bounds")
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--only", type=_names, default=MODULES, metavar="A,B", help=f"of {', '.join(MODULES)}")
    with refusing():
        return parser.parse_args(arguments)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in MODULES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no such module; there are: {', '.join(MODULES)}")
    return names


def _check(name: str, result: Result) -> None:
    """Refuse findings that the JSON could not hold: a figure that is not finite, rows of different columns."""
    to_document(name, "", Settings(), Findings(figures=result.figures, tables=result.tables))
    json.dumps([list(result.tables.items()), list(result.notes)], allow_nan=False, default=_plain)


def _write(path: Path, document: dict[str, object]) -> None:
    """Replace the file in one move: who reads it sees the last whole one."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(document, indent=2, allow_nan=False, default=_plain) + "\n", encoding="utf-8")
    part.replace(path)


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's own."""
    plain = value.item() if hasattr(value, "item") else None
    if plain is None or (isinstance(plain, float) and not math.isfinite(plain)):
        raise TypeError(f"the JSON takes finite numbers and plain values, got {value!r}")
    return plain


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "libraries": {library: _version(library) for library in _LIBRARIES},
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "absent"


def _print(run: _Run) -> None:
    console = Console()
    for note in run.notes:
        console.print(f"note, {note}", markup=False, highlight=False)
    # Three digits fit a terminal of eighty columns; the file has them all.
    asked: list[Row] = [
        {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in row.items()}
        for row, figure in zip(verdicts(run.figures, run.tables), FIGURES, strict=True)
        if figure.module in run.modules
    ]
    print_table("calibration (?: the goal lies within the 95 % bounds)", asked, console)
    for name, module in run.modules.items():
        if module["status"] != "ok":
            console.print(f"{name}: {module['status']}: {module['error']}", markup=False, highlight=False)


def _say(started: float, line: str) -> None:
    print(f"[{time.perf_counter() - started:6.1f} s] {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
