"""The data set is the files' content, on any layout that people have; what does not fit together is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from lone_worker import train_alone

from rex_ray.core.errors import ConfigError
from workloads.fashion_mnist import load_split, train_loop


def write_split(folder: Path, prefix: str, images: np.ndarray, labels: np.ndarray, *, compressed: bool = False) -> None:
    for kind, values in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
        header = bytes([0, 0, 0x08, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
        data = header + values.astype(np.uint8).tobytes()
        name = f"{prefix}-{kind}" + (".gz" if compressed else "")
        (folder / name).write_bytes(gzip.compress(data) if compressed else data)


@pytest.mark.parametrize("compressed", [False, True])
def test_rows_are_normalised_images_with_their_labels(tmp_path: Path, compressed: bool) -> None:
    images = np.zeros((3, 28, 28), dtype=np.uint8)
    images[1] = 255
    write_split(tmp_path, "t10k", images, np.array([4, 9, 0]), compressed=compressed)
    rows = load_split(tmp_path, "test")
    assert len(rows) == 3
    image, label = rows[1]
    assert image.shape == (1, 28, 28)
    assert label == 9
    assert torch.allclose(image * 0.3530 + 0.2860, torch.ones(1))


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no train-images-idx3-ubyte.*four Fashion-MNIST idx files"):
        load_split(tmp_path, "train")


def test_images_and_labels_of_different_files_are_refused(tmp_path: Path) -> None:
    write_split(tmp_path, "train", np.zeros((3, 28, 28)), np.zeros(2))
    with pytest.raises(ConfigError, match="do not match"):
        load_split(tmp_path, "train")


def test_the_loop_learns_on_one_worker_without_ray(tmp_path: Path) -> None:
    """Two kinds of image, one bright above and one bright below, are told apart after a few epochs."""
    for prefix, rows in (("train", 96), ("t10k", 31)):
        labels = np.arange(rows) % 2
        images = np.zeros((rows, 28, 28))
        images[labels == 0, :14] = 200
        images[labels == 1, 14:] = 200
        write_split(tmp_path, prefix, images, labels)
    config = {"data_dir": str(tmp_path), "num_epochs": 3, "learning_rate": 0.05, "loader_processes": 0, "seed": 0}
    metrics = train_alone(train_loop, config, global_batch_size=16)
    assert len(metrics) == 3
    assert metrics[-1]["accuracy"] == 1.0
