"""Ax may be absent: nothing but a search that needs it asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ax", "botorch", "gpytorch"}:
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
import rex_ray
failed = []
for module in pkgutil.walk_packages(rex_ray.__path__, "rex_ray."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError:
        failed.append(module.name)
print(*failed)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_d7_everything_but_its_one_importer_can_be_imported_without_ax() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["rex_ray.search.ax_proposer"]
