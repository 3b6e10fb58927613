"""Loops that people write: what is right by itself stays right, what would go wrong in silence is refused by name."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scripted import MemoryReporter, Rows, ScriptedLink, gradient_of, opened, two_layers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rex_ray.core.errors import ConfigError, RexError
from rex_ray.core.types import StepFlag
from rex_ray.worker.measuring.probes import squared_norm, total_squared_norm
from rex_ray.worker.session import Session

SIZES = (1, 3, 8)


def prepared(session: Session, lr: float = 0.1) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    model = two_layers()
    net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    return model, net, optimizer


def update(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    _, inputs, targets = batch
    optimizer.zero_grad()
    F.mse_loss(net(inputs), targets).backward()
    optimizer.step()


# --- gradients


class Shaped(nn.Module):
    """Two layers whose predictions come in the shape that ``give`` makes of them."""

    def __init__(self, give: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.net = two_layers()
        self.give = give

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.give(self.net(inputs))


def written_in_place(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    outputs.mul_(2.0)
    outputs += 0.1
    return F.mse_loss(outputs, targets)


def column_written_in_place(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    outputs[:, 0] = outputs[:, 0] * 0.5
    return F.mse_loss(outputs, targets)


OUTPUTS_AND_LOSSES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "written in place": (lambda p: p, written_in_place),
    "a column written in place": (lambda p: p, column_written_in_place),
    "rectified in place": (lambda p: p, lambda out, y: F.mse_loss(F.relu(out, inplace=True), y)),
    "a view written in place": (lambda p: p.view(-1), lambda out, y: written_in_place(out, y.view(-1))),
    "a tuple with nothing": ((lambda p: (None, p, 3)), lambda out, y: F.mse_loss(out[1], y)),
    "a named sequence": (lambda p: p.max(dim=1, keepdim=True), lambda out, y: F.mse_loss(out.values, y)),
    "views of one tensor": (
        lambda p: torch.cat([p, p]).chunk(2),
        lambda out, y: F.mse_loss(out[0], y) + out[1].square().mean(),
    ),
}


def worst_error(rank: int, name: str, **wrapping: bool) -> float:
    """Largest distance, over an epoch, to the gradient of one process that holds all rows of the step."""
    give, loss = OUTPUTS_AND_LOSSES[name]
    data, worst = Rows(30), 0.0
    with opened(ScriptedLink(SIZES)) as session:
        model = Shaped(give)
        given = DistributedDataParallel(model, **wrapping) if wrapping else model
        net, optimizer = session.prepare(given, torch.optim.SGD(model.parameters(), lr=0.0))
        for ids, inputs, targets in session.loader(data):
            optimizer.zero_grad()
            loss(net(inputs), targets).backward()
            rows = session.pool_sum(torch.bincount(ids, minlength=30)).nonzero().reshape(-1)
            alone = Shaped(give)
            loss(alone(data.inputs[rows]), data.targets[rows]).backward()
            worst = max(worst, float((gradient_of(model) - gradient_of(alone)).abs().max()))
            optimizer.step()
    return worst


@pytest.mark.dist
@pytest.mark.parametrize("name", OUTPUTS_AND_LOSSES)
def test_the_gradient_is_exact_whatever_the_output_is_and_the_loop_does_to_it(ranks: GlooGroup, name: str) -> None:
    assert max(ranks.run(worst_error, name)) < 1e-10


def worst_error_of_own_wrapping(rank: int) -> float:
    return max(
        worst_error(rank, "written in place", find_unused_parameters=True),
        worst_error(rank, "written in place", static_graph=True),
    )


@pytest.mark.dist
def test_the_gradient_is_exact_under_the_users_own_ddp(ranks: GlooGroup) -> None:
    assert max(ranks.run(worst_error_of_own_wrapping)) < 1e-10


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(10, 1, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids % 10)


def train_a_sparse_table(rank: int) -> tuple[torch.Tensor, list[float | None]]:
    link = ScriptedLink(SIZES)
    with opened(link, norm_interval_steps=1) as session:
        model = Sparse()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for ids, _, targets in session.loader(Rows(30)):
            optimizer.zero_grad()
            F.mse_loss(net(ids), targets.float()).backward()
            optimizer.step()
    return model.table.weight.detach(), [record.global_sq_norm for record in link.steps]


@pytest.mark.dist
def test_sparse_gradients_are_averaged_and_measured(ranks: GlooGroup) -> None:
    tables, norms = zip(*ranks.run(train_a_sparse_table), strict=True)
    assert torch.equal(tables[0], tables[1])
    assert torch.equal(tables[0], tables[2])
    assert all(norm is not None and norm > 0 for norm in norms[0])


def test_norms_are_taken_in_single_precision_of_every_gradient() -> None:
    half = nn.Parameter(torch.zeros(500, dtype=torch.bfloat16))
    half.grad = torch.full((500,), 1.0078125, dtype=torch.bfloat16)
    sparse = nn.Parameter(torch.zeros(3, 2))
    sparse.grad = torch.sparse_coo_tensor([[1, 1]], [[1.0, 2.0], [3.0, 4.0]], (3, 2), check_invariants=True)
    assert float(total_squared_norm([half.grad])) == pytest.approx(500 * 1.0078125**2, rel=1e-6)
    assert float(total_squared_norm([half.grad, sparse.grad])) == pytest.approx(500 * 1.0078125**2 + 16 + 36, rel=1e-6)
    assert float(squared_norm(sparse.grad)) == 52.0  # entries of one row add up before they are squared


def test_the_norm_of_a_complex_gradient_is_real() -> None:
    gradient = torch.tensor([3.0 + 4.0j, 1.0j])
    assert float(total_squared_norm([gradient])) == 26.0
    assert float(total_squared_norm([gradient, torch.tensor([2.0])])) == 30.0


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,), (torch.bfloat16, torch.float32), (torch.float32,)])
def test_a_norm_stays_on_the_device_of_its_gradients(dtypes: tuple[torch.dtype, ...]) -> None:
    gradients = [torch.empty(3, dtype=dtype, device="meta") for dtype in dtypes]  # cannot be copied to the host
    assert total_squared_norm(gradients).device.type == "meta"


# --- replicas that would drift apart


def error_of(function: Callable[[], None]) -> str:
    try:
        function()
    except RexError as error:
        return str(error)
    return "accepted"


def differentiate_twice(rank: int) -> tuple[str, str]:
    def run(look_only: bool) -> None:
        with opened(ScriptedLink(SIZES)) as session:
            _, net, optimizer = prepared(session)
            for _, inputs, targets in session.loader(Rows(24)):
                optimizer.zero_grad()
                outputs = net(inputs.requires_grad_())
                F.mse_loss(outputs, targets).backward(retain_graph=True)
                if look_only:
                    torch.autograd.grad(outputs.sum(), inputs)
                else:
                    outputs.square().mean().backward()
                optimizer.step()

    return error_of(lambda: run(False)), error_of(lambda: run(True))


@pytest.mark.dist
def test_a_second_backward_pass_through_a_reduced_forward_pass_is_refused(ranks: GlooGroup) -> None:
    for refused, looked in ranks.run(differentiate_twice):
        assert "step 0: a second backward pass" in refused
        assert "Add the losses" in refused
        assert looked == "accepted"


class WithAnUnusedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = two_layers(), nn.Linear(6, 1).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)


def leave_a_head_unused(rank: int) -> tuple[str, str]:
    def run(wrap: Callable[[nn.Module], nn.Module]) -> None:
        with opened(ScriptedLink(SIZES)) as session:
            model = WithAnUnusedHead()
            net, optimizer = session.prepare(wrap(model), torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in session.loader(Rows(24)):
                update(net, optimizer, batch)

    finding = error_of(lambda: run(lambda model: DistributedDataParallel(model, find_unused_parameters=True)))
    return error_of(lambda: run(lambda model: model)), finding


@pytest.mark.dist
def test_b5_unused_parameters_are_named_before_the_first_update(ranks: GlooGroup) -> None:
    for refused, finding in ranks.run(leave_a_head_unused):
        assert "step 0" in refused
        assert "head.weight, head.bias" in refused
        assert "find_unused_parameters=True" in refused
        assert finding == "accepted"


def keep_a_frozen_layers_old_gradient(rank: int) -> str:
    model = two_layers()
    first, *others = model.parameters()
    first.requires_grad_(False).grad = torch.ones_like(first)

    def run() -> None:
        with opened(ScriptedLink(SIZES)) as session:
            net, optimizer = session.prepare(model, torch.optim.SGD(others, lr=0.1))
            for batch in session.loader(Rows(24)):
                update(net, optimizer, batch)

    return error_of(run)


@pytest.mark.dist
def test_a_gradient_left_on_a_frozen_layer_is_no_fault(ranks: GlooGroup) -> None:
    assert ranks.run(keep_a_frozen_layers_old_gradient) == ["accepted"] * 3


class KeepsItsBatchLength(nn.Module):
    """A cache as long as the rank's batch, as rotary embeddings keep one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = two_layers()
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.cache = torch.zeros(1000 * len(inputs))
        self.count = self.count + len(inputs)
        return self.net(inputs)


