"""What only a CUDA device can show of numbers: flags read late, hashes, statistics over ranks by their counts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scripted import MemoryReporter, Rows, ScriptedLink, gradient_of, opened, two_layers
from torch import nn

from rex_ray.core.errors import RexError
from rex_ray.core.types import StepFlag
from rex_ray.worker.data.sampler import epoch_order
from rex_ray.worker.model import gradient_looks, non_finite
from rex_ray.worker.model.replica_check import hash_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
]


def train_with_a_nan(policy: str, saves: bool) -> tuple[str, int, int, torch.Tensor, list[int]]:
    link, reporter, steps, error = ScriptedLink(), MemoryReporter(), 0, "accepted"
    model = two_layers().cuda()
    try:
        with opened(link, reporter, on_non_finite=policy, checkpoint_interval_s=0.0) as session:
            net, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01, fused=True))
            for _, inputs, targets in session.loader(Rows(144)):
                optimizer.zero_grad()
                session.backward(F.mse_loss(net(inputs), targets) * (math.nan if session.step == 5 else 1.0))
                optimizer.step()
                steps += 1
                if saves:
                    session.report({})
    except RexError as refusal:
        error = str(refusal)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    skipped = [record.step for record in link.steps if StepFlag.SKIPPED in record.flags]
    return error, steps, len(reporter.saves), weights, skipped


def test_b8_a_card_stops_two_updates_late_but_before_a_save_and_skips_at_once() -> None:
    error, steps, *_ = train_with_a_nan("stop", saves=False)
    assert "step 5: the gradient is not finite, because the loss is not on rank 0" in error
    assert steps == 5 + non_finite.LAG_UPDATES
    error, steps, num_saves, *_ = train_with_a_nan("stop", saves=True)
    assert "step 5" in error
    assert (steps, num_saves) == (6, 5)
    error, steps, _, weights, skipped = train_with_a_nan("skip", saves=False)
    assert (error, steps, skipped) == ("accepted", 12, [5])
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_largest_entry_is_not_finite_where_one_is_not(dtype: torch.dtype, value: float) -> None:
    gradients = [torch.ones(1000, device="cuda", dtype=dtype), torch.ones(7, 3, device="cuda", dtype=dtype)]
    assert float(gradient_looks.largest_entry(gradients)) == 1.0
    gradients[1][3, 2] = value
    assert not math.isfinite(float(gradient_looks.largest_entry(gradients)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_card_and_a_host_have_one_hash(dtype: torch.dtype) -> None:
    values = torch.randn(5_000_003, generator=torch.Generator().manual_seed(2)).mul(100).to(dtype)
    # A device's blocks are longer, and what is hashed in several is hashed again.
    assert hash_of(values[:60_000]) == hash_of(values[:60_000].cuda())
    changed = values.cuda()
    changed[4_999_999] += 1
    assert hash_of(changed) != hash_of(values.cuda())


def synchronised_statistics(rank: int) -> tuple[float, float]:
    """Compare two ranks of 2 and 10 rows under SyncBatchNorm with one process under BatchNorm."""
    data = Rows(48)

    def build(norm: type[nn.Module]) -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 8), norm(8), nn.ReLU(), nn.Linear(8, 1)).double().cuda()

    alone, worst = build(nn.BatchNorm1d), 0.0
    reference = torch.optim.SGD(alone.parameters(), lr=0.05)
    with opened(ScriptedLink((2, 10))) as session:
        model = build(nn.SyncBatchNorm)
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for step, (_, inputs, targets) in enumerate(session.loader(data)):
            rows = epoch_order(0, 0, 48)[12 * step : 12 * step + 12]
            reference.zero_grad()
            F.mse_loss(alone(data.inputs[rows].cuda()), data.targets[rows].cuda()).backward()
            optimizer.zero_grad()
            session.backward(F.mse_loss(net(inputs), targets))
            worst = max(worst, float((gradient_of(model) - gradient_of(alone)).abs().max()))
            optimizer.step()
            reference.step()
    statistics = (model[1].running_mean - alone[1].running_mean).abs().max()
    return worst, float(statistics)


@pytest.fixture
def two_on_one_card() -> Iterator[GlooGroup]:
    group = GlooGroup(2)
    yield group
    group.stop()


def test_synchronised_batch_norm_counts_each_ranks_rows(two_on_one_card: GlooGroup) -> None:
    for worst, statistics in two_on_one_card.run(synchronised_statistics, limit_s=100.0):
        assert worst < 1e-10
        assert statistics < 1e-10
