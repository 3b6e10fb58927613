"""Numbers that go wrong on one rank: what all ranks do about it together, and that nothing is poisoned by it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scripted import MemoryReporter, Rows, ScriptedLink, opened, two_layers
from torch import nn

from rex_ray.core.errors import RexError
from rex_ray.core.types import StepFlag
from rex_ray.worker.data.sampler import epoch_order
from rex_ray.worker.link import IncidentRecord
from rex_ray.worker.measuring.probes import DeferredScalar
from rex_ray.worker.model import gradient_looks, non_finite

SIZES = (2, 3, 7)
POISONED_STEP, POISONED_RANK, NUM_STEPS = 7, 2, 12

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.05),
    "fused adam": partial(torch.optim.AdamW, lr=0.05, fused=True),
}


@dataclass
class Outcome:
    """What one rank saw."""

    error: str | None = None
    weights: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    state: list[torch.Tensor] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)
    incidents: list[IncidentRecord] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    num_saves: int = 0


def outcome_of(link: ScriptedLink, model: nn.Module, optimizer: torch.optim.Optimizer, error: str | None) -> Outcome:
    return Outcome(
        error=error,
        weights=torch.cat([p.detach().reshape(-1) for p in model.parameters()]),
        state=[v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)],
        skipped=[r.step for r in link.steps if StepFlag.SKIPPED in r.flags],
        measured=[r.step for r in link.steps if r.weighted_sq_norm is not None],
        incidents=[r for r in link.records if isinstance(r, IncidentRecord) and r.kind == "non_finite"],
    )


def train_with_a_nan(rank: int, policy: str, name: str, how: str) -> Outcome:
    """Twelve steps; at the seventh, rank 2 alone meets a NaN."""
    link, reporter, error = ScriptedLink(SIZES), MemoryReporter(), None
    model = two_layers()
    optimizer = OPTIMIZERS[name](model.parameters())
    rates = []
    try:
        with opened(link, reporter, norm_interval_steps=1, on_non_finite=policy) as session:
            net, optimizer = session.prepare(model, optimizer)
            loader = session.loader(Rows(12 * NUM_STEPS))
            scheduler = session.prepare_scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9))
            bad = False
            if how == "inside backward":
                model[0].weight.register_hook(lambda gradient: gradient * (math.nan if bad else 1.0))
            for batch in loader:
                bad = (rank, session.step) == (POISONED_RANK, POISONED_STEP)
                optimizer.zero_grad()
                for k, (_, inputs, targets) in enumerate(
                    session.micro_batches(batch, 2 if how == "micro-batch" else 1)
                ):
                    loss = F.mse_loss(net(inputs), targets)
                    if bad and k == 0 and how != "inside backward":
                        loss = loss * (math.inf if how == "infinite" else math.nan)
                    if how == "plain":
                        loss.backward()
                    else:
                        session.backward(loss)
                if how == "clipped":
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 100.0)
                optimizer.step()
                scheduler.step()
                rates.append(optimizer.param_groups[0]["lr"])
            session.report({})
    except RexError as refusal:
        error = str(refusal)
    outcome = outcome_of(link, model, optimizer, error)
    outcome.rates, outcome.num_saves = rates, len(reporter.saves)
    return outcome


def train_alone(name: str, num_steps: int, left_out: int | None) -> Outcome:
    """One process with all rows, which leaves the update of a step out."""
    model, data = two_layers(), Rows(12 * NUM_STEPS)
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    rates = []
    for step, ids in enumerate(epoch_order(0, 0, len(data)).split(12)[:num_steps]):
        optimizer.zero_grad()
        F.mse_loss(model(data.inputs[ids]), data.targets[ids]).backward()
        if step != left_out:
            optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    outcome = outcome_of(ScriptedLink(), model, optimizer, None)
    outcome.rates = rates
    return outcome


def assert_same(one: Outcome, other: Outcome) -> None:
    assert torch.allclose(one.weights, other.weights, rtol=0, atol=1e-10)
    assert len(one.state) == len(other.state) > 0
    for a, b in zip(one.state, other.state, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "how", "reason"),
    [
        ("sgd", "plain", "the gradient of the model's output is not on rank 2"),
        ("adam", "loss", "the loss is not on rank 2"),
        ("fused adam", "clipped", "the loss is not on rank 2"),
        ("adam", "micro-batch", "the loss is not on rank 2"),
        ("sgd", "infinite", "the loss is not on rank 2"),
        ("sgd", "inside backward", "the model's backward pass is not on rank 2"),
    ],
)
def test_b8_a_nan_on_one_rank_has_all_leave_the_step_out_and_poisons_nothing(
    ranks: GlooGroup, name: str, how: str, reason: str
) -> None:
    alone = train_alone(name, NUM_STEPS, left_out=POISONED_STEP)
    outcomes = ranks.run(train_with_a_nan, "skip", name, how)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None
        assert outcome.num_saves == 1
        if how != "clipped":
            assert_same(outcome, alone)
        assert torch.equal(outcome.weights, outcomes[0].weights)
        assert outcome.rates == alone.rates, "a schedule counts the rows, and they were seen"
        assert outcome.skipped == [POISONED_STEP]
        expected = set(range(1 if "adam" in name else 0, NUM_STEPS)) - {POISONED_STEP}
        assert set(outcome.measured) == expected, "no other step lost its norms"
        told = [(incident.rank, incident.step) for incident in outcome.incidents]
        assert told == ([(POISONED_RANK, POISONED_STEP)] if rank == POISONED_RANK else [])
    (incident,) = outcomes[POISONED_RANK].incidents
    assert reason in incident.message
    assert "all ranks left the step out" in incident.message


@pytest.mark.dist
def test_b8_a_nan_on_one_rank_stops_all_by_its_name_before_it_is_learnt(ranks: GlooGroup) -> None:
    alone = train_alone("adam", POISONED_STEP, left_out=None)
    outcomes = ranks.run(train_with_a_nan, "stop", "adam", "loss")
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None
        assert outcome.error.startswith("step 7: the gradient is not finite (in 0.weight, 0.bias, 2.weight and 1 more)")
        assert "because the loss is not on rank 2; nothing was updated" in outcome.error
        assert "on_non_finite='skip'" in outcome.error
        assert outcome.num_saves == 0
        assert_same(outcome, alone)
        assert [incident.rank for incident in outcome.incidents] == ([2] if rank == 2 else [])


@pytest.mark.dist
def test_b8_ignored_a_nan_poisons_all_as_in_plain_pytorch(ranks: GlooGroup) -> None:
    for outcome in ranks.run(train_with_a_nan, "ignore", "sgd", "loss"):
        assert outcome.error is None
        assert torch.isnan(outcome.weights).all()
        assert not outcome.skipped
        assert not outcome.incidents
        assert max(outcome.measured) <= POISONED_STEP, "evidence is finite: at most the own one of the step itself"


def train_in_single_precision(rank: int) -> tuple[list[int], list[int], torch.Tensor, float]:
    """Rank 1 meets a NaN in step 2; in step 4 the loop itself, on every rank, once the gradient is reduced."""
    link, known, alone = ScriptedLink(SIZES), [], two_layers().float()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    with opened(link, on_non_finite="skip", norm_interval_steps=0) as session:
        model, data = two_layers().float(), Rows(96)
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step, (_, inputs, targets) in enumerate(session.loader(data)):
            optimizer.zero_grad()
            loss = F.mse_loss(net(inputs.float()), targets.float())
            session.backward(loss * (math.nan if (rank, step) == (1, 2) else 1.0))
            prepared = session._model_side._prepared
            assert prepared is not None
            reduction = prepared.reduced.replicated
            assert reduction is not None
            if reduction.is_known_finite():
                known.append(step)
            if step == 4:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad *= math.nan
            optimizer.step()
            if step not in (2, 4):
                ids = epoch_order(0, 0, 96)[12 * step : 12 * step + 12]
                plain.zero_grad()
                F.mse_loss(alone(data.inputs[ids].float()), data.targets[ids].float()).backward()
                plain.step()
    weights, expected = (torch.cat([p.detach().reshape(-1) for p in m.parameters()]) for m in (model, alone))
    skipped = [r.step for r in link.steps if StepFlag.SKIPPED in r.flags]
    return skipped, known, weights, float((weights - expected).abs().max())


@pytest.mark.dist
def test_b8_the_reduction_finds_out_by_the_way_and_what_the_loop_does_later_is_looked_at(ranks: GlooGroup) -> None:
    results = ranks.run(train_in_single_precision)
    for skipped, known, weights, error in results:
        assert skipped == [2, 4]
        assert known == [0, 1, 3, 4, 5, 6, 7]
        assert error < 1e-5
        assert torch.equal(weights, results[0][2])


def skip_every_step() -> Outcome:
    link, error = ScriptedLink(), None
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with opened(link, on_non_finite="skip") as session:
            net, optimizer = session.prepare(model, optimizer)
            for _, inputs, targets in session.loader(Rows(120)):
                optimizer.zero_grad()
                session.backward(F.mse_loss(net(inputs), targets) * math.nan)
                optimizer.step()
    except RexError as refusal:
        error = str(refusal)
    return outcome_of(link, model, optimizer, error)


def test_b8_a_lone_worker_stops_when_it_learns_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(non_finite, "MOST_SKIPPED", 5)
    outcome = skip_every_step()
    assert outcome.error is not None
    assert "because the loss is not on rank 0. 5 steps in a row were left out" in outcome.error
    assert len(outcome.incidents) == 5


class Embedded(nn.Module):
    """A table whose gradient is sparse, under a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(50, 6, sparse=True).double()
        self.last = nn.Linear(6, 1).double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(ids))


