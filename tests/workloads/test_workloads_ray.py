"""The workload as a user starts it: its own process, a real local Ray, two workers, files on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rex_ray.cli import main
from rex_ray.report.load import load_run

ROOT = Path(__file__).parents[2]


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 0x08, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(240)  # starting Ray takes most of it, several times as long on a busy machine
def test_fashion_mnist_trains_from_the_command_line_and_its_journal_replays(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for prefix, rows in (("train", 203), ("t10k", 31)):
        labels = np.arange(rows) % 2
        images = np.where(labels[:, None, None] == (np.arange(28) < 14)[None, :, None], 200, 0) * np.ones((1, 1, 28))
        write_idx(data / f"{prefix}-images-idx3-ubyte", images)
        write_idx(data / f"{prefix}-labels-idx1-ubyte", labels)
    command = [sys.executable, "-m", "workloads.fashion_mnist", "--data-dir", str(data), "--storage", str(tmp_path)]
    command += ["--num-epochs", "3", "--global-batch-size", "16", "--policy", "dlb"]
    # Without an address Ray joins whatever cluster it finds on this machine, which may be on its way out.
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    run = load_run(tmp_path / "fashion_mnist-dlb")
    assert run.outcome == "finished"
    (group,) = run.groups
    assert group.num_workers == 2
    assert group.num_rows.sum() == 3 * 203
    assert run.metrics[-1].metrics["accuracy"] == 1.0
    with pytest.raises(SystemExit) as stopped:
        main(["replay", str(tmp_path / "fashion_mnist-dlb"), "--check"])
    assert stopped.value.code in (0, None)