def train_with_a_cache(rank: int) -> tuple[int, float]:
    with opened(ScriptedLink((8, 3, 1))) as session:
        model = KeepsItsBatchLength()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in session.loader(Rows(24)):
            update(net, optimizer, batch)
    return len(model.cache), float(model.count)


@pytest.mark.dist
def test_buffers_that_are_not_saved_stay_each_ranks_own(ranks: GlooGroup) -> None:
    assert ranks.run(train_with_a_cache) == [(8000, 16.0), (3000, 16.0), (1000, 16.0)]


def train_on_a_foreign_batch(rank: int) -> list[str]:
    with opened(ScriptedLink(SIZES)) as session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, net, optimizer = prepared(session)
        for _ in range(2):
            update(net, optimizer, (None, torch.ones(2, 6).double(), torch.ones(2, 1).double()))
    return [str(warning.message) for warning in caught]


@pytest.mark.dist
def test_training_on_batches_of_another_loader_is_warned_of_once(ranks: GlooGroup) -> None:
    for messages in ranks.run(train_on_a_foreign_batch):
        assert len(messages) == 1
        assert "no batch of session.loader" in messages[0]


def pool_inside_a_step(rank: int) -> list[tuple[float, float]]:
    """Rank 1 computes for long; the others wait for it in a sum, once before and once after the gradient."""
    link = ScriptedLink((4, 4, 4))
    with opened(link) as session:
        _, net, optimizer = prepared(session)
        for _, inputs, targets in session.loader(Rows(36)):
            optimizer.zero_grad()
            loss = F.mse_loss(net(inputs), targets)
            time.sleep(0.1 if rank == 1 else 0.0)
            session.pool(float(loss), 1.0)
            loss.backward()
            optimizer.step()
            time.sleep(0.1 if rank == 1 else 0.0)
            session.pool(float(loss), 1.0)
    return [(record.compute_s, record.step_s) for record in link.steps]


