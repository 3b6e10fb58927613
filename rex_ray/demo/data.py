"""What the demo trains on: scikit-learn's digits, Fashion-MNIST where it is installed, or rows of a noisy teacher.

All three are loaded whole by every worker in a second or two, and without a network.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rex_ray.core.errors import ConfigError

__all__ = ["DIGITS_TRAIN_ROWS", "DataName", "RowsWithIds", "find_fashion_mnist", "load_data"]

DataName: TypeAlias = Literal["digits", "fashion-mnist", "generated"]

_DIGITS_ROWS = 1797
_DIGITS_TEST_ROWS = 360
DIGITS_TRAIN_ROWS = _DIGITS_ROWS - _DIGITS_TEST_ROWS
_DIGITS_SPLIT_SEED = 20

FASHION_FOLDERS = (Path("/usr/share/datasets/fashion-mnist"), Path.home() / ".cache" / "rex_ray" / "fashion_mnist")
"""Where Debian's package ``dataset-fashion-mnist`` and ``workloads.fashion_mnist`` leave the files."""

_IMAGE_HEADER, _LABEL_HEADER = 16, 8  # bytes of an idx file before its values: magic, then the dimensions
_PIXELS = 28 * 28

# A teacher of like size as the student, so that it can be learnt; a quarter of the labels are drawn anew, which keeps
# the gradient noisy after the student has learnt it: the regime in which larger batches pay.
_TEACHER_SEED = 7
_TEACHER_FEATURES, _TEACHER_HIDDEN, _TEACHER_CLASSES = 64, 32, 10
_LABEL_NOISE = 0.25
_TEACHER_TEST_ROWS = 4000


class RowsWithIds(Dataset[tuple[Tensor, int, int]]):
    """Inputs, labels and row ids ``0 .. len - 1``.

    Args:
        inputs: shape ``[rows, features]``.
        labels: shape ``[rows]``.
        repeats: passes over the rows that count as one epoch, each row of each pass with an id of its own.
    """

    def __init__(self, inputs: Tensor, labels: Tensor, repeats: int = 1) -> None:
        self._inputs = inputs
        self._labels: list[int] = labels.tolist()
        self._repeats = repeats
        self.num_features = int(inputs.shape[1])
        self.num_classes = int(labels.max()) + 1

    def __len__(self) -> int:
        return len(self._labels) * self._repeats

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        row = index % len(self._labels)
        return self._inputs[row], self._labels[row], index


def load_data(
    name: DataName, repeats: int = 1, num_rows: int | None = None, data_dir: str | None = None
) -> tuple[RowsWithIds, RowsWithIds]:
    """Return a training and a test set.

    Args:
        name: which.
        repeats: see ``RowsWithIds``; of the training set.
        num_rows: training rows to keep, the first ones; None: all there are.
        data_dir: folder of Fashion-MNIST's idx files.
    """
    if name == "digits":
        train, test = _digits()
    elif name == "fashion-mnist":
        folder = find_fashion_mnist(None if data_dir is None else Path(data_dir))
        if folder is None:
            raise ConfigError(f"no Fashion-MNIST idx files in {data_dir}; give the folder that holds the four of them")
        train, test = _fashion(folder, "train"), _fashion(folder, "t10k")
    else:
        train, test = _teacher(num_rows or 20_000)
    inputs, labels = train
    return RowsWithIds(inputs[:num_rows], labels[:num_rows], repeats), RowsWithIds(*test)


def find_fashion_mnist(data_dir: Path | None = None) -> Path | None:
    """Return the folder of the four idx files (compressed or not): ``data_dir``, or a usual place; None without."""
    places = FASHION_FOLDERS if data_dir is None else (data_dir,)
    for place in places:
        for folder in (place, place / "FashionMNIST" / "raw"):
            if all(_idx_file(folder, split, kind) for split in ("train", "t10k") for kind in ("images", "labels")):
                return folder
    return None


def _idx_file(folder: Path, split: str, kind: str) -> Path | None:
    name = f"{split}-{kind}-idx{3 if kind == 'images' else 1}-ubyte"
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _fashion(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    values = []
    for kind, header in (("images", _IMAGE_HEADER), ("labels", _LABEL_HEADER)):
        path = _idx_file(folder, split, kind)
        assert path is not None, "found with all four files"
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
        values.append(np.frombuffer(raw, dtype=np.uint8, offset=header))
    images, labels = values
    if images.size != _PIXELS * labels.size:
        raise ConfigError(f"{folder}: {images.size} pixels and {labels.size} labels are no Fashion-MNIST")
    pixels = torch.tensor(images.reshape(-1, _PIXELS) / np.float32(255.0), dtype=torch.float32)
    return pixels - pixels.mean(), torch.tensor(labels, dtype=torch.int64)


def _digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A fixed random split, pixels scaled to ``[0, 1]``."""
    # Imported here: scikit-learn takes a second to import, which only the workers should pay.
    from sklearn.datasets import load_digits  # noqa: PLC0415

    digits = load_digits()
    order = np.random.RandomState(_DIGITS_SPLIT_SEED).permutation(_DIGITS_ROWS)
    images = torch.tensor(digits.data[order] / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target[order], dtype=torch.int64)
    rest = slice(_DIGITS_TEST_ROWS, _DIGITS_ROWS)
    return (images[rest], labels[rest]), (images[:_DIGITS_TEST_ROWS], labels[:_DIGITS_TEST_ROWS])


def _teacher(num_rows: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Rows labelled by a random network, training labels with noise; the test's are the teacher's own."""
    chance = torch.Generator().manual_seed(_TEACHER_SEED)
    hidden = torch.randn(_TEACHER_FEATURES, _TEACHER_HIDDEN, generator=chance) / _TEACHER_FEATURES**0.5
    out = torch.randn(_TEACHER_HIDDEN, _TEACHER_CLASSES, generator=chance)
    inputs = torch.randn(num_rows + _TEACHER_TEST_ROWS, _TEACHER_FEATURES, generator=chance)
    labels = (torch.relu(inputs @ hidden) @ out).argmax(dim=1)
    drawn = torch.randint(_TEACHER_CLASSES, (num_rows,), generator=chance)
    noisy = torch.rand(num_rows, generator=chance) < _LABEL_NOISE
    train_labels = torch.where(noisy, drawn, labels[:num_rows])
    return (inputs[:num_rows], train_labels), (inputs[num_rows:], labels[num_rows:])
