"""What a model is made of changes nothing: its gradient is that of one process with all rows, replicated or sharded.

Recomputed activations, tied parameters, hooks of the user's, frozen parts, outputs in dataclasses, several calls per
step; each with unequal shares, one of them of no rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scripted import Rows, ScriptedLink, opened
from test_worker_gradients import all_rows
from test_worker_sharding import mesh
from torch import nn
from torch.utils.checkpoint import checkpoint

from rex_ray.core.errors import ConfigError

pytestmark = pytest.mark.dist

SIZES = (9, 0, 3)


@dataclass
class Output:
    """What many libraries' models return."""

    predictions: torch.Tensor
    hidden: torch.Tensor | None = None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 9).double(), nn.Linear(9, 6).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = inputs + self.outer(torch.tanh(self.inner(inputs)))
        return outputs


class Network(nn.Module):
    """Two blocks and a head; ``reentrant`` recomputes the blocks, ``tied`` has them share a parameter."""

    def __init__(self, *, reentrant: bool | None = None, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 1).double()
        self.reentrant = reentrant
        if tied:
            self.blocks[1].inner.weight = self.blocks[0].inner.weight
        if frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                inputs = block(inputs)
            else:
                # The reentrant form differentiates nothing that was not differentiable before it.
                given = inputs.requires_grad_() if self.reentrant and inputs.is_leaf else inputs
                inputs = checkpoint(block, given, use_reentrant=self.reentrant)
        outputs: torch.Tensor = self.head(inputs)
        return outputs


class InDataclass(Network):
    def forward(self, inputs: torch.Tensor) -> Any:
        outputs = super().forward(inputs)
        return Output(predictions=outputs, hidden=outputs.square())


class DividesByItsInput(Network):
    """On the rows of zeros that stand in for none, its gradient is not a number."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs / inputs.norm(dim=1, keepdim=True) + inputs.abs().sqrt())


def mean(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(inputs), targets)


def of_dataclass(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    output = model(inputs)
    return F.mse_loss(output.predictions, targets) + 0.1 * output.hidden.mean()


def of_three_calls(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    one, two = model(inputs), model(inputs.flip(1))
    return F.mse_loss(one, targets) + F.mse_loss(two, one.detach()) + model(2 * inputs).square().mean()


def looked_at(model: nn.Module) -> nn.Module:
    """Hooks that look, and one that changes: the sign is turned on the way in and on the way out."""
    seen: list[float] = []
    for module in model.modules():
        module.register_forward_hook(lambda _, inputs, output: None)
        module.register_full_backward_hook(lambda _, inputs, outputs: None)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad is not None)))
    model.head.register_forward_hook(lambda _, inputs, output: -output)  # type: ignore[union-attr]
    return model


Build = Callable[[], nn.Module]
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
STRUCTURES: dict[str, tuple[Build, Loss]] = {
    "activations recomputed": (lambda: Network(reentrant=False), mean),
    "recomputed in the reentrant form": (lambda: Network(reentrant=True), mean),
    "tied parameters": (lambda: Network(tied=True), mean),
    "a frozen part": (lambda: Network(frozen=True), mean),
    "hooks of the user's": (lambda: looked_at(Network()), mean),
    "an output in a dataclass": (InDataclass, of_dataclass),
    "three calls a step": (Network, of_three_calls),
    "no number on no rows": (DividesByItsInput, mean),
}


def shard(model: nn.Module, by_block: bool) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks if by_block else ():  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    whole = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient: Any = parameter.grad
            whole[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()
    return whole


def worst_errors(rank: int, way: str) -> dict[str, float | str]:
    return {name: worst_error(name, way) for name in STRUCTURES}


def worst_error(name: str, way: str) -> float | str:
    """Largest distance to the gradient of one process, in steps that are whole or cut, over an epoch."""
    build, loss = STRUCTURES[name]
    data, worst = Rows(29), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with opened(ScriptedLink(SIZES)) as session:
            model = build()
            if way == "sharded":
                # A parameter that two shards share is in neither: tied ones belong into one.
                shard(model, by_block=name != "tied parameters")
            net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
            for batch in session.loader(data):
                rows = all_rows(session, batch[0], len(data))
                num_chunks = 2 if session.step % 2 and name != "three calls a step" else 1
                for _, inputs, targets in session.micro_batches(batch, num_chunks):
                    session.backward(loss(net, inputs, targets))
                alone = build()
                loss(alone, data.inputs[rows], data.targets[rows]).backward()
                expected, found = gradients(alone), gradients(model)
                if expected.keys() != found.keys():
                    return f"{sorted(expected.keys() ^ found.keys())} differ"
                worst = max(worst, *(float((found[key] - expected[key]).abs().max()) for key in expected))
                optimizer.step()
                optimizer.zero_grad()
    return worst


@pytest.mark.parametrize("way", ["replicated", "sharded"])
def test_the_gradient_is_exact_whatever_the_model_is_made_of(ranks: GlooGroup, way: str) -> None:
    for found in ranks.run(worst_errors, way, limit_s=180.0):
        assert found.keys() == STRUCTURES.keys()
        for name, error in found.items():
            assert isinstance(error, float), f"{name}: {error}"
            assert error < 1e-10, name


def update_in_backward(rank: int, way: str) -> tuple[str, float]:
    """Each parameter has an optimizer of its own, which steps as soon as the gradient is there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with opened(ScriptedLink(SIZES), replica_check_interval_steps=0) as session:
            model = shard(Network(), by_block=True) if way == "sharded" else Network()
            each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

            def step(parameter: nn.Parameter) -> None:
                each[parameter].step()
                each[parameter].zero_grad()

            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(step)
            net, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
            data, alone = Rows(24), Network()
            plain = torch.optim.SGD(alone.parameters(), lr=0.1)
            try:
                for ids, inputs, targets in session.loader(data):
                    rows = all_rows(session, ids, len(data))
                    mean(net, inputs, targets).backward()
                    mean(alone, data.inputs[rows], data.targets[rows]).backward()
                    plain.step()
                    plain.zero_grad()
            except ConfigError as error:
                return str(error), 0.0
            whole = [p.full_tensor() if way == "sharded" else p for p in model.parameters()]
            pairs = zip(whole, alone.parameters(), strict=True)
            return "", max(float((one - other).abs().max()) for one, other in pairs)


def test_an_optimizer_that_steps_within_the_backward_pass_is_refused_under_ddp_and_exact_under_fsdp(
    ranks: GlooGroup,
) -> None:
    for message, _ in ranks.run(update_in_backward, "replicated", limit_s=120.0):
        assert "step 0" in message
        assert "changed within the backward pass" in message
    for message, error in ranks.run(update_in_backward, "sharded", limit_s=120.0):
        assert message == ""
        assert error < 1e-10
