"""Memory that really runs out on a card: a step is done again in place, alone and beside a rank that waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scripted import Rows, ScriptedLink, opened
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rex_ray.worker.link import IncidentRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
]

MEMORY_BYTES = 1.5e9
"""What a process may take: three wide tensors of 12.6 MB a row are alive at once, so 64 rows take more."""


class Wide(nn.Module):
    """Two small layers with a wide place between them, where memory ends on the way back as well as forth."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(self.first(inputs)).unsqueeze(-1).expand(-1, -1, 2**18)
        return self.last(torch.tanh((wide * 1.5).exp()).mean(-1))


def trained(share: int, num_rows: int, most_bytes: float | None) -> tuple[torch.Tensor, ScriptedLink]:
    """Train a lone worker within so much memory; return its weights and what it told."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0 if most_bytes is None else most_bytes / total)
    net, link = Wide().double().cuda(), ScriptedLink()
    try:
        with opened(link, global_batch_size=share) as session:
            session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            for batch in session.loader(Rows(num_rows)):
                session.train_step(batch, lambda model, rows: F.mse_loss(model(rows[1]), rows[2]))
                torch.cuda.synchronize()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return torch.cat([p.detach().reshape(-1).cpu() for p in net.parameters()]), link


def test_d9_a_card_that_is_too_small_trains_in_passes_to_the_same_weights() -> None:
    large, unhurried = trained(64, 192, None)
    small, link = trained(64, 192, MEMORY_BYTES)
    assert torch.allclose(large, small, rtol=0, atol=1e-10)
    assert not [record for record in unhurried.records if isinstance(record, IncidentRecord)]
    told = [record for record in link.records if isinstance(record, IncidentRecord)]
    assert {record.kind for record in told} == {"out_of_memory"}
    assert {record.step for record in told} == {0}
    peaks = [record.peak_memory_bytes for record in link.steps]
    assert all(peak is not None and 0 < peak <= MEMORY_BYTES for peak in peaks)


def wait_for_the_small_one(rank: int) -> tuple[torch.Tensor, int]:
    """Rank 1 of two on one card may take little memory; many buckets, so that some are reduced before it ends."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(MEMORY_BYTES / total if rank == 1 else 0.45)
    net, link = Wide().double().cuda(), ScriptedLink((8, 64))
    with opened(link, global_batch_size=72) as session:
        ddp = DistributedDataParallel(net, bucket_cap_mb=1e-5, gradient_as_bucket_view=True, broadcast_buffers=False)
        session.prepare(ddp, torch.optim.SGD(net.parameters(), lr=0.1))
        for batch in session.loader(Rows(216)):
            session.train_step(batch, lambda model, rows: F.mse_loss(model(rows[1]), rows[2]))
        torch.cuda.synchronize()
    weights = torch.cat([p.detach().reshape(-1).cpu() for p in net.parameters()])
    return weights, sum(isinstance(record, IncidentRecord) for record in link.records)


@pytest.fixture
def two_on_one_card() -> Iterator[GlooGroup]:
    group = GlooGroup(2)
    yield group
    group.stop()


def test_d9_a_rank_that_runs_out_of_memory_is_waited_for_and_replicas_stay_alike(two_on_one_card: GlooGroup) -> None:
    (first, untold), (second, told) = two_on_one_card.run(wait_for_the_small_one, limit_s=100.0)
    assert (untold, bool(told)) == (0, True)
    assert torch.equal(first, second)
    alone, _ = trained(72, 216, None)
    assert torch.allclose(first, alone, rtol=0, atol=1e-10)
