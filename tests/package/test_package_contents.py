"""The distribution: one version, and in the wheel what the library needs and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from rex_ray import __version__

pytestmark = pytest.mark.timeout(600)  # a build is a second on a quiet machine, and minutes on a crowded one

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
INPUTS = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "CITATION.cff")
# The backend overwrites sys.argv.
BUILD = (
    "import sys; from setuptools import build_meta as b\n"
    "folder = sys.argv[1]; b.build_sdist(folder); b.build_wheel(folder)\n"
)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and source distribution, built by the backend that pip would call, from a copy: a build leaves files."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in INPUTS:
        shutil.copy(ROOT / name, source)
    for name in ("rex_ray", "tests/core", "workloads"):  # the latter two have to be left out by the build
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-W", "ignore", "-c", BUILD, str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def shipped() -> set[str]:
    """Every file of the library in the repository that a process may need."""
    paths = [path for path in (ROOT / "rex_ray").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(ROOT)) for path in paths if path.suffix != ".md"}


def test_the_wheel_holds_the_library_whole_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[0]).namelist())
    info = {name for name in names if name.startswith(f"rex_ray-{__version__}.dist-info/")}
    assert names - info == shipped()
    assert {"rex_ray/py.typed", "rex_ray/scenario/profiles.toml"} <= names
    assert any(name.endswith("LICENSE") for name in info)


def test_the_source_distribution_builds_the_same_wheel_and_holds_no_tests(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert shipped() | set(INPUTS) <= names
    tops = {name.partition("/")[0] for name in names} - {""}
    assert tops - set(INPUTS) == {"rex_ray", "rex_ray.egg-info", "PKG-INFO", "setup.cfg"}


def test_there_is_one_version(built: tuple[Path, Path]) -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert "version" not in PROJECT["project"]
    metadata = zipfile.ZipFile(built[0]).read(f"rex_ray-{__version__}.dist-info/METADATA").decode()
    assert f"\nVersion: {__version__}\n" in metadata
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", __version__)


def test_the_metadata_name_every_extra_and_the_command(built: tuple[Path, Path]) -> None:
    archive = zipfile.ZipFile(built[0])
    metadata = archive.read(f"rex_ray-{__version__}.dist-info/METADATA").decode()
    extras = set(re.findall(r"^Provides-Extra: (\S+)$", metadata, flags=re.MULTILINE))
    assert extras == set(PROJECT["project"]["optional-dependencies"])
    entry_points = archive.read(f"rex_ray-{__version__}.dist-info/entry_points.txt").decode()
    assert "rex-ray = rex_ray.cli:main" in entry_points


def test_the_citation_is_of_this_software() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "type"} <= citation.keys()
    assert citation["license"] == PROJECT["project"]["license"]
    assert [reference["type"] for reference in citation["references"]] == ["article"]


@pytest.fixture(scope="session")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of a fresh environment with the wheel in it; what it depends on is borrowed from this one."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    install = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
    # On the caller's path it would find this very project installed, and install nothing.
    subprocess.run([*install, "--no-deps", "--no-index", built[0]], env=own_environ(), check=True, timeout=280)
    import torch

    (site / "zz_borrowed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return folder / "bin"


def own_environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}


def run_there(bin_folder: Path, folder: Path, *words: str, timeout_s: float = 280) -> str:
    return said_there(bin_folder, folder, "rex-ray", *words, timeout_s=timeout_s)


def said_there(bin_folder: Path, folder: Path, program: str, *words: str, timeout_s: float = 280) -> str:
    environ = own_environ()
    environ |= {"PATH": f"{bin_folder}{os.pathsep}{environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [bin_folder / program, *words]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_installed_wheel_plans(installed: Path, tmp_path: Path) -> None:
    where = said_there(installed, tmp_path, "python", "-c", "import rex_ray; print(rex_ray.__file__)")
    assert str(installed.parent) in where
    assert run_there(installed, tmp_path, "--version") == f"rex-ray {__version__}\n"
    assert "V100" in run_there(installed, tmp_path, "plan", "-c", "4xT4,4xV100", "-w", "resnet50")
    assert "global_batch_size: 256" in run_there(installed, tmp_path, "config", "init", "-")


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_installed_wheel_runs_the_demo_and_reports_on_it(installed: Path, tmp_path: Path) -> None:
    import json

    words = ("demo", "--quick", "-p", "bsp", "-p", "rex", "--output", "out", "--json")
    document = json.loads(run_there(installed, tmp_path, *words, timeout_s=1200))
    assert [run["policy"] for run in document["runs"]] == ["bsp", "rex"]
    assert all(run["rows_seen_exactly_once"] for run in document["runs"])
    page = run_there(installed, tmp_path, "report", "out/rex").strip()
    assert (tmp_path / page).read_text().startswith("<!doctype html>")
    assert "identical" in run_there(installed, tmp_path, "replay", "out/rex", "--check")
