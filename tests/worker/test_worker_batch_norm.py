"""Batch normalisation under unequal shares: whose statistics they are, and that every rank's model is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scripted import MemoryReporter, Rows, ScriptedLink, opened
from torch import nn

pytestmark = pytest.mark.dist

SHARES, NUM_ROWS = (8, 8, 48), 192
MOMENTUM = 0.25


def normalised() -> nn.Module:
    torch.manual_seed(3)
    first = nn.Linear(6, 8)
    return nn.Sequential(first, nn.BatchNorm1d(8, momentum=MOMENTUM), nn.Tanh(), nn.Linear(8, 1)).double()


def evaluated(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        outputs: torch.Tensor = model(Rows(20).inputs)
    return outputs


def train_one_step(rank: int) -> dict[str, Any]:
    """One step of a learning rate of 0; then each rank evaluates its own replica, and rank 0's save."""
    reporter = MemoryReporter()
    with opened(ScriptedLink(SHARES), reporter, global_batch_size=64, checkpoint_interval_s=0.0) as session:
        model = normalised()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        ids, inputs, targets = next(iter(session.loader(Rows(NUM_ROWS))))
        F.mse_loss(net(inputs), targets).backward()
        optimizer.step()
        session.report({"loss": 0.0})  # saves
        norm = model[1]
        assert isinstance(norm, nn.BatchNorm1d)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        statistics = torch.stack([norm.running_mean, norm.running_var]).clone()
        own = evaluated(model)
    return {"ids": ids, "statistics": statistics, "own": own, "saves": [state for _, state in reporter.saves]}


def test_b11_running_statistics_are_weighted_by_real_rows_and_a_save_evaluates_alike(ranks: GlooGroup) -> None:
    results = ranks.run(train_one_step)
    data, first = Rows(NUM_ROWS), normalised()[0]
    with torch.no_grad():
        hidden = [first(data.inputs[result["ids"]]) for result in results]
    weights = torch.tensor([len(result["ids"]) / 64 for result in results], dtype=torch.float64)
    means = torch.stack([rows.mean(0) for rows in hidden])
    variances = torch.stack([rows.var(0) for rows in hidden])  # of each rank's own rows, as it normalised by them
    expected = torch.stack([MOMENTUM * weights @ means, (1 - MOMENTUM) + MOMENTUM * weights @ variances])
    plain_mean = MOMENTUM * means.mean(0)
    assert float((plain_mean - expected[0]).abs().max()) > 1e-3  # what weighting by ranks would give
    for result in results:
        assert torch.allclose(result["statistics"], expected, rtol=0, atol=1e-12)
        assert torch.equal(result["statistics"], results[0]["statistics"])
        assert torch.equal(result["own"], results[0]["own"])
    saved = normalised()
    saved.load_state_dict(results[0]["saves"][-1]["model"])
    assert torch.equal(evaluated(saved), results[2]["own"])  # rank 0's save is rank 2's model
