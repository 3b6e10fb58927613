"""Losses that are no mean over rows, written as the documentation says: the gradient is that of one process.

Sums of weights, counts of all ranks, negatives of other ranks, penalties on input gradients, two optimizers; each with
unequal shares, one of them of no rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scripted import Rows, ScriptedLink, gradient_of, opened, two_layers
from test_worker_gradients import all_rows
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from rex_ray.worker.session import Session

pytestmark = pytest.mark.dist

SIZES = (8, 0, 4)
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.1], dtype=torch.float64)


def embedding() -> nn.Module:
    torch.manual_seed(4)
    return nn.Linear(6, 3).double()


def by_class_weights(net: nn.Module, inputs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(inputs), ids % 3, weight=CLASS_WEIGHTS)


def share_of_class_weights(session: Session, net: nn.Module, inputs: torch.Tensor, ids: torch.Tensor) -> None:
    session.backward(by_class_weights(net, inputs, ids), weight=CLASS_WEIGHTS[ids % 3].sum())


def by_counts_of_two_kinds(net: nn.Module, inputs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    outputs, is_object = net(inputs), ids % 4 == 0
    return outputs[:, 0].square().sum() / len(ids) + outputs[is_object, 1].exp().sum() / is_object.sum()


def share_of_two_kinds(session: Session, net: nn.Module, inputs: torch.Tensor, ids: torch.Tensor) -> None:
    outputs, is_object = net(inputs), ids % 4 == 0
    rows, objects = session.pool_sum(torch.tensor([len(ids), int(is_object.sum())])).tolist()
    part = outputs[:, 0].square().sum() / rows + outputs[is_object, 1].exp().sum() / objects
    backward_part(session, part)


def by_all_pairs(net: nn.Module, inputs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    embedded = net(inputs)
    return F.cross_entropy(embedded @ embedded.T, torch.arange(len(embedded)))


def share_of_all_pairs(session: Session, net: nn.Module, inputs: torch.Tensor, ids: torch.Tensor) -> None:
    embedded = of_all_ranks(session, net(inputs))
    backward_part(session, F.cross_entropy(embedded @ embedded.T, torch.arange(len(embedded))))


def backward_part(session: Session, part: torch.Tensor) -> None:
    """Differentiate this rank's part of a loss that is the sum of all ranks' parts."""
    weight = session.share_weight
    session.backward(part * (session.world_size / weight if weight else 0.0))


def of_all_ranks(session: Session, rows: torch.Tensor) -> torch.Tensor:
    """Return every rank's rows, of which this rank's own carry a gradient."""
    counts = torch.zeros(session.world_size, dtype=torch.int64)
    counts[session.rank] = len(rows)
    counts = session.pool_sum(counts)
    padded = rows.new_zeros(int(counts.max()), *rows.shape[1:])
    padded[: len(rows)] = rows.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    parts = [part[:count] for part, count in zip(parts, counts, strict=True)]
    parts[session.rank] = rows
    return torch.cat(parts)


def with_input_penalty(net: nn.Module, inputs: torch.Tensor, weight: float) -> torch.Tensor:
    inputs = inputs.clone().requires_grad_()
    outputs = net(inputs)
    (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return outputs.square().mean() + weight * (gradient.norm(dim=1) - 1).square().mean()


def by_input_penalty(net: nn.Module, inputs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return with_input_penalty(net, inputs, 1.0)


def share_of_input_penalty(session: Session, net: nn.Module, inputs: torch.Tensor, ids: torch.Tensor) -> None:
    session.backward(with_input_penalty(net, inputs, session.share_weight))


Alone = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
Share = Callable[[Session, nn.Module, torch.Tensor, torch.Tensor], None]
LOSSES: dict[str, tuple[Callable[[], nn.Module], Alone, Share, str]] = {
    "class weights": (embedding, by_class_weights, share_of_class_weights, "tokens"),
    "counts of two kinds": (embedding, by_counts_of_two_kinds, share_of_two_kinds, "samples"),
    "pairs of all ranks": (embedding, by_all_pairs, share_of_all_pairs, "samples"),
    "penalty on input gradients": (two_layers, by_input_penalty, share_of_input_penalty, "samples"),
}


def worst_errors(rank: int) -> dict[str, float]:
    return {name: worst_error(name) for name in LOSSES}


def worst_error(name: str) -> float:
    build, alone, share, weight_by = LOSSES[name]
    data, worst = Rows(29), 0.0
    with opened(ScriptedLink(SIZES), weight_by=weight_by) as session:
        model = build()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for ids, inputs, _ in session.loader(data):
            rows = all_rows(session, ids, len(data))
            one = copy.deepcopy(model)
            one.zero_grad()
            alone(one, data.inputs[rows], rows).backward()
            optimizer.zero_grad()
            share(session, net, inputs, ids)
            worst = max(worst, float((gradient_of(model) - gradient_of(one)).abs().max()))
            optimizer.step()
    return worst


@pytest.mark.filterwarnings("ignore:Grad strides do not match:UserWarning")
def test_losses_that_are_no_mean_over_rows_have_the_gradient_of_one_process(ranks: GlooGroup) -> None:
    for found in ranks.run(worst_errors):
        assert found.keys() == LOSSES.keys()
        for name, error in found.items():
            assert error < 1e-10, name


class Adversaries(nn.Module):
    """Two networks with an optimizer each, in one module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.generator = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 6)).double()
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, noise: torch.Tensor, real: torch.Tensor | None = None) -> Any:
        if real is None:
            return self.critic(self.generator(noise))
        return self.critic(real), self.critic(self.generator(noise).detach())