@pytest.mark.dist
def test_a_sum_over_ranks_within_a_step_is_no_own_time(ranks: GlooGroup) -> None:
    first, slow, last = ranks.run(pool_inside_a_step)
    assert min(own for own, _ in slow) >= 0.1
    assert min(own for own, _ in first) < 0.05
    assert min(own for own, _ in last) < 0.05
    assert min(step for _, step in first + last) >= 0.15


# --- reports and epochs


def report_what_is_no_number(rank: int) -> list[Any]:
    link = ScriptedLink()
    with opened(link, collective_timeout_s=5.0) as session:
        session.report({"per class": np.array([1.0, 2.0]), "name": "7", "both": torch.ones(2), "one": torch.tensor(2)})
    return [dict(metric.metrics) for metric in link.metrics]


@pytest.mark.dist
def test_a_metric_that_is_no_number_keeps_nobody_waiting(ranks: GlooGroup) -> None:
    assert ranks.run(report_what_is_no_number) == [[{"one": 2.0}], [], []]


def test_a_report_without_a_save_is_no_gap_in_the_evidence() -> None:
    link = ScriptedLink()
    with opened(link, warm_up_steps=0, checkpoint_interval_s=3600.0) as session:
        _, net, optimizer = prepared(session)
        for batch in session.loader(Rows(48)):
            update(net, optimizer, batch)
            session.report({"loss": 1.0})
    assert [record.flags for record in link.steps] == [StepFlag.AFTER_GAP, *[StepFlag.NONE] * 3]


