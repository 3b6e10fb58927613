"""What keeps the layers apart at run time, beside the import contracts in pyproject.toml (`lint-imports`).

The contracts read import statements. These tests look at what they cannot see: what a fresh process really holds
after importing a layer, reads of a clock or of numpy's random module, and emulation in a production path.
"""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rex_ray

PACKAGE = Path(rex_ray.__file__).parent
PURE = ("core", "scenario", "policies", "control", "watch", "sim")
HEAVY = ("torch", "ray", "pandas", "ax")

# Who may make a generator, from a seed given as data: the controller one per event, scenario and sim their noise.
GENERATOR_MAKERS = {"control", "scenario", "sim"}
SEEDED = {"default_rng", "SeedSequence", "Philox", "PCG64"}
AX_IMPORTER = "rex_ray.search.ax_proposer"
EMULATION = "rex_ray.worker.emulation"
# Who may know of the emulation: itself, and the demo that runs on an emulated cluster.
MAY_EMULATE = (PACKAGE / "worker" / "emulation.py", PACKAGE / "demo")

CLOCKS = {"time", "datetime", "timeit"}
CHANCE = {"random", "secrets", "uuid"}
# numpy.random names that describe a generator; everything else there makes one or draws from a global one.
GENERATOR_TYPES = {"Generator", "BitGenerator"}


def modules_of(*packages: str) -> list[str]:
    names = []
    for package in packages:
        names.append(f"rex_ray.{package}")
        found = pkgutil.walk_packages([str(PACKAGE / package)], prefix=f"rex_ray.{package}.")
        names.extend(module.name for module in found)
    return names


def sources(*roots: Path) -> Iterator[tuple[Path, ast.Module]]:
    for root in roots:
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            yield path, ast.parse(path.read_text(), filename=str(path))


def imported_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield every absolute dotted name that an import statement binds or passes through."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def numpy_random_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield uses of ``numpy.random`` other than as the type of an injected generator."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in {"np.random", "numpy.random"}:
            if node.attr not in GENERATOR_TYPES:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "numpy.random":
            yield from ((node.lineno, a.name) for a in node.names if a.name not in GENERATOR_TYPES)


def unseeded_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield uses of ``numpy.random`` that are not a seeded generator's construction."""
    seeded = {
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.args
        and node.func.attr in SEEDED
    }
    at = {(node.lineno, node.attr) for node in seeded}
    yield from (use for use in numpy_random_uses(tree) if use not in at)


def loaded_after_importing(modules: list[str]) -> set[str]:
    """Return the top-level packages that a fresh process holds after importing ``modules``."""
    program = "import importlib, json, sys\n"
    program += f"for name in {modules!r}: importlib.import_module(name)\n"
    program += "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("package", [*PURE, "config"])
def test_a_fresh_process_that_imports_a_pure_package_holds_nothing_heavy(package: str) -> None:
    modules = modules_of(package) if (PACKAGE / package).is_dir() else [f"rex_ray.{package}"]
    loaded = loaded_after_importing(modules)
    assert "numpy" in loaded or package == "config"  # the probe saw a real import
    assert not loaded & set(HEAVY)


def test_importing_rex_ray_itself_is_light() -> None:
    assert not loaded_after_importing(["rex_ray"]) & {*HEAVY, "numpy", "scipy"}


def test_the_probe_sees_what_is_loaded() -> None:
    assert "pandas" in loaded_after_importing(["pandas"])


def test_the_worker_runs_without_ray() -> None:
    loaded = loaded_after_importing(modules_of("worker"))
    assert "torch" in loaded
    assert not loaded & {"ray", "pandas", "ax"}


def test_the_asker_of_a_search_holds_neither_ax_nor_torch_nor_ray() -> None:
    loaded = loaded_after_importing([name for name in modules_of("search") if name != AX_IMPORTER])
    assert "numpy" in loaded
    assert not loaded & {*HEAVY, "botorch"}


def test_ax_has_one_importer() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path, tree in sources(PACKAGE)
        for _, name in imported_names(tree)
        if name.partition(".")[0] in {"ax", "botorch", "gpytorch"}
    }
    assert found == {"search/ax_proposer.py"}


def test_no_pure_layer_reads_a_clock_or_draws_by_itself() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path, tree in sources(*(PACKAGE / package for package in PURE))
        for line, name in imported_names(tree)
        if name.partition(".")[0] in CLOCKS | CHANCE
    ]
    assert found == []


def test_core_and_policies_make_no_generators_and_nobody_one_without_a_seed() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line} numpy.random.{name}"
        for package in PURE
        for path, tree in sources(PACKAGE / package)
        for line, name in (unseeded_uses(tree) if package in GENERATOR_MAKERS else numpy_random_uses(tree))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import numpy as np\nrng = np.random.default_rng(0)", ["default_rng"]),
        ("from numpy.random import PCG64, Generator", ["PCG64"]),
        ("def f(rng: np.random.Generator) -> None: ...", []),
    ],
)
def test_the_search_for_generators_finds_them(source: str, expected: list[str]) -> None:
    assert [name for _, name in numpy_random_uses(ast.parse(source))] == expected


def test_a_generator_without_a_seed_is_found() -> None:
    source = "a = np.random.default_rng(seed)\nb = np.random.default_rng()\nc = np.random.normal(3)"
    assert [name for _, name in unseeded_uses(ast.parse(source))] == ["default_rng", "normal"]


def emulation_importers(*roots: Path) -> list[str]:
    return [
        f"{path}:{line}"
        for path, tree in sources(*roots)
        if not any(path == allowed or allowed in path.parents for allowed in MAY_EMULATE)
        for line, name in imported_names(tree)
        if name == EMULATION or name.startswith(EMULATION + ".")
    ]


def test_no_emulation_in_a_production_path() -> None:
    assert (PACKAGE / "worker" / "emulation.py").exists()
    assert emulation_importers(PACKAGE) == []


def test_the_search_for_emulation_finds_it_in_any_spelling(tmp_path: Path) -> None:
    for k, line in enumerate(
        (
            "import rex_ray.worker.emulation",
            "from rex_ray.worker import emulation",
            "def f():\n    from rex_ray.worker.emulation import emulated",
        )
    ):
        (tmp_path / f"m{k}.py").write_text(line)
    assert len({entry.rpartition(":")[0] for entry in emulation_importers(tmp_path)}) == 3


def test_nothing_in_production_asks_whether_it_is_emulated() -> None:
    """A flag would bring back by name what the imports forbid."""
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path, tree in sources(PACKAGE)
        if not any(path == allowed or allowed in path.parents for allowed in MAY_EMULATE)
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and "emulat" in node.id.lower())
        or (isinstance(node, ast.Attribute) and "emulat" in node.attr.lower())
    ]
    assert found == []
