"""The demo's workload: scikit-learn's bundled digits (1,797 real 8 x 8 images) and a small MLP.

It reads like any user's loop; nothing in it knows that the cluster is emulated or which policy runs. The row ids that
travel with each batch are the demo's proof, not a need of the library.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from rex_ray.worker.session import get_session

__all__ = ["NUM_TRAIN_ROWS", "DigitsWithIds", "digits_loop", "load_digits_split"]

NUM_ROWS = 1797
NUM_TEST_ROWS = 360
NUM_TRAIN_ROWS = NUM_ROWS - NUM_TEST_ROWS
SPLIT_SEED = 20


class DigitsWithIds(Dataset[tuple[Tensor, int, int]]):
    """Images, labels and row ids ``0 .. len - 1``."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images = images
        self._labels = labels.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        return self._images[index], self._labels[index], index


def load_digits_split() -> tuple[DigitsWithIds, DigitsWithIds]:
    """Return the training and the test set: a fixed random split, pixels scaled to ``[0, 1]``."""
    # Imported here: scikit-learn takes a second to import, which only the workers should pay.
    from sklearn.datasets import load_digits  # noqa: PLC0415

    digits = load_digits()
    order = np.random.RandomState(SPLIT_SEED).permutation(NUM_ROWS)
    images = torch.tensor(digits.data[order] / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target[order], dtype=torch.int64)
    test, train = slice(0, NUM_TEST_ROWS), slice(NUM_TEST_ROWS, NUM_ROWS)
    return DigitsWithIds(images[train], labels[train]), DigitsWithIds(images[test], labels[test])


def digits_loop(config: dict[str, Any]) -> None:
    """Train the MLP; report accuracy and the share of rows that the epoch saw exactly once.

    Args:
        config: ``num_epochs``, ``learning_rate`` and ``seed`` (of the initial weights).
    """
    session = get_session()
    torch.manual_seed(config["seed"])
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=config["learning_rate"], momentum=0.9)
    model, optimizer = session.prepare(model, optimizer)
    train_set, test_set = load_digits_split()
    loader = session.loader(train_set)

    for _ in session.epochs(config["num_epochs"]):
        times_seen = torch.zeros(len(train_set), dtype=torch.int64)
        model.train()
        for images, labels, row_ids in loader:
            times_seen += torch.bincount(row_ids, minlength=len(train_set))
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        correct, count = _evaluate(session.unwrap(model), session.eval_loader(test_set))
        seen_once = session.pool_sum(times_seen) == 1
        session.report(
            {
                "accuracy": session.pool(correct, count),
                "rows_seen_exactly_once": float(seen_once.double().mean()),
            }
        )


@torch.no_grad()
def _evaluate(model: nn.Module, loader: Any) -> tuple[float, int]:
    """Correct answers and rows of this rank's part of the test set."""
    model.eval()
    correct, count = 0.0, 0
    for images, labels, _ in loader:
        correct += float((model(images).argmax(dim=1) == labels).sum())
        count += len(labels)
    return correct, count