def test_a_save_is_a_gap_in_the_evidence() -> None:
    link = ScriptedLink()
    with opened(link, warm_up_steps=0, checkpoint_interval_s=0.0) as session:
        _, net, optimizer = prepared(session)
        for batch in session.loader(Rows(36)):
            update(net, optimizer, batch)
            session.report({})
    assert all(record.flags == StepFlag.AFTER_GAP for record in link.steps)


@pytest.mark.parametrize("leave", ["break", "return", "no epochs"])
def test_what_was_reported_last_is_saved_however_the_loop_ends(leave: str) -> None:
    reporter = MemoryReporter()

    def loop(session: Session) -> None:
        _, net, optimizer = prepared(session)
        loader = session.loader(Rows(36))
        for epoch in itertools.count() if leave == "no epochs" else session.epochs(10):
            for batch in loader:
                update(net, optimizer, batch)
            session.report({"epoch": epoch})
            if epoch == 1:
                if leave == "return":
                    return
                break

    with opened(reporter=reporter, checkpoint_interval_s=3600.0) as session:
        loop(session)
    assert [metrics for metrics, _ in reporter.saves] == [{"epoch": 1}]
    state = reporter.saves[0][1]
    assert state is not None
    assert (state["position"]["epoch"], state["position"]["cursor"]) == (2, 0)


def test_a_loop_that_fails_saves_nothing_more() -> None:
    reporter = MemoryReporter()

    def loop() -> None:
        with opened(reporter=reporter, checkpoint_interval_s=3600.0) as session:
            session.report({"epoch": 0})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert reporter.saves == []


def test_epochs_go_on_after_a_loop_over_them_was_left() -> None:
    with opened() as session:
        _, net, optimizer = prepared(session)
        loader = session.loader(Rows(36))
        epochs, ids = [], []
        for last in (3, 4):
            for epoch in session.epochs(last):
                epochs.append(epoch)
                for batch in loader:
                    update(net, optimizer, batch)
                    ids += batch[0].tolist()
                if epoch == 1:
                    break
        assert epochs == [0, 1, 2, 3]
        assert sorted(ids) == sorted(4 * list(range(36)))
        for batch in loader:  # and also without a loop over epochs
            update(net, optimizer, batch)
        assert session.step == 15


# --- what cannot be


def test_an_output_that_hides_its_tensors_is_refused_by_its_type() -> None:
    class Hidden:
        def __init__(self, values: torch.Tensor) -> None:
            self.values = values

    with opened() as session:
        model = Shaped(Hidden)
        net, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batches = iter(session.loader(Rows(36)))
        _, inputs, targets = next(batches)
        F.mse_loss(net(inputs).values, targets).backward()
        with pytest.raises(RexError, match="It returned Hidden, in which no tensor with a gradient"):
            next(batches)


def test_several_optimizers_are_refused_with_a_way_that_works() -> None:
    model = two_layers()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2]))
    with opened() as session:
        with pytest.raises(ConfigError, match=r"got a list: .* session.register"):
            session.prepare(model, [first, second])
        session.prepare(model, first)
        session.register(second=second)


def test_preparing_something_else_than_a_module_is_refused() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with opened() as session:
        with pytest.raises(ConfigError, match=r"an nn\.Module and its optimizer; got SGD"):
            session.prepare(optimizer)
        with pytest.raises(ConfigError, match=r"got a Rows; a data set is given to session\.loader"):
            session.prepare(model, optimizer, Rows(36))
        with pytest.raises(ConfigError, match=r"one model; .* got Sequential, SGD, Sequential"):
            session.prepare(model, optimizer, two_layers())


def test_batch_norm_that_the_controller_was_not_told_of_is_warned_of() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
    with opened() as session:
        session.loader(Rows(36))
        with pytest.warns(UserWarning, match="call prepare first"):
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
