"""The demo's training loop: a small MLP on any of its data sets.

It reads like any user's loop; nothing in it knows that the cluster is emulated or which policy runs. The row ids that
travel with each batch are the demo's proof, not a need of the library.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rex_ray.demo.data import load_data
from rex_ray.worker.current import get_session

__all__ = ["demo_loop"]

NUM_HIDDEN = 64


def demo_loop(config: dict[str, Any]) -> None:
    """Train the MLP; report accuracy and the share of rows that the epoch saw exactly once.

    Args:
        config: ``num_epochs``, ``learning_rate``, ``seed`` (of the initial weights), and what ``load_data`` takes:
            ``data``, ``repeats``, ``num_rows``, ``data_dir``.
    """
    session = get_session()
    torch.manual_seed(config["seed"])
    train_set, test_set = load_data(config["data"], config["repeats"], config["num_rows"], config["data_dir"])
    model: nn.Module = nn.Sequential(
        nn.Linear(train_set.num_features, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, train_set.num_classes)
    )
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=config["learning_rate"], momentum=0.9)
    model, optimizer = session.prepare(model, optimizer)
    loader = session.loader(train_set)

    for _ in session.epochs(config["num_epochs"]):
        times_seen = torch.zeros(len(train_set), dtype=torch.int64)
        model.train()
        for inputs, labels, row_ids in loader:
            times_seen.index_add_(0, row_ids, torch.ones_like(row_ids))
            loss = functional.cross_entropy(model(inputs), labels)
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
    for inputs, labels, _ in loader:
        correct += float((model(inputs).argmax(dim=1) == labels).sum())
        count += len(labels)
    return correct, count
