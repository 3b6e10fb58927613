"""The demo's data sets: the same rows on every worker, ids that tell them apart, and honest noise."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch

from rex_ray.core.errors import ConfigError
from rex_ray.demo.data import DIGITS_TRAIN_ROWS, RowsWithIds, find_fashion_mnist, load_data
from rex_ray.demo.scenarios import make_settings


def write_fashion(folder, *, compressed: bool, num_rows=(6, 3)) -> None:
    for split, rows in zip(("train", "t10k"), num_rows, strict=True):
        pixels = np.arange(rows * 784, dtype=np.int64).astype(np.uint8).tobytes()
        for name, content in (
            (f"{split}-images-idx3-ubyte", bytes(16) + pixels),
            (f"{split}-labels-idx1-ubyte", bytes(8) + bytes(range(rows))),
        ):
            path = folder / (f"{name}.gz" if compressed else name)
            path.write_bytes(gzip.compress(content) if compressed else content)


def test_repeated_rows_have_ids_of_their_own():
    rows = RowsWithIds(torch.eye(3), torch.tensor([0, 1, 2]), repeats=4)
    assert len(rows) == 12
    assert [rows[k][2] for k in range(12)] == list(range(12))
    assert [rows[k][1] for k in range(12)] == [0, 1, 2] * 4
    assert torch.equal(rows[7][0], torch.eye(3)[1])


def test_digits_are_all_there_and_disjoint():
    train, test = load_data("digits", repeats=2)
    assert (len(train), len(test)) == (2 * DIGITS_TRAIN_ROWS, 360)
    assert (train.num_features, train.num_classes) == (64, 10)


def test_generated_rows_are_the_same_everywhere_and_only_the_training_labels_are_noisy():
    (train, test), (again, _) = load_data("generated", num_rows=3000), load_data("generated", num_rows=3000)
    assert len(train) == 3000
    assert all(torch.equal(train[k][0], again[k][0]) and train[k][1] == again[k][1] for k in (0, 7, 2999))
    counts = np.bincount([test[k][1] for k in range(len(test))], minlength=10)
    assert counts.max() < 0.6 * len(test), "one class must not be most of the test"


@pytest.mark.parametrize("compressed", [False, True])
def test_fashion_mnist_is_read_raw_or_compressed(tmp_path, compressed):
    write_fashion(tmp_path, compressed=compressed)
    assert find_fashion_mnist(tmp_path) == tmp_path
    train, test = load_data("fashion-mnist", num_rows=4, data_dir=str(tmp_path))
    assert (len(train), len(test)) == (4, 3)
    assert [train[k][1] for k in range(4)] == [0, 1, 2, 3]
    pixels = train[0][0]
    assert float(pixels[255] - pixels[0]) == pytest.approx(1.0)


def test_what_is_no_fashion_mnist_is_refused_with_the_folder(tmp_path):
    with pytest.raises(ConfigError, match="does not hold the four idx files"):
        make_settings("growth", data_dir=tmp_path)
    write_fashion(tmp_path, compressed=False)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(bytes(8 + 2))
    with pytest.raises(ConfigError, match="no Fashion-MNIST"):
        load_data("fashion-mnist", data_dir=str(tmp_path))
    assert make_settings("growth", data_dir=tmp_path).data == "fashion-mnist"


def test_without_fashion_mnist_growth_says_that_its_rows_are_generated(monkeypatch):
    monkeypatch.setattr("rex_ray.demo.scenarios.find_fashion_mnist", lambda folder: None)
    settings = make_settings("growth")
    assert settings.data == "generated"
    assert "generated rows, for want of Fashion-MNIST" in settings.sentence()
