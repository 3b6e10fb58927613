"""An ordinary script and the same one on a mixed cluster: how little differs, and that both do what they say."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rex_ray.control.events import MetricReported, StepObserved
from rex_ray.control.reading import read_journal
from rex_ray.hosting.journal_files import read_files

ROOT = Path(__file__).parents[2]
BEFORE, AFTER = ROOT / "examples" / "cifar_before.py", ROOT / "examples" / "cifar_after.py"
ROWS, TEST_ROWS, EPOCHS, BATCH = 150, 37, 2, 32


def the_diff() -> list[str]:
    before, after = BEFORE.read_text().splitlines(), AFTER.read_text().splitlines()
    return list(difflib.unified_diff(before, after, BEFORE.name, AFTER.name, lineterm="", n=2))


def test_five_lines_are_changed_or_added_and_none_is_lost() -> None:
    added = [line for line in the_diff()[2:] if line.startswith("+")]
    removed = [line for line in the_diff()[2:] if line.startswith("-")]
    assert len(added) == 5
    assert len(removed) == 3  # each of them is one of the changed lines


def test_the_documents_show_that_very_diff() -> None:
    document = (ROOT / "docs" / "five_lines.md").read_text()
    assert "```diff\n" + "\n".join(the_diff()) + "\n```" in document


def write_cifar(folder: Path) -> None:
    """Write images whose label can be seen, in CIFAR-10's binary format."""
    draw = np.random.RandomState(0)
    for name, num_rows in (("data_batch_1", ROWS - 50), ("data_batch_2", 50), ("test_batch", TEST_ROWS)):
        labels = draw.randint(0, 10, num_rows)
        images = draw.randint(0, 120, (num_rows, 3, 32, 32)) + 13 * labels[:, None, None, None]
        records = np.concatenate([labels[:, None], images.reshape(num_rows, -1)], axis=1).astype(np.uint8)
        records.tofile(folder / f"{name}.bin")


def arguments(data_dir: Path) -> list[str]:
    sizes = ["--epochs", str(EPOCHS), "--batch-size", str(BATCH), "--width", "4", "--loader-processes", "0"]
    return ["--data-dir", str(data_dir), *sizes]


def run(command: list[str], home: Path) -> str:
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=home, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.dist
def test_the_script_before_trains_in_one_process(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    lines = run([str(BEFORE), *arguments(tmp_path)], tmp_path).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["epoch 0", "epoch 1"]


def evaluated(checkpoint: Path, data_dir: Path) -> tuple[float, float]:
    """Evaluate a run's save in this process, by the script's own functions."""
    from torchvision.transforms import v2

    from examples.cifar_before import MEAN, STD, Cifar10, evaluate, make_model

    model = make_model(4)
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    scale = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    loader = torch.utils.data.DataLoader(Cifar10([data_dir / "test_batch.bin"], scale), TEST_ROWS)
    loss, correct, count = evaluate(model, loader, torch.device("cpu"))
    return loss / count, correct / count


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(360)
def test_the_script_after_trains_every_row_once_and_pools_exactly(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    run([str(Path(__file__).with_name("on_local_cluster.py")), str(AFTER), *arguments(tmp_path)], tmp_path)
    (run_dir,) = (tmp_path / "ray_results").iterdir()
    events = read_journal(read_files(run_dir / "rex_ray" / "journal")).events
    rows = [0] * EPOCHS
    for event in events:
        if isinstance(event, StepObserved):
            rows[event.epoch] += int(event.num_rows.sum())
    assert rows == [ROWS] * EPOCHS
    reported = [event.metrics for event in events if isinstance(event, MetricReported)]
    assert len(reported) == EPOCHS  # once, not once a rank
    newest = max(run_dir.rglob("state.pt"), key=lambda path: path.stat().st_mtime)
    loss, accuracy = evaluated(newest, tmp_path)
    assert reported[-1]["accuracy"] == accuracy  # a ratio of whole numbers
    assert reported[-1]["loss"] == pytest.approx(loss, rel=1e-4)
