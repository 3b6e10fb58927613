"""The norms of a step are of its groups and its whole, over what is trained, after Adam's scaling; and unbiased."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scripted import Rows, ScriptedLink, gradient_of, opened, two_layers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from rex_ray.core.noise_scale import GradientMoments, moments_from_groups
from rex_ray.core.types import StepFlag, StepRecord
from rex_ray.worker.model.preconditioner import AdamPreconditioner, _scaling_at_once, optimizer_family

ADAMS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "fused": partial(torch.optim.AdamW, fused=True),
}


def scaling_by_hand(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return ``1 / (sqrt(v_hat) + eps)`` per parameter, as the optimizer's own formula has it."""
    scaling = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            square = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
            v_hat = square / (1 - group["betas"][1] ** float(state["step"]))
            scaling.append(1.0 / (v_hat.sqrt() + group["eps"]))
    return scaling


def own_gradient(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """Return the mean gradient of these rows at the model's present weights."""
    twin = copy.deepcopy(model)
    parameters = [p for p in twin.parameters() if p.requires_grad]
    return list(torch.autograd.grad(F.mse_loss(twin(inputs), targets), parameters))


def scaled_sq(gradients: list[torch.Tensor], scaling: list[torch.Tensor]) -> float:
    return sum(float((g * p).square().sum()) for g, p in zip(gradients, scaling, strict=True))


# --- Adam


def norms_under_adam(rank: int, name: str, num_chunks: int) -> list[tuple[StepRecord, float, float]]:
    """Return each step's record, and rows times the local and the reduced norm as computed by hand."""
    link, expected = ScriptedLink((2, 0, 10)), []
    with opened(link, norm_interval_steps=1) as session:
        model = two_layers()
        first, *others = model.parameters()
        groups = [{"params": [first], "betas": (0.9, 0.99), "eps": 1e-3}, {"params": others}]
        ddp, optimizer = session.prepare(model, ADAMS[name](groups, lr=0.05))
        for batch in session.loader(Rows(48)):
            scaling = scaling_by_hand(optimizer) if optimizer.state else []
            weighted = 0.0
            for _, inputs, targets in session.micro_batches(batch, num_chunks):
                if scaling and len(inputs):
                    weighted += len(inputs) * scaled_sq(own_gradient(model, inputs, targets), scaling)
                session.backward(F.mse_loss(ddp(inputs), targets))
            reduced = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            expected.append((weighted, scaled_sq(reduced, scaling) if scaling else 0.0))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # norms are of the gradient before
            optimizer.step()
            optimizer.zero_grad()
            preconditioner = session._tracker.norms.preconditioner
            assert preconditioner is not None
            assert not preconditioner._scaling, "a copy of the parameters is held within measured steps only"
    assert link.group is None or link.group.optimizer == "adam"
    return [(record, *by_hand) for record, by_hand in zip(link.steps, expected, strict=True)]


@pytest.mark.dist
@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("name", ADAMS)
def test_adams_norms_are_of_the_gradient_times_its_own_scaling(ranks: GlooGroup, name: str, num_chunks: int) -> None:
    for rank, steps in enumerate(ranks.run(norms_under_adam, name, num_chunks)):
        assert len(steps) == 4
        assert steps[0][0].weighted_sq_norm is steps[0][0].global_sq_norm is None, "there is no mean square yet"
        for record, weighted, reduced in steps[1:]:
            assert record.num_groups == (min(2, num_chunks), 0, num_chunks)[rank]
            assert record.weighted_sq_norm == pytest.approx(weighted, rel=1e-12)
            if rank == 0:
                assert record.global_sq_norm == pytest.approx(reduced, rel=1e-12)
            assert not record.flags & StepFlag.OTHER_PARAMETERS


def test_families_are_told_by_what_divides_the_gradient() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    adams = (*ADAMS.values(), torch.optim.Adamax)
    assert {optimizer_family(make([parameter])) for make in adams} == {"adam"}
    others = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adafactor)
    assert {optimizer_family(make([parameter], lr=0.1)) for make in others} == {"sgd"}


def test_an_adam_without_mean_squares_is_warned_of_and_not_measured() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adamax([parameter])
    preconditioner = AdamPreconditioner(optimizer)
    preconditioner.begin()
    assert not preconditioner.knows(parameter)
    parameter.grad = torch.ones(2)
    optimizer.step()
    with pytest.warns(UserWarning, match="Adamax keeps no exp_avg_sq"):
        assert not preconditioner.knows(parameter)