def optimizers(model: Adversaries) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.SGD(model.critic.parameters(), 0.1), torch.optim.SGD(model.generator.parameters(), 0.1)


def play(net: nn.Module, critic: torch.optim.Optimizer, generator: torch.optim.Optimizer, batch: Any) -> None:
    _, real, noise = batch
    net.zero_grad()
    of_real, of_fake = net(noise, real)
    (F.softplus(-of_real).mean() + F.softplus(of_fake).mean()).backward()
    critic.step()
    net.zero_grad()
    F.softplus(-net(noise)).mean().backward()
    generator.step()


def adversaries(rank: int) -> float:
    data, model, alone = Rows(29), Adversaries(), Adversaries()
    with opened(ScriptedLink(SIZES)) as session:
        critic, generator = optimizers(model)
        net, critic = session.prepare(DistributedDataParallel(model, find_unused_parameters=True), critic)
        session.register(generator_optimizer=generator)
        own = optimizers(alone)
        for batch in session.loader(data):
            rows = all_rows(session, batch[0], len(data))
            play(net, critic, generator, batch)
            play(alone, *own, (rows, data.inputs[rows], data.targets[rows]))
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(float((one.detach() - other.detach()).abs().max()) for one, other in pairs)


@pytest.mark.filterwarnings("ignore:the DistributedDataParallel that session.prepare was given:UserWarning")
def test_two_networks_that_play_against_each_other_train_as_in_one_process(ranks: GlooGroup) -> None:
    assert max(ranks.run(adversaries)) < 1e-10


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm = nn.BatchNorm1d(2).double()
        self.cell = nn.GRU(2, 3).double()

    def forward(self, rows: PackedSequence) -> torch.Tensor:
        normed = rows._replace(data=self.norm(rows.data))
        last: torch.Tensor = self.cell(normed)[1][0]
        return last


def packed(rows: list[Any]) -> tuple[PackedSequence, torch.Tensor]:
    sequences = [inputs[: 2 * (1 + row % 3)].reshape(-1, 2) for row, inputs, _ in rows]
    return pack_sequence(sequences, enforce_sorted=False), torch.cat([target for *_, target in rows])


def train_on_packed_sequences(rank: int) -> tuple[list[int], torch.Tensor]:
    seen = []
    with opened(ScriptedLink(SIZES)) as session:
        model = Recurrent()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for rows, targets in session.loader(Rows(24), collate_fn=packed):
            seen.append(len(targets))
            optimizer.zero_grad()
            F.mse_loss(net(rows)[:, 0], targets).backward()
            optimizer.step()
    return seen, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_a_rank_without_rows_goes_along_where_a_batch_cannot_be_cut(ranks: GlooGroup) -> None:
    (first, one), (none, two), (third, three) = ranks.run(train_on_packed_sequences)
    assert (first, third) == ([8, 8], [4, 4])
    assert none == [1, 1]  # a row that stands for none, and weighs nothing
    assert torch.equal(one, two)
    assert torch.equal(one, three)
    assert bool(one.isfinite().all())


class Graph:
    """What cannot be cut into rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def to(self, device: torch.device) -> Graph:
        return self


def beside_a_graph(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor, Graph]:
    return torch.stack([row[1] for row in rows]), torch.stack([row[2] for row in rows]), Graph(len(rows))


def train_beside_a_graph(rank: int, ways: tuple[str, ...]) -> list[torch.Tensor]:
    trained = []
    for way in ways:
        with opened(ScriptedLink(SIZES), weight_by="tokens" if "tokens" in way else "samples") as session:
            model = two_layers()
            net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in session.loader(Rows(24), collate_fn=beside_a_graph):

                def loss_of(net: nn.Module, rows: Any) -> torch.Tensor:
                    return F.mse_loss(net(rows[0]), rows[1])

                if way == "tokens of a whole step":
                    session.train_step(batch, loss_of, weight=lambda rows: len(rows[0]))
                    continue
                optimizer.zero_grad()
                if way == "tokens":
                    session.backward(loss_of(net, batch), weight=len(batch[0]))
                elif way == "own chunks":
                    halves = [[column[:cut] for column in batch[:2]] for cut in (len(batch[0]) // 2,) if cut]
                    with session.accumulate():
                        for half in halves:
                            loss_of(net, half).backward()
                    loss_of(net, [column[len(batch[0]) // 2 :] for column in batch[:2]]).backward()
                else:
                    loss_of(net, batch).backward()
                optimizer.step()
            trained.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return trained


def test_a_row_that_stands_for_none_weighs_nothing_however_ranks_are_weighted(ranks: GlooGroup) -> None:
    for plain, *others in ranks.run(train_beside_a_graph, ("rows", "tokens", "tokens of a whole step", "own chunks")):
        for other in others:
            torch.testing.assert_close(other, plain)
