"""The quick form of every experiment, one process each, and one table of what they found.

    python -m experiments.bench --out out/bench [--only static,transient]

An experiment that fails does not stop the others; the command fails in the end.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments._harness import Row, print_table
from workloads.arguments import Parser, output_folder, refusing

__all__ = ["EXPERIMENTS", "main", "run_one"]

EXPERIMENTS = (
    "overhead",
    "calibration",
    "limits",
    "oracle_gap",
    "static",
    "transient",
    "imagenet",
    "wikitext",
    "lbb",
    "live_vs_sim",
    "scale",
    "ablation",
    "sensitivity",
    "convergence",
    "live_sweep",
    "chaos",
)
# Where the results of cells, and of live trials, are kept.
_KEPT_AT = {
    **dict.fromkeys(("static", "transient", "imagenet", "wikitext", "ablation", "sensitivity"), ("--out", "lab")),
    "live_sweep": ("--runs", "live"),
}
_MOST_S = 300.0
_NUM_FIGURES = 4
"""Figures of one experiment in the table; all of them are in its JSON."""


def run_one(name: str, out: Path) -> Row:
    """Run the quick form of an experiment and return its line."""
    target, log = out / f"{name}.json", out / f"{name}.log"
    command = [sys.executable, "-m", f"experiments.{name}", "--quick", "--json", str(target)]
    if name in _KEPT_AT:
        option, folder = _KEPT_AT[name]
        command += [option, str(out / folder)]
    begun_s = time.perf_counter()
    with log.open("w", encoding="utf-8") as said:
        try:
            code = subprocess.run(
                command, stdout=said, stderr=subprocess.STDOUT, timeout=_MOST_S, check=False
            ).returncode
            state = "ok" if code == 0 else f"exit {code}, see {log}"
        except subprocess.TimeoutExpired:
            state = f"over {_MOST_S:.0f} s, see {log}"
    wall_s = time.perf_counter() - begun_s
    figures = json.loads(target.read_text(encoding="utf-8"))["figures"] if state == "ok" else {}
    shown = [f"{figure} {value:.4g}" for figure, value in list(figures.items())[:_NUM_FIGURES]]
    more = len(figures) - len(shown)
    return {
        "experiment": name,
        "state": state,
        "wall_s": round(wall_s, 1),
        "figures": ", ".join(shown) + (f", {more} more" if more > 0 else ""),
    }


def _clear(out: Path) -> None:
    """Remove what an earlier bench left, which would say nothing of today's; what is not a bench's stays."""
    for name in (*EXPERIMENTS, "bench"):
        for ending in ("json", "log"):
            (out / f"{name}.{ending}").unlink(missing_ok=True)
    for _, folder in _KEPT_AT.values():
        shutil.rmtree(out / folder, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run them all, print the table, write it beside the JSON files; return how many failed."""
    parser = Parser(prog="python -m experiments.bench", description=main.__doc__)
    parser.add_argument(
        "--out", type=output_folder, default="out/bench", help="where all of it goes (default: out/bench)"
    )
    parser.add_argument("--only", help="names, separated by commas")
    there = [name for name in EXPERIMENTS if importlib.util.find_spec(f"experiments.{name}") is not None]
    with refusing():
        parsed = parser.parse_args(argv)
        asked = parsed.only.split(",") if parsed.only else there
        unknown = [name for name in asked if name not in there]
        if unknown:
            parser.error(f"no experiment is called {', '.join(unknown)}; there are {', '.join(there)}")
    parsed.out.mkdir(parents=True, exist_ok=True)
    _clear(parsed.out)
    rows = []
    for name in asked:
        rows.append(run_one(name, parsed.out))
        print(f"{name}: {rows[-1]['state']}, {rows[-1]['wall_s']} s", file=sys.stderr)
    print_table("bench", rows, Console())
    (parsed.out / "bench.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return sum(row["state"] != "ok" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