class AdamOfAnotherLibrary(torch.optim.Optimizer):
    """Counts its steps in the group, as fused Adams outside torch do, or nowhere."""

    def __init__(self, parameters: list[nn.Parameter], *, counts: bool, shape: tuple[int, ...]) -> None:
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.75), "eps": 1e-8, **({"step": 2} if counts else {})})
        self.state[parameters[0]]["exp_avg_sq"] = torch.full(shape, 4.0)


def test_an_adam_may_count_its_steps_in_the_group() -> None:
    parameter = nn.Parameter(torch.ones(2))
    preconditioner = AdamPreconditioner(AdamOfAnotherLibrary([parameter], counts=True, shape=(2,)))
    preconditioner.begin()
    assert preconditioner.knows(parameter)
    norm = preconditioner.squared_norm([torch.ones(2)], [parameter])
    assert float(norm) == pytest.approx(2 * (1 - 0.75**2) / 4.0, rel=1e-6)


@pytest.mark.parametrize(("counts", "shape"), [(False, (2,)), (True, (1,))])
def test_an_adam_whose_moments_cannot_be_read_is_warned_of(counts: bool, shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.ones(2))
    preconditioner = AdamPreconditioner(AdamOfAnotherLibrary([parameter], counts=counts, shape=shape))
    preconditioner.begin()
    with pytest.warns(UserWarning, match="AdamOfAnotherLibrary keeps no exp_avg_sq"):
        assert not preconditioner.knows(parameter)


def test_half_precision_moments_are_not_squared_in_half_precision() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([parameter], eps=1e-8)
    parameter.grad = torch.full((4,), 3.0, dtype=torch.bfloat16)
    optimizer.step()
    preconditioner = AdamPreconditioner(optimizer)
    preconditioner.begin()
    norm = preconditioner.squared_norm([parameter.grad], [parameter])
    assert norm.dtype == torch.float32
    v_hat = float(optimizer.state[parameter]["exp_avg_sq"][0]) / (1 - 0.999)
    assert float(norm) == pytest.approx(4 * 9.0 / v_hat, rel=1e-3)


def test_many_tensors_at_once_have_the_same_scaling() -> None:
    generator = torch.Generator().manual_seed(0)
    states: list[Any] = [
        (torch.rand(shape, generator=generator, dtype=torch.float64), correction, eps)
        for shape, correction, eps in [((3, 4), 0.3, 1e-3), ((5,), 0.7, 1e-8)]
    ]
    for (square, correction, eps), scaling in zip(states, _scaling_at_once(states), strict=True):
        assert torch.allclose(scaling, 1 / ((square / correction).sqrt() + eps), rtol=1e-14)


def test_an_adam_that_the_controller_was_not_told_of_is_warned_of_and_measured_as_it_was_told() -> None:
    link = ScriptedLink()
    with opened(link, norm_interval_steps=1) as session:
        model = two_layers()
        loader = session.loader(Rows(24))
        with pytest.warns(UserWarning, match=r"of Adam's kind.*call prepare first.*prepare_scheduler"):
            net, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), lr=0.0))
        gradients = []
        for _, inputs, targets in loader:
            F.mse_loss(net(inputs), targets).backward()
            gradients.append(gradient_of(model))
            optimizer.step()
            optimizer.zero_grad()
    assert link.group is not None
    assert link.group.optimizer == "sgd"
    squares = sum(float(g.square().sum()) for g in gradients)
    assert link.steps[1].weighted_sq_norm == pytest.approx(12 * squares, rel=1e-12)


# --- which parameters count


