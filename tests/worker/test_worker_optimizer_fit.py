"""Optimizers that ranks cannot share are refused or warned of by name: before training, or at the first update."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scripted import Rows, ScriptedLink, opened, two_layers
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rex_ray.core.errors import ConfigError, RexError
from rex_ray.worker.session import Session

SIZES = (1, 3, 8)


class ScaledLoss(nn.Module):
    """A loss with a weight of its own, as metric learning and uncertainty weighting have."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs * self.scale, targets)


def train(session: Session, net: nn.Module, optimizer: torch.optim.Optimizer, loss: Any = F.mse_loss) -> None:
    for _, inputs, targets in session.loader(Rows(24)):
        optimizer.zero_grad()
        loss(net(inputs), targets).backward()
        optimizer.step()


def train_a_loss_too(rank: int) -> str:
    model, loss = two_layers(), ScaledLoss()
    with opened(ScriptedLink(SIZES)) as session:
        try:
            session.prepare(model, torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1))
        except ConfigError as error:
            return str(error)
    return "accepted"


def put_a_head_on_later(rank: int) -> str:
    model = two_layers()
    with opened(ScriptedLink(SIZES)) as session:
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model[2] = nn.Linear(8, 1).double()
        optimizer.add_param_group({"params": list(model[2].parameters())})
        try:
            train(session, net, optimizer)
        except ConfigError as error:
            return str(error)
    return "accepted"


@pytest.mark.dist
def test_parameters_outside_of_the_model_are_refused_since_nobody_would_average_their_gradient(
    ranks: GlooGroup,
) -> None:
    for message in ranks.run(train_a_loss_too):
        assert "the optimizer steps 1 parameters (of shapes (1,)) that were not the model's" in message
        assert "into one nn.Module" in message
    for message in ranks.run(put_a_head_on_later):
        assert "(of shapes (1, 8), (1,)) that were not the model's when session.prepare was given it" in message


def test_a_lone_worker_may_train_what_is_not_the_models() -> None:
    model, loss = two_layers(), ScaledLoss()
    with opened() as session:
        net, optimizer = session.prepare(model, torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1))
        session.register(loss=loss)
        train(session, net, optimizer, loss)
    assert float(loss.scale.detach()) != 1.0


def test_an_optimizer_of_another_copy_is_refused_since_nothing_would_train() -> None:
    optimizer = torch.optim.SGD(two_layers().parameters(), lr=0.1)
    with opened() as session, pytest.raises(ConfigError, match=r"none of them is the prepared .* nothing would train"):
        session.prepare(two_layers(), optimizer)


