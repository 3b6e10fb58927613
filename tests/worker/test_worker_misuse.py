"""A batch that no gradient came of is named with what probably happened to it, by the rank that left it out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scripted import Rows, ScriptedLink, opened
from test_worker_gradients import two_layers
from torch import nn

from rex_ray.core.errors import RexError


class Hidden:
    """An output that nobody can look into."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class HidesItsOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = two_layers()

    def forward(self, inputs: torch.Tensor) -> Hidden:
        return Hidden(self.net(inputs))


def leave_it_be(net: nn.Module, inputs: torch.Tensor) -> None:
    """As a loop does that evaluates on the training loader."""


def skip_after_the_forward_pass(net: nn.Module, inputs: torch.Tensor) -> None:
    net(inputs)


def hide_the_loss(net: nn.Module, inputs: torch.Tensor) -> None:
    net(inputs).tensor.sum().backward()


@pytest.mark.parametrize(
    ("model", "use", "reason"),
    [
        (two_layers, leave_it_be, "Call the model that session.prepare returned"),
        (two_layers, skip_after_the_forward_pass, "on_non_finite='skip' has all ranks leave out that step"),
        (HidesItsOutput, hide_the_loss, "It returned Hidden, in which no tensor with a gradient was found"),
    ],
)
def test_a_batch_without_a_gradient_is_told_with_its_step_and_what_to_do(
    model: Callable[[], nn.Module], use: Callable[[nn.Module, torch.Tensor], None], reason: str
) -> None:
    net = model()
    with opened(ScriptedLink()) as session:
        net, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

        def run() -> None:
            for _, inputs, _ in session.loader(Rows(24)):
                use(net, inputs)

        with pytest.raises(RexError, match="step 0: the next training batch was asked for") as told:
            run()
    assert reason in str(told.value)
