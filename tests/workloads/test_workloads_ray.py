"""The workload as a user starts it: its own process, a real local Ray, two workers, files on disk."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rex_ray.cli import main
from rex_ray.report.reading.load import load_run

ROOT = Path(__file__).parents[2]


def run_workload(name: str, data: Path, storage: Path, *options: str) -> None:
    command = [sys.executable, "-m", f"workloads.{name}", "--data-dir", str(data), "--storage", str(storage), *options]
    # Without an address Ray joins whatever cluster it finds on this machine, which may be on its way out.
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


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
    options = ["--num-epochs", "3", "--global-batch-size", "16", "--policy", "dlb"]
    run_workload("fashion_mnist", data, tmp_path, *options)
    run = load_run(tmp_path / "fashion_mnist-dlb")
    assert run.outcome == "finished"
    (group,) = run.groups
    assert group.num_workers == 2
    assert group.num_rows.sum() == 3 * 203
    assert run.metrics[-1].metrics["accuracy"] == 1.0
    with pytest.raises(SystemExit) as stopped:
        main(["replay", str(tmp_path / "fashion_mnist-dlb"), "--check"])
    assert stopped.value.code in (0, None)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_language_model_trains_by_words_on_two_workers(tmp_path: Path) -> None:
    """Rows of six words of which the last is short, and batches of which the last leaves a rank with a single row."""
    text = " one two three four five six seven \n" * 60
    for part in ("train", "valid"):
        (tmp_path / f"wiki.{part}.tokens").write_text(text)
    options = ["--length", "6", "--width", "16", "--num-layers", "1", "--dropout", "0", "--learning-rate", "0.03"]
    options += ["--num-epochs", "4", "--global-batch-size", "6", "--max-global-batch-size", "12", "--policy", "rex"]
    run_workload("wikitext", tmp_path, tmp_path, *options)
    run = load_run(tmp_path / "wikitext2-lstm-rex")
    assert run.outcome == "finished"
    (group,) = run.groups
    assert group.num_workers == 2
    num_rows = math.ceil((60 * 8 - 1) / 6)
    assert group.num_rows.sum() == 4 * num_rows
    perplexities = [point.metrics["perplexity"] for point in run.metrics]
    assert len(perplexities) == 4
    assert all(math.isfinite(value) for value in perplexities)
    assert perplexities[-1] < 1.5 < perplexities[0]
