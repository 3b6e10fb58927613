"""A matrix of cells run by Ray Tune: one trial per cell, as many at once as cores, resumable.

Every matrix has a folder of its own, named after what it is: the digest of its cells and of the code that plays them.
The same command goes on where it was killed; another matrix, or other code, begins another folder, so that results are
never mixed. In the folder, ``cells/KEY.json`` is a played cell and the only thing that is read back; ``matrix.json``
says what is to be played, and ``tune/`` is Tune's own record.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib import metadata
from pathlib import Path

from experiments.lab.cells import Cell, Result
from experiments.lab.fixed import chosen, is_open, pilot_cells
from experiments.lab.play import play

__all__ = ["code_digest", "matrix_folder", "play_into", "result_file", "run_cells"]

_ROOT = Path(__file__).parents[2]
# What a cell's result can depend on; who prints, plans or drives live workers is not among it.
_CODE = (
    *(f"rex_ray/{room}" for room in ("core", "scenario", "policies", "control", "search", "sim")),
    "rex_ray/worker/data/sampler.py",
    "rex_ray/worker/data/schedule.py",
    "rex_ray/hosting/search_events.py",
    "workloads",
    "experiments/_searcher.py",
    "experiments/lab",
)
_LIBRARIES = ("numpy", "scipy", "torch", "ax-platform")
# Who asks for cells and who shows them: an hour's results outlive a chart's colour.
_ASKING = ("charts", "command", "headline", "record", "study", "summary", "sweep", "tables", "tasks", "tune")


def run_cells(name: str, cells: Sequence[Cell], *, out: Path, jobs: int | None = None) -> list[Result]:
    """Play cells, those apart that were played before.

    Fixed controls whose batch is still to be found are swept first, on pilot seeds, as a matrix of their own.

    Args:
        name: of the experiment; folders below ``out`` begin with it.
        cells: in the order in which they should be played; equal ones are played once.
        out: where the folders are.
        jobs: cells at once, default as many as cores; 0 plays them in this process, without Ray.

    Returns:
        The results in the order of ``cells``.

    Raises:
        RuntimeError: cells that failed twice, each named with its own error; or the sweep was interrupted.
    """
    open_cells = [cell for cell in cells if is_open(cell)]
    pilots = [pilot for cell in open_cells for pilot in pilot_cells(cell)]
    with contextlib.ExitStack() as stack:
        found = _played(f"{name}-pilots", pilots, out, jobs, stack)
        settled = {cell.key: chosen(cell, found) for cell in open_cells}
        closed = [settled[cell.key][0] if cell.key in settled else cell for cell in cells]
        results = _played(name, closed, out, jobs, stack)
    return [
        replace(results[settled[cell.key][0].key], swept_s=settled[cell.key][1])
        if cell.key in settled
        else results[cell.key]
        for cell in cells
    ]


def _played(
    name: str, cells: Sequence[Cell], out: Path, jobs: int | None, stack: contextlib.ExitStack
) -> Mapping[str, Result]:
    """Return the result of each cell by key; what has to be started for that is taken down by the stack."""
    by_key = {cell.key: cell for cell in cells}
    if not by_key:
        return {}
    folder = matrix_folder(name, list(by_key.values()), out)
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    matrix = {
        "version": metadata.version("rex-ray"),
        "code": code_digest(),
        "cells": [asdict(c) for c in by_key.values()],
    }
    write_whole(folder / "matrix.json", json.dumps(matrix, indent=1))
    missing = [cell for key, cell in by_key.items() if not result_file(folder, key).exists()]
    if missing and jobs == 0:
        for cell in missing:
            play_into(folder, cell)
    elif missing:
        # Ray is slow to import, and a sweep in this process needs none.
        from experiments.lab.tune import local_ray, tune_cells  # noqa: PLC0415

        at_once = jobs or len(os.sched_getaffinity(0))
        stack.enter_context(local_ray(at_once))
        tune_cells(name, list(by_key.values()), folder, jobs=at_once)
    return {key: Result.from_json(result_file(folder, key).read_text(encoding="utf-8")) for key in by_key}


def play_into(folder: Path, cell: Cell) -> Result:
    """Return a cell's result, from its file in the folder or else played and written there."""
    file = result_file(folder, cell.key)
    if file.exists():
        return Result.from_json(file.read_text(encoding="utf-8"))
    result = play(cell)
    write_whole(file, result.to_json())
    return result


def result_file(folder: Path, key: str) -> Path:
    """Return where the result of a cell is."""
    return folder / "cells" / f"{key}.json"


def write_whole(file: Path, text: str) -> None:
    """Write a file such that whoever finds it finds all of it."""
    part = file.with_name(f"{file.name}.{os.getpid()}")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(file)


def matrix_folder(name: str, cells: Sequence[Cell], out: Path) -> Path:
    """Return the folder of a matrix: the same for the same cells in any order, played by the same code."""
    text = "\n".join([metadata.version("rex-ray"), code_digest(), *sorted(cell.key for cell in cells)])
    return out / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@cache
def code_digest() -> str:
    """Return a digest of the code, tables and libraries that results depend on, as they were when first asked for."""
    digest = hashlib.sha256(repr([(name, metadata.version(name)) for name in _LIBRARIES]).encode())
    for room in _CODE:
        path = _ROOT / room
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            is_asking = room == "experiments/lab" and file.stem in _ASKING
            if file.suffix in {".py", ".toml"} and not is_asking:
                digest.update(str(file.relative_to(_ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
