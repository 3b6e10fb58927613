"""torch.compile, before ``session.prepare`` or after it: exact, told apart as warm-up, and not again at every share."""

from __future__ import annotations

import warnings

import pytest
import torch
from gloo_group import GlooGroup
from scripted import MemoryReporter, Rows, ScriptedLink, opened
from test_worker_gradients import all_rows, mean_loss, reference_gradient
from test_worker_sharding import mesh
from torch import nn

from rex_ray.core.types import Allocation, StepFlag

pytestmark = pytest.mark.dist


class Network(nn.Module):
    """A forward pass of one's own: torch's containers are not compiled on their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(6, 8).double(), nn.Linear(8, 1).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(torch.tanh(self.body(inputs)))
        return outputs


MOST_GRAPHS = 3
WAYS = ("before", "after", "within", "sharded")
SPLITS = ((5, 0, 7), (2, 8, 2), (4, 4, 4), (6, 1, 5), (3, 3, 6), (7, 2, 3), (9, 2, 1), (1, 10, 1))


def compiled(model: nn.Module) -> nn.Module:
    module: nn.Module = torch.compile(model, backend="aot_eager")
    return module


def compile_and_train(rank: int, way: str) -> tuple[float, list[StepFlag], list[int], list[str]]:
    """Every step has other shares; return the worst error, what steps were marked as, and the graphs per step."""
    import torch._dynamo.utils as dynamo

    torch._dynamo.reset()
    dynamo.counters.clear()
    published = {
        1 + step: Allocation(version=step, local_batch_sizes=sizes) for step, sizes in enumerate(SPLITS) if step
    }
    link, data, worst, graphs = ScriptedLink(SPLITS[0], published), Rows(12 * 24), 0.0, []
    reporter = MemoryReporter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with opened(link, reporter, control_interval_steps=1, warm_up_steps=0, settle_steps=0) as session:
            model = Network()
            if way == "within":
                model.body = compiled(model.body)
            given: nn.Module = compiled(model) if way == "before" else model
            if way == "sharded":
                from torch.distributed.fsdp import fully_shard

                given = compiled(fully_shard(model, mesh=mesh()))
            net, optimizer = session.prepare(given, torch.optim.SGD(model.parameters(), lr=0.0))
            net = compiled(net) if way == "after" else net
            for _ in session.epochs(1):
                for ids, inputs, targets in session.loader(data) if not graphs else ():
                    mean_loss(net, inputs, targets).backward()
                    graphs.append(dynamo.counters["stats"]["unique_graphs"])
                    expected = reference_gradient(Network, mean_loss, data, all_rows(session, ids, len(data)))
                    gradients = [p.grad.full_tensor() if way == "sharded" else p.grad for p in model.parameters()]
                    found = torch.cat([gradient.reshape(-1) for gradient in gradients])
                    worst = max(worst, float((found - expected).abs().max()))
                    optimizer.step()
                    optimizer.zero_grad()
                    session.report({})  # which has the step's record written
                session.report({})
    state = reporter.saves[-1][1]
    assert state is not None
    return worst, [record.flags for record in link.steps], graphs, list(state["model"])


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_is_exact_and_steps_that_compile_are_no_evidence(ranks: GlooGroup, way: str) -> None:
    results = ranks.run(compile_and_train, way, limit_s=180.0)
    for rank, (worst, flags, graphs, names) in enumerate(results):
        assert worst < 1e-10
        news = [after != before for before, after in zip([0, *graphs], graphs, strict=False)]
        assert news[0], "it is compiled at all"
        assert [StepFlag.WARM_UP in flag for flag in flags] == news[: len(flags)], (rank, graphs)
        # One graph for the first number of rows, one for any, one for a single row: the hooks are in none of them.
        assert graphs[-1] == graphs[len(graphs) // 2] <= MOST_GRAPHS, f"shares change on: {graphs}"
        if way != "within":  # which is a part of the user's model, under its own name
            assert names in ([], list(Network().state_dict())), "saves name what the bare model names"
