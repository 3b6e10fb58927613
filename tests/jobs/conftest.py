"""One head for all jobs: it takes longer to start than most of them to run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from head import Head, running_head

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    with running_head(num_cpus=2, labels="ray.io/accelerator-type=T4") as running:
        yield running


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user submits: a folder with the code of a run, here the workloads and the sweep to copy from."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "workloads", folder / "workloads", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "examples" / "sweep.py", folder)
    return folder


def _write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 0x08, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes that a glance tells apart, as Fashion-MNIST's files."""
    folder = tmp_path_factory.mktemp("images")
    for prefix, rows in (("train", 203), ("t10k", 31)):
        labels = np.arange(rows) % 2
        pixels = np.where(labels[:, None, None] == (np.arange(28) < 14)[None, :, None], 200, 0) * np.ones((1, 1, 28))
        _write_idx(folder / f"{prefix}-images-idx3-ubyte", pixels)
        _write_idx(folder / f"{prefix}-labels-idx1-ubyte", labels)
    return folder