def train_sparse_with_a_nan(rank: int) -> tuple[bool, torch.Tensor, list[int], list[str]]:
    link = ScriptedLink((4, 8, 0))  # a share of no rows has no loss, and that is no fault
    with opened(link, on_non_finite="skip") as session:
        model = Embedded()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for ids, _, targets in session.loader(Rows(48)):
            optimizer.zero_grad()
            loss = F.mse_loss(net(ids), targets)
            session.backward(loss * (math.nan if rank == 1 and session.step == 2 else 1.0))
            was_sparse = model.table.weight.grad is not None and model.table.weight.grad.is_sparse
            optimizer.step()
    skipped = [record.step for record in link.steps if StepFlag.SKIPPED in record.flags]
    told = [record.message for record in link.records if isinstance(record, IncidentRecord)]
    return was_sparse, torch.cat([p.detach().reshape(-1) for p in model.parameters()]), skipped, told


@pytest.mark.dist
def test_b8_sparse_gradients_are_looked_at_and_empty_shares_are_no_fault(ranks: GlooGroup) -> None:
    outcomes = ranks.run(train_sparse_with_a_nan)
    for rank, (was_sparse, weights, skipped, told) in enumerate(outcomes):
        assert was_sparse
        assert torch.isfinite(weights).all()
        assert torch.equal(weights, outcomes[0][1])
        assert skipped == [2]
        assert len(told) == (rank == 1)


