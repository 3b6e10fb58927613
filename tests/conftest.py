"""What every test shares: deterministic hypothesis, one torch thread, cheapest tests first, a word on the rest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import settings

# Read by torch and Ray when they are first imported, so set before any test module is.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

settings.register_profile("rex_ray", derandomize=True, deadline=None)
settings.load_profile("rex_ray")

# Cost in the order of patience: values, real processes, a real cluster, a real device.
_STAGES = ("dist", "ray", "gpu")

_LEFT_OUT = {"gpu": "on a machine with a CUDA device: make test-gpu", "long": "they take minutes: make test-long"}

_left_out: dict[str, int] = {}


def _stage(item: pytest.Item) -> int:
    return max((1 + k for k, marker in enumerate(_STAGES) if item.get_closest_marker(marker)), default=0)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_stage)  # stable: within a stage the files' own order stands


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        for marker in _LEFT_OUT:
            if item.get_closest_marker(marker):
                _left_out[marker] = _left_out.get(marker, 0) + 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for marker, count in _left_out.items():
        terminalreporter.write_line(
            f"NOT RUN: {count} {marker} test{'s' if count > 1 else ''} ({_LEFT_OUT[marker]})", yellow=True
        )


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage folder of a run whose journal was written by the real controller. Copy it before changing it.

    Two T4 and two V100 with plain affine times train 4 epochs of 10 steps and a partial one under ``rex``; new shares
    take effect three steps after they are published, as behind a prefetching loader.
    """
    from recording import record_run

    folder = tmp_path_factory.mktemp("storage") / "mixed-rex"
    record_run(folder, policy="rex")
    return folder
