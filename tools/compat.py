"""Run a part of the tests with the lowest or the newest versions that pyproject.toml allows: ``make compat``.

A fresh virtual environment gets the wheel, not the source tree, with every direct dependency at its lower bound
(``lowest``) or at whatever the index has newest (``newest``). Then run: the pure rooms, real gloo processes, Ax's
helper, a real local Ray, and the command line. It downloads gigabytes and takes half an hour, so CI does not run it.

    python tools/compat.py lowest
    python tools/compat.py newest --pin torch==2.9.1    # any version, to find a bound
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEST_TOOLS = ("pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.100")
SHOWN = ("ray", "torch", "numpy", "scipy", "scikit-learn", "ax-platform", "pandas", "typer", "rich", "pyyaml", "jinja2")

# What each dependency is used for at least once: a subset, since it is run on two sets of versions by hand.
CHECKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "pure rooms",
        ("tests/core", "tests/scenario", "tests/policies/test_policy_contract.py", "tests/sim/test_sim_engine.py"),
    ),
    ("configuration", ("tests/train/test_train_config.py", "tests/train/test_train_config_fuzz.py")),
    (
        "gloo processes",
        (
            "tests/worker/test_worker_gradients.py",
            "tests/worker/test_worker_switching.py",
            "tests/worker/test_worker_side_group.py",
            "tests/worker/test_worker_presence.py",
        ),
    ),
    ("search with Ax", ("tests/search/test_search_helper.py",)),
    ("local Ray", ("tests/train/test_train_trainer.py",)),
    ("command line", ("tests/cli/test_cli_commands.py", "tests/cli/test_cli_plan.py")),
)
COMMANDS = (("--version",), ("plan", "-c", "4xT4,4xV100", "-w", "resnet50"), ("config", "init", "-"), ("env", "--json"))


def main() -> int:
    """Make the environment, run the checks, and say what came of each."""
    parser = argparse.ArgumentParser(description="Tests with the lowest or newest versions allowed.")
    parser.add_argument("which", choices=("lowest", "newest"))
    parser.add_argument("--pin", action="append", default=[], help="a requirement in place of the bound; repeat")
    parser.add_argument("--venv", type=Path, help="an environment to use as it is, or to make there and keep")
    parser.add_argument("--only", help="checks whose name contains this")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rex-ray-compat-") as scratch:
        folder = Path(scratch)
        python = make_environment(options.venv or folder / "venv", wanted(options.which, options.pin))
        wheel = run([python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, copy_of_the_source(folder)])
        run([python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", *folder.glob("*.whl")])
        assert wheel == 0
        show_versions(python)
        tree = copy_of_the_tests(folder)
        outcomes = {
            name: run([python, "-m", "pytest", "-q", "-x", "-o", "filterwarnings=default", *paths], tree)
            for name, paths in CHECKS
            if not options.only or options.only in name
        }
        program = python.parent / "rex-ray"
        outcomes["commands"] = max(run([program, *words], tree, quiet=True) for words in COMMANDS)
    print(
        f"\n{options.which}:", ", ".join(f"{name} {'ok' if code == 0 else 'FAILED'}" for name, code in outcomes.items())
    )
    return int(any(outcomes.values()))


def wanted(which: str, pins: list[str]) -> list[str]:
    """Return the requirements to install: every direct dependency, at its lower bound or without one."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    given = {name_of(pin): pin for pin in pins}
    found = [
        given.pop(name_of(bound), lowered(bound) if which == "lowest" else bound) for bound in project["dependencies"]
    ]
    return [*found, *given.values()]


def name_of(requirement: str) -> str:
    """Return a requirement's package, without extras and version."""
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower()


def lowered(requirement: str) -> str:
    """Return ``name==bound`` for ``name>=bound``."""
    return re.sub(r">=\s*([\w.]+).*", r"==\1", requirement)


def make_environment(folder: Path, requirements: list[str]) -> Path:
    """Make a virtual environment with these requirements, unless there is one, and return its interpreter."""
    python = folder.resolve() / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", folder])
        print("installing", *requirements, flush=True)
        run([python, "-m", "pip", "install", "-q", "--upgrade", "pip"])
        if run([python, "-m", "pip", "install", "-q", *requirements, *TEST_TOOLS]):
            sys.exit("these versions do not install together")
    return python


def copy_of_the_source(folder: Path) -> Path:
    """Return a copy of what the wheel is built from: a build leaves files behind, and takes up those left before."""
    target = folder / "source"
    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, target)
    shutil.copytree(ROOT / "rex_ray", target / "rex_ray", ignore=shutil.ignore_patterns("__pycache__"))
    return target


def copy_of_the_tests(folder: Path) -> Path:
    """Return a tree with the tests and what they import, but without the library: the installed one is tested."""
    target = folder / "tree"
    target.mkdir()
    shutil.copy(ROOT / "pyproject.toml", target)
    for name in ("tests", "workloads", "experiments"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    return target


def show_versions(python: Path) -> None:
    """Print what is installed."""
    program = f"from importlib.metadata import version as v; print(*(f'{{n}} {{v(n)}}' for n in {SHOWN!r}), sep=', ')"
    run([python, "-c", program])


def run(words: list[str | Path] | tuple[str | Path, ...], folder: Path | None = None, *, quiet: bool = False) -> int:
    """Run a command and return its exit code."""
    variables = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": ""}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL if quiet else None,
        check=False,
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