def test_a_large_gradient_whose_square_overflows_is_finite() -> None:
    link = ScriptedLink()
    with opened(link, on_non_finite="skip", norm_interval_steps=0) as session:
        model = nn.Linear(6, 1)
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-30))
        for _, inputs, targets in session.loader(Rows(24)):
            optimizer.zero_grad()
            (F.mse_loss(net(inputs.float()), targets.float()) * 1e25).backward()
            optimizer.step()
    assert not any(StepFlag.SKIPPED in record.flags for record in link.steps)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_largest_entry_is_not_finite_where_one_is_not_and_nothing_overflows(value: float) -> None:
    gradients = [torch.full((1000,), 1e38), torch.ones(7, 3, dtype=torch.float64), torch.zeros(0)]
    assert float(gradient_looks.largest_entry(gradients)) == pytest.approx(1e38)
    gradients[1][3, 2] = value
    assert not math.isfinite(float(gradient_looks.largest_entry(gradients)))


class ReadLate(DeferredScalar):
    """A scalar of a device that is never ready by itself; whoever needs it waits."""

    def ready(self) -> bool:
        return False


def stop_late(rank: int, saves: bool) -> tuple[str, int, int]:
    """On a device "stop" looks a few updates late; a host stands in for one."""
    link, reporter, steps = ScriptedLink(SIZES), MemoryReporter(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(non_finite, "DeferredScalar", ReadLate)
        patch.setattr(non_finite, "reads_late", lambda tensor: True)
        try:
            with opened(link, reporter, on_non_finite="stop", checkpoint_interval_s=0.0) as session:
                model = two_layers()
                net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
                for _, inputs, targets in session.loader(Rows(144)):
                    optimizer.zero_grad()
                    loss = F.mse_loss(net(inputs), targets)
                    session.backward(loss * (math.nan if rank == 1 and session.step == 5 else 1.0))
                    optimizer.step()
                    steps += 1
                    if saves:
                        session.report({})
        except RexError as refusal:
            return str(refusal), steps, len(reporter.saves)
    return "accepted", steps, len(reporter.saves)


@pytest.mark.dist
def test_b8_a_device_is_asked_late_but_before_a_save(ranks: GlooGroup) -> None:
    for error, steps, _ in ranks.run(stop_late, False):
        assert "step 5: the gradient is not finite, because the loss is not on rank 1" in error
        assert "the updates since hold it" in error
        assert steps == 5 + non_finite.LAG_UPDATES, "all ranks at one step"
    for error, steps, num_saves in ranks.run(stop_late, True):
        assert "step 5" in error
        assert (steps, num_saves) == (6, 5), "the save after the poisoned update was not made"


def test_a_mean_over_no_tokens_is_no_fault() -> None:
    link = ScriptedLink()
    with opened(link, weight_by="tokens") as session:
        model = two_layers()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        net, optimizer, scaler = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
        for batch in session.loader(Rows(36)):
            optimizer.zero_grad()
            # The second step's overflow asks every rank for its loss.
            factor = math.inf if session.step == 1 else 1.0
            model[2].bias.register_hook(lambda gradient, factor=factor: gradient * factor)
            for k, (_, inputs, targets) in enumerate(session.micro_batches(batch, 2, weight=5)):
                session.backward(F.mse_loss(net(inputs), targets) * (math.nan if k == 0 else 1.0), weight=5 * k)
            scaler.step(optimizer)
            scaler.update()
    assert [StepFlag.SKIPPED in record.flags for record in link.steps][:2] == [False, True]
    assert all(record.loss is not None for record in link.steps)
