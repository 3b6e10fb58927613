"""Replicas stay alike, are told when they do not, and layers may be frozen and thaw meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from hypothesis import given
from hypothesis import strategies as st
from scripted import MemoryReporter, Rows, ScriptedLink, gradient_of, opened, two_layers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rex_ray.core.errors import RexError
from rex_ray.core.types import StepFlag, StepRecord
from rex_ray.worker.data.sampler import epoch_order
from rex_ray.worker.model.replica_check import hash_of

SIZES = (2, 3, 7)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8)


# --- the hash


@given(st.sampled_from(DTYPES), st.integers(0, 40), st.integers(0, 39), st.integers(0, 39))
def test_a_hash_tells_other_bits_and_another_order_and_nothing_else(
    dtype: torch.dtype, size: int, one: int, other: int
) -> None:
    values = torch.arange(size).to(dtype)
    assert hash_of(values) == hash_of(values.clone())
    assert hash_of(torch.stack([values, values], dim=1)[:, 0]) == hash_of(values), "a layout is no content"
    if one != other and max(one, other) < size:
        swapped = values.clone()
        swapped[[one, other]] = values[[other, one]]
        assert hash_of(swapped) != hash_of(values)
        changed = values.clone()
        changed[one] += 1
        assert hash_of(changed) != hash_of(values)


def test_a_hash_sees_one_bit_in_a_long_tensor_and_the_sign_of_zero() -> None:
    long = torch.randn(3_000_001, generator=torch.Generator().manual_seed(1))
    for place in (0, (1 << 16) - 1, 1 << 16, 3_000_000):
        flipped = long.clone()
        flipped.view(torch.int32)[place] ^= 1
        assert hash_of(flipped) != hash_of(long)
    assert hash_of(torch.tensor([0.0])) != hash_of(torch.tensor([-0.0]))
    assert hash_of(torch.zeros(0)) == hash_of(torch.zeros(0))


# --- drift


def drift(rank: int, when: int, where: str, interval: int = 1, leaves: bool = False) -> tuple[str, int, int]:
    """Rank 2 changes something of its own at a step, with which the loop may be left, without a report."""
    reporter, steps = MemoryReporter(), 0
    try:
        with opened(ScriptedLink(SIZES), reporter, replica_check_interval_steps=interval) as session:
            model = nn.Sequential(nn.BatchNorm1d(6), two_layers()).double()
            model.register_buffer("calls", torch.zeros(1))
            net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for _, inputs, targets in session.loader(Rows(120)):
                optimizer.zero_grad()
                F.mse_loss(net(inputs), targets).backward()
                if rank == 2 and session.step == when:
                    with torch.no_grad():
                        model.get_parameter(where)[0] += 1e-12
                optimizer.step()
                steps += 1
                if leaves and session.step == when:
                    return "", steps, 0
            session.report({})
    except RexError as refusal:
        return str(refusal), steps, len(reporter.saves)
    return "accepted", steps, len(reporter.saves)


@pytest.mark.dist
def test_b5_replicas_that_drift_apart_are_told_by_rank_and_name(ranks: GlooGroup) -> None:
    for error, steps, num_saves in ranks.run(drift, 4, "1.2.bias"):
        assert "the model's replicas differ before the update of step" in error
        assert "1.2.bias" in error
        assert "of rank 2 from the other 2" in error
        assert 4 <= steps <= 10
        assert num_saves == 0
    for error, steps, num_saves in ranks.run(drift, 4, "1.2.bias", 1000):
        assert "the model's replicas differ after step 9: " in error, "a pass does not end without a look"
        assert (steps, num_saves) == (10, 0)
    for error, steps, _ in ranks.run(drift, 6, "1.2.bias", 1, True):
        assert "the model's replicas differ before the update of step 6" in error, "nor a loop that is left"
        assert steps == 7
    for error, _, num_saves in ranks.run(drift, 4, "1.2.bias", 0):
        assert (error, num_saves) == ("accepted", 1), "the change is one that nothing else notices"


@pytest.mark.dist
def test_replicas_with_statistics_of_their_own_rows_are_alike_where_it_matters(ranks: GlooGroup) -> None:
    for error, steps, num_saves in ranks.run(drift, -1, ""):
        assert (error, steps, num_saves) == ("accepted", 10, 1)


# --- B5: parameters that only some use


class Branching(nn.Module):
    """Which head is used depends on the rows that a rank happens to have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.trunk = nn.Linear(6, 4).double()
        self.heads = nn.ModuleList(nn.Linear(4, 1).double() for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.heads[int(inputs.sum() > 0)](torch.tanh(self.trunk(inputs)))


def branch_by_data(rank: int, finds: bool) -> tuple[str, torch.Tensor, float]:
    data, worst, error = Rows(120), 0.0, "accepted"
    model = Branching()
    try:
        with opened(ScriptedLink(SIZES), replica_check_interval_steps=1, collective_timeout_s=3.0) as session:
            given = DistributedDataParallel(model, find_unused_parameters=True) if finds else model
            net, optimizer = session.prepare(given, torch.optim.SGD(model.parameters(), lr=0.05))
            for step, (_, inputs, targets) in enumerate(session.loader(data)):
                optimizer.zero_grad()
                F.mse_loss(net(inputs), targets).backward()
                ids, begin, expected = epoch_order(0, 0, 120)[12 * step : 12 * step + 12], 0, 0.0
                alone = Branching()
                alone.load_state_dict(model.state_dict())
                for size in SIZES:
                    rows = ids[begin : begin + size]
                    begin += size
                    expected = expected + size / 12 * F.mse_loss(alone(data.inputs[rows]), data.targets[rows])
                expected.backward()
                worst = max(worst, float((gradient_of(model) - gradient_of(alone)).abs().max()))
                optimizer.step()
    except RexError as refusal:
        error = str(refusal)
    return error, torch.cat([p.detach().reshape(-1) for p in model.parameters()]), worst


@pytest.mark.dist
def test_b5_a_branch_that_depends_on_the_ranks_data_contributes_zeros_or_is_named(ranks: GlooGroup) -> None:
    outcomes = ranks.run(branch_by_data, True)
    for error, weights, worst in outcomes:
        assert error == "accepted"
        assert worst < 1e-12
        assert torch.equal(weights, outcomes[0][1])
    for error, *_ in ranks.run(branch_by_data, False):
        assert "step 0" in error
        assert "heads." in error
        assert "find_unused_parameters=True" in error


# --- B7: frozen, then unfrozen


def thaw(rank: int, num_chunks: int, how: str) -> tuple[torch.Tensor, list[StepRecord]]:
    """Nine tenths of the parameters are frozen for an epoch, and trained in the second one."""
    link, model = ScriptedLink((2, 0, 10)), two_layers()
    model[0].requires_grad_(False)
    with opened(link, norm_interval_steps=1, replica_check_interval_steps=1) as session:
        given = DistributedDataParallel(model) if how == "own ddp" else model
        trained = model.parameters() if how != "added" else model[2].parameters()
        make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
        net, optimizer = session.prepare(given, make(trained, lr=0.05, momentum=0.9))
        loader = session.loader(Rows(60))
        for epoch in session.epochs(2):
            model[0].requires_grad_(epoch == 1)
            if how == "added" and epoch == 1:
                optimizer.add_param_group({"params": model[0].parameters()})
            for batch in loader:
                optimizer.zero_grad()
                for _, inputs, targets in session.micro_batches(batch, num_chunks):
                    session.backward(F.mse_loss(net(inputs), targets))
                optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), link.steps


def thaw_alone() -> tuple[torch.Tensor, list[float]]:
    model, data, norms = two_layers(), Rows(60), []
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        model[0].requires_grad_(epoch == 1)
        for ids in epoch_order(0, epoch, 60).split(12):
            optimizer.zero_grad()
            F.mse_loss(model(data.inputs[ids]), data.targets[ids]).backward()
            norms.append(float(gradient_of(model).square().sum()))
            optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), norms


@pytest.mark.dist
@pytest.mark.parametrize(("num_chunks", "how"), [(1, "bare"), (3, "added"), (1, "own ddp")])
def test_b7_layers_that_thaw_train_as_in_one_process_and_are_measured_afresh(
    ranks: GlooGroup, num_chunks: int, how: str
) -> None:
    weights, norms = thaw_alone()
    for rank, (found, steps) in enumerate(ranks.run(thaw, num_chunks, how)):
        assert torch.allclose(found, weights, rtol=0, atol=1e-10)
        assert [k for k, record in enumerate(steps) if record.flags & StepFlag.OTHER_PARAMETERS] == [5]
        assert all(record.weighted_sq_norm is not None for record in steps)
        if rank == 0:
            assert [record.global_sq_norm for record in steps] == pytest.approx(norms, rel=1e-9)