class TiedAndFrozen(nn.Module):
    """One weight used twice, a large frozen layer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.backbone = nn.Linear(6, 6).double()
        self.inner = nn.Linear(6, 6, bias=False).double()
        self.again = nn.Linear(6, 6, bias=False).double()
        self.again.weight = self.inner.weight
        self.head = nn.Linear(6, 1).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(torch.tanh(self.inner(self.backbone(inputs)))))


def norms_of_tied_and_frozen(rank: int, num_chunks: int) -> tuple[StepRecord, float, float]:
    link = ScriptedLink((3, 4, 5))
    with opened(link, norm_interval_steps=1) as session:
        model = TiedAndFrozen()
        model.backbone.requires_grad_(False)
        ddp, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        weighted = 0.0
        for batch in session.loader(Rows(12)):
            for _, inputs, targets in session.micro_batches(batch, num_chunks):
                own = own_gradient(model, inputs, targets)
                assert len(own) == 3, "the tied weight, and the head's weight and bias"
                weighted += len(inputs) * sum(float(g.square().sum()) for g in own)
                session.backward(F.mse_loss(ddp(inputs), targets))
    return link.steps[0], weighted, float(gradient_of(model).square().sum())


@pytest.mark.dist
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_tied_parameters_count_once_and_frozen_ones_not_at_all(ranks: GlooGroup, num_chunks: int) -> None:
    for rank, (record, weighted, reduced) in enumerate(ranks.run(norms_of_tied_and_frozen, num_chunks)):
        assert record.weighted_sq_norm == pytest.approx(weighted, rel=1e-12)
        if rank == 0:
            assert record.global_sq_norm == pytest.approx(reduced, rel=1e-12)


def freeze_and_thaw(rank: int, name: str) -> list[tuple[StepRecord, float, float]]:
    """Two steps with all layers, three with the first one frozen and its old gradient left on it, then all again."""
    link, expected = ScriptedLink((3, 4, 5)), []
    with opened(link, norm_interval_steps=1) as session:
        model = two_layers()
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        make = torch.optim.SGD if name == "sgd" else ADAMS[name]
        optimizer = make(model.parameters(), lr=0.0)
        ddp, optimizer = session.prepare(ddp, optimizer)
        for k, (_, inputs, targets) in enumerate(session.loader(Rows(96))):
            model[0].requires_grad_(not 2 <= k < 5)
            for p in model.parameters():
                if p.requires_grad:
                    p.grad = None
            own = own_gradient(model, inputs, targets)
            F.mse_loss(ddp(inputs), targets).backward()
            trained = [p for p in model.parameters() if p.requires_grad]
            scaling = scaling_by_hand(optimizer) if name != "sgd" and k else [torch.ones(())] * 4
            by_parameter = dict(zip(model.parameters(), scaling, strict=True))
            scaling = [by_parameter[p] for p in trained]
            if k in (2, 3, 4):
                assert model[0].weight.grad is not None, "a gradient that is left over is the case to show"
            reduced = scaled_sq([p.grad for p in trained if p.grad is not None], scaling)
            expected.append((len(inputs) * scaled_sq(own, scaling), reduced))
            optimizer.step()
    return [(record, *by_hand) for record, by_hand in zip(link.steps, expected, strict=True)]


@pytest.mark.dist
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_b7_norms_are_over_what_is_trained_and_a_thaw_is_told(ranks: GlooGroup, name: str) -> None:
    for rank, steps in enumerate(ranks.run(freeze_and_thaw, name)):
        assert [k for k, (r, *_) in enumerate(steps) if r.flags & StepFlag.OTHER_PARAMETERS] == [2, 5]
        for k, (record, weighted, reduced) in enumerate(steps):
            if name == "adam" and k == 0:
                assert record.weighted_sq_norm is None
                continue
            assert record.weighted_sq_norm == pytest.approx(weighted, rel=1e-12)
            assert record.global_sq_norm == (pytest.approx(reduced, rel=1e-12) if rank == 0 else None)


# --- tokens, and hooks that round


def token_norms(rank: int) -> tuple[StepRecord, float]:
    """One row per rank of 2, 3 and 10 tokens: under token weights a step's three rows are 0.4, 0.6 and 2 of them."""
    tokens, link = (2, 3, 10), ScriptedLink((1, 1, 1))
    with opened(link, global_batch_size=3, weight_by="tokens", norm_interval_steps=1) as session:
        model = two_layers()
        ddp, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for _, inputs, targets in session.loader(Rows(3)):
            own = own_gradient(model, inputs, targets)
            session.backward(F.mse_loss(ddp(inputs), targets), weight=tokens[rank])
    return link.steps[0], tokens[rank] / 5 * sum(float(g.square().sum()) for g in own)


