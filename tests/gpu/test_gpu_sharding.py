"""What only CUDA devices can show of sharded and compiled models: NCCL, waits of a stream, inductor."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scripted import Rows, ScriptedLink, opened
from torch import nn

from rex_ray.core.types import Allocation, StepFlag

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
]

NUM_CARDS = min(torch.cuda.device_count(), 4)
SLOW_CYCLES = 200_000_000  # some 100 ms at 2 GHz


class Network(nn.Module):
    """Two blocks, the first of which can be told to take its time on the device."""

    def __init__(self, slow_cycles: int = 0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(6, 64).double(), nn.Linear(64, 1).double()
        self.slow_cycles = slow_cycles

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(inputs))
        if self.slow_cycles:
            torch.cuda._sleep(self.slow_cycles)
        outputs: torch.Tensor = self.head(hidden)
        return outputs


def train_sharded(rank: int, sizes: tuple[int, ...]) -> tuple[float, list[tuple[float, float]]]:
    """Return the worst error against one process, and own and wall times per step; the last rank is slow."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda", (len(sizes),))
    link, data, worst = ScriptedLink(sizes), Rows(8 * sum(sizes)), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with opened(link, global_batch_size=sum(sizes), warm_up_steps=2) as session:
            model = Network(SLOW_CYCLES if rank == len(sizes) - 1 else 0).cuda()
            for module in (model.body, model.head, model):
                fully_shard(module, mesh=mesh)
            net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
            for ids, inputs, targets in session.loader(data):
                F.mse_loss(net(inputs), targets).backward()
                seen = torch.zeros(len(data), dtype=torch.int64)
                seen[ids.cpu()] += 1
                rows = session.pool_sum(seen).nonzero().reshape(-1)
                alone = Network()
                F.mse_loss(alone(data.inputs[rows]), data.targets[rows]).backward()
                for one, other in zip(model.parameters(), alone.parameters(), strict=True):
                    worst = max(worst, float((one.grad.full_tensor().cpu() - other.grad).abs().max()))  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize()
            session.finish()
    clean = [record for record in link.steps if record.flags == StepFlag.NONE]
    return worst, [(record.compute_s, record.step_s) for record in clean]


@pytest.mark.skipif(NUM_CARDS < 2, reason="NCCL takes one rank per card, and this machine has fewer than two cards")
def test_a_model_sharded_over_cards_is_exact_and_waits_are_no_own_time() -> None:
    cards = GlooGroup(NUM_CARDS, backend="nccl")
    try:
        results = cards.run(train_sharded, (3, 9, 4, 8)[:NUM_CARDS], limit_s=180.0)
    finally:
        cards.stop()
    for rank, (worst, times) in enumerate(results):
        assert worst < 1e-10
        assert times
        for own_s, step_s in times:
            assert own_s > 0.05 if rank == NUM_CARDS - 1 else own_s < 0.5 * step_s


def test_a_model_that_inductor_compiled_follows_its_shares() -> None:
    if shutil.which("g++") is None and shutil.which("gcc") is None:
        pytest.skip("inductor needs a C++ compiler beside Triton, and this machine has none")
    torch._dynamo.reset()
    sizes = (12, 20, 7, 12, 16)
    published = {1 + k: Allocation(version=k, local_batch_sizes=(rows,)) for k, rows in enumerate(sizes) if k}
    link, data = ScriptedLink(sizes[:1], published), Rows(12 * 20)
    with opened(link, control_interval_steps=1, warm_up_steps=0, settle_steps=0) as session:
        model = Network().cuda().float()
        net, optimizer = session.prepare(torch.compile(model), torch.optim.SGD(model.parameters(), lr=0.0))
        for ids, inputs, targets in session.loader(data):
            F.mse_loss(net(inputs.float()), targets.float()).backward()
            alone = Network().float()
            F.mse_loss(alone(data.inputs[ids.cpu()].float()), data.targets[ids.cpu()].float()).backward()
            for one, other in zip(model.parameters(), alone.parameters(), strict=True):
                assert one.grad is not None
                assert torch.allclose(one.grad.cpu(), other.grad, rtol=1e-3, atol=1e-5)
            optimizer.step()
            optimizer.zero_grad()
        session.finish()
    assert StepFlag.WARM_UP in link.steps[0].flags
    assert sum(StepFlag.WARM_UP in record.flags for record in link.steps) <= 3