def test_copies_in_full_precision_are_refused_since_a_save_would_not_hold_them() -> None:
    model = nn.Linear(6, 1, dtype=torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    with opened() as session, pytest.raises(ConfigError, match=r"2 copies .* in float32, .* under session.autocast"):
        session.prepare(model, torch.optim.SGD(masters, lr=0.1))


def shard_the_optimizers_state(rank: int) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = two_layers()
    with opened(ScriptedLink(SIZES)) as session:
        try:
            session.prepare(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
        except ConfigError as error:
            return str(error)
    return "accepted"


@pytest.mark.dist
def test_an_optimizer_that_shards_its_own_state_is_refused_before_a_save_would_fail(ranks: GlooGroup) -> None:
    for message in ranks.run(shard_the_optimizers_state):
        assert "does not take a ZeroRedundancyOptimizer" in message
        assert "fully_shard" in message


class SharpnessAware(torch.optim.SGD):
    """Steps by methods of its own, and leaves the update to a base optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.base = torch.optim.SGD(self.param_groups, lr=lr)

    def second_step(self) -> None:
        self.base.step()


@pytest.mark.parametrize("prepares_base", [False, True])
def test_an_optimizer_that_is_never_stepped_is_warned_of_once(prepares_base: bool) -> None:
    model = two_layers()
    aware = SharpnessAware(model.parameters(), lr=0.1)
    with opened() as session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net, _ = session.prepare(model, aware.base if prepares_base else aware)
        loader = session.loader(Rows(12 * 21))
        for _ in session.epochs(2):
            for _, inputs, targets in loader:
                aware.zero_grad()
                F.mse_loss(net(inputs), targets).backward()
                aware.second_step()
    said = [str(warning.message) for warning in caught]
    assert sum("the prepared optimizer was not stepped in 20 batches" in message for message in said) == (
        0 if prepares_base else 1
    )


def search_along_lines(rank: int) -> tuple[list[str], float]:
    data, alone = Rows(24), two_layers()
    own = torch.optim.LBFGS(alone.parameters(), line_search_fn="strong_wolfe", max_iter=4)
    with opened(ScriptedLink(SIZES)) as session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = two_layers()
        made = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=4)
        net, optimizer = session.prepare(model, made)
        for ids, inputs, targets in session.loader(data):
            rows = session.pool_sum(torch.bincount(ids, minlength=24)).nonzero().reshape(-1)

            def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> float:
                optimizer.zero_grad()
                loss = F.mse_loss(net(inputs), targets)
                loss.backward()
                return session.pool(float(loss.detach()) * len(inputs), len(inputs))

            def own_closure(rows: torch.Tensor = rows) -> float:
                own.zero_grad()
                loss = F.mse_loss(alone(data.inputs[rows]), data.targets[rows])
                loss.backward()
                return float(loss.detach())

            optimizer.step(closure)
            own.step(own_closure)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    said = [str(warning.message) for warning in caught]
    return said, max(float((one - other).detach().abs().max()) for one, other in pairs)


@pytest.mark.dist
def test_lbfgs_is_warned_of_and_trains_as_in_one_process_with_the_loss_of_all_ranks(ranks: GlooGroup) -> None:
    for said, error in ranks.run(search_along_lines):
        assert any("LBFGS decides by the loss" in message for message in said)
        assert error < 1e-6


def follow_its_own_metric(rank: int) -> str:
    model = two_layers()
    with opened(ScriptedLink(SIZES)) as session:
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        schedule = session.prepare_scheduler(ReduceLROnPlateau(optimizer, patience=0, factor=0.5))
        loader = session.loader(Rows(24))
        try:
            for epoch in session.epochs(4):
                for _, inputs, targets in loader:
                    optimizer.zero_grad()
                    F.mse_loss(net(inputs), targets).backward()
                    optimizer.step()
                schedule.step(epoch if rank == 2 else -epoch)
        except RexError as error:
            return str(error)
    return "accepted"


@pytest.mark.dist
def test_replicas_that_drift_for_a_schedule_that_followed_a_ranks_own_metric_are_told_the_rates(
    ranks: GlooGroup,
) -> None:
    for message in ranks.run(follow_its_own_metric):
        assert "of rank 2 from the other 2" in message
        assert "So do their learning rates: 0.1 on ranks 0 and 1, 0.05 on rank 2" in message
        assert "session.pool" in message


def copy_what_trains(rank: int) -> list[bool]:
    same = []
    with opened(ScriptedLink(SIZES) if rank >= 0 else None) as session:
        model = two_layers()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        average = torch.optim.swa_utils.AveragedModel(net)
        for _, inputs, targets in session.loader(Rows(24)):
            optimizer.zero_grad()
            F.mse_loss(net(inputs), targets).backward()
            average(inputs).sum()  # no step of the session's, though it has a gradient
            optimizer.step()
            average.update_parameters(net)
        best = copy.deepcopy(net)
        same.append(list(best.state_dict()) == list(net.state_dict()))
        same.append(torch.equal(best(inputs), net(inputs)))
        same.append(session.unwrap(best) is not model and torch.equal(session.unwrap(best)[0].weight, model[0].weight))
        same.append(bool(average.n_averaged == session.step))
        same.append(best.training == net.training)
    return same


@pytest.mark.dist
def test_the_prepared_model_can_be_copied_as_for_an_average_of_its_weights(ranks: GlooGroup) -> None:
    for same in ranks.run(copy_what_trains):
        assert same == [True] * 5


def test_the_prepared_model_of_a_lone_worker_can_be_copied() -> None:
    assert copy_what_trains(-1) == [True] * 5