def norms_under_a_lossy_hook(rank: int) -> list[StepRecord]:
    link = ScriptedLink((3, 4, 5))
    with opened(link, norm_interval_steps=1) as session:
        model = two_layers()
        ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        session.register_comm_hook(None, bf16_compress_hook)
        for batch in session.loader(Rows(24)):
            for _, inputs, targets in session.micro_batches(batch, 2):
                session.backward(F.mse_loss(ddp(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    return link.steps


@pytest.mark.dist
def test_under_token_weights_groups_count_by_their_share_of_the_tokens(ranks: GlooGroup) -> None:
    for record, weighted in ranks.run(token_norms):
        assert record.weighted_sq_norm == pytest.approx(weighted, rel=1e-12)


@pytest.mark.dist
def test_a_hook_that_rounds_leaves_no_norms(ranks: GlooGroup) -> None:
    for records in ranks.run(norms_under_a_lossy_hook):
        assert [(record.weighted_sq_norm, record.global_sq_norm) for record in records] == [(None, None)] * 2


# --- what they estimate

NUM_ROWS = 360


def true_moments(data: Rows, model: nn.Linear, scaling: torch.Tensor) -> GradientMoments:
    """Return ``|G|^2`` and ``tr(S)`` of a linear model's squared error over all rows."""
    with torch.no_grad():
        rows = torch.cat([data.inputs, torch.ones(len(data), 1, dtype=torch.float64)], dim=1)
        gradients = 2 * (model(data.inputs) - data.targets) * rows * scaling
    mean = gradients.mean(0)
    trace = float((gradients - mean).square().sum()) / (len(data) - 1)
    return GradientMoments(sq_norm=float(mean.square().sum()), noise_trace=trace)


def estimates_and_truths(
    rank: int, sizes: tuple[int, ...], name: str, num_epochs: int
) -> tuple[list[StepRecord], list[GradientMoments]]:
    """Weights that do not move; the last of several ranks cuts its share in two."""
    data, link, truths = Rows(NUM_ROWS), ScriptedLink(sizes), []
    with opened(link, global_batch_size=sum(sizes), norm_interval_steps=1) as session:
        torch.manual_seed(6)
        model = nn.Linear(6, 1).double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
        if name == "adam":
            optimizer = torch.optim.Adam(model.parameters(), lr=0.0, eps=1e-2)
        net, optimizer = session.prepare(model, optimizer)
        loader = session.loader(data)
        for _ in session.epochs(num_epochs):
            for batch in loader:
                scaling = [torch.ones_like(p) for p in model.parameters()]
                if name == "adam" and optimizer.state:
                    scaling = scaling_by_hand(optimizer)
                truths.append(true_moments(data, model, torch.cat([s.reshape(-1) for s in scaling])))
                for _, inputs, targets in session.micro_batches(batch, 2 if rank == len(sizes) - 1 > 0 else 1):
                    session.backward(F.mse_loss(net(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    return link.steps, truths


def check_unbiased(per_rank: list[tuple[list[StepRecord], list[GradientMoments]]]) -> None:
    """Mean estimates lie within three standard errors of the truth, and those are small enough to mean something."""
    differences = []
    for k, truth in enumerate(per_rank[0][1]):
        records = [records[k] for records, _ in per_rank]
        if records[0].weighted_sq_norm is None:
            continue
        estimate = moments_from_groups(
            [record.weighted_sq_norm for record in records],
            [record.num_groups for record in records],
            [record.num_rows * record.num_norm_steps for record in records],
            records[0].global_sq_norm or math.nan,
            dataset_size=NUM_ROWS,
        )
        differences.append(
            (estimate.sq_norm / truth.sq_norm - 1, estimate.noise_trace / truth.noise_trace - 1),
        )
    off = torch.tensor(differences, dtype=torch.float64)
    error = off.std(0) / math.sqrt(len(off))
    assert bool((error < torch.tensor([0.1, 0.05])).all()), error
    assert bool((off.mean(0).abs() < 3 * error).all()), (off.mean(0), error)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_norms_of_skewed_shares_estimate_the_moments_without_bias(ranks: GlooGroup, name: str) -> None:
    check_unbiased(ranks.run(estimates_and_truths, (2, 4, 18), name, 30))


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_c3_two_steps_of_one_worker_estimate_the_moments_without_bias(name: str) -> None:
    check_unbiased([estimates_and_truths(0, (24,), name, 40)])
