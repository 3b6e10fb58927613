"""Mixed precision, gradient scaling and clipping: weights stay right, ranks skip together, norms are of the truth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scripted import Rows, ScriptedLink, gradient_of, opened, two_layers
from torch import nn

from rex_ray.core.errors import RexError
from rex_ray.core.types import StepFlag, StepRecord
from rex_ray.worker.data.sampler import epoch_order
from rex_ray.worker.link import IncidentRecord

pytestmark = pytest.mark.dist

SIZES = (2, 3, 7)


def autocast_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast("cpu", dtype=dtype):
        outputs = model(inputs.float())
    return F.mse_loss(outputs.float(), targets.float())


def relative_errors(rank: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[float, float]:
    """Return how far the gradient is from the weighted mean of the shares' own ones, and their plain mean from it."""
    data, worst, plain = Rows(60), 0.0, math.inf
    with opened(ScriptedLink(sizes)) as session:
        model = two_layers().float()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for step, (_, inputs, targets) in enumerate(session.loader(data)):
            optimizer.zero_grad()
            autocast_loss(net, inputs, targets, dtype).backward()
            shares, own = epoch_order(0, 0, 60)[12 * step : 12 * step + 12].split(list(sizes)), []
            for rows in shares:
                alone = two_layers().float()
                alone.load_state_dict(model.state_dict())
                if len(rows):
                    autocast_loss(alone, data.inputs[rows], data.targets[rows], dtype).backward()
                    own.append((len(rows) / 12, gradient_of(alone)))
            expected = sum(weight * gradient for weight, gradient in own)
            assert isinstance(expected, torch.Tensor)
            worst = max(worst, float((gradient_of(model) - expected).norm() / expected.norm()))
            mean = sum(gradient for _, gradient in own) / len(own)
            plain = min(plain, float((mean - expected).norm() / expected.norm()))
            optimizer.step()
    return worst, plain


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_weights_are_exact_under_autocast_but_for_one_rounding(
    ranks: GlooGroup, dtype: torch.dtype, rounding: float
) -> None:
    for worst, _ in ranks.run(relative_errors, dtype, (4, 8, 0)):
        assert worst < 1e-6, "weights of 1 and 2 round nothing"
    for worst, plain in ranks.run(relative_errors, dtype, SIZES):
        assert worst < 2 * rounding
        assert plain > 10 * worst, "shares that would not show in a plain mean show nothing"


# --- the gradient scaler

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.05),
    "fused adam": partial(torch.optim.AdamW, lr=0.05, fused=True),
}


@dataclass
class Scaled:
    """What one rank saw of a scaled run."""

    error: str | None
    weights: torch.Tensor
    scales: list[float]
    unscaled: list[float]
    records: list[StepRecord]
    incidents: list[IncidentRecord]


def overflow_once(rank: int, name: str) -> Scaled:
    """Half precision with a scaler; at step 3 what rank 1 sends back does not fit in it, though its loss is finite."""
    link, scales, unscaled = ScriptedLink(SIZES), [], []
    with opened(link, norm_interval_steps=1) as session:
        model = two_layers().float()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1000)
        optimizer = OPTIMIZERS[name](model.parameters())
        net, optimizer, scaler = session.prepare(model, optimizer, scaler=scaler)
        for _, inputs, targets in session.loader(Rows(96)):
            optimizer.zero_grad()
            too_much = 1e4 if (rank, session.step) == (1, 3) else 1.0
            loss = autocast_loss(net, inputs, targets * too_much, torch.float16)
            assert torch.isfinite(loss)
            session.backward(loss)
            unscaled.append(float(gradient_of(model).square().sum()) / scaler.get_scale() ** 2)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    incidents = [record for record in link.records if isinstance(record, IncidentRecord)]
    return Scaled(None, weights, scales, unscaled, link.steps, incidents)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_on_one_rank_is_skipped_by_all_and_stops_nobody(ranks: GlooGroup, name: str) -> None:
    outcomes = ranks.run(overflow_once, name)
    for rank, outcome in enumerate(outcomes):
        assert torch.isfinite(outcome.weights).all()
        assert torch.equal(outcome.weights, outcomes[0].weights)
        assert outcome.scales == [2.0**12] * 3 + [2.0**11] * 5
        assert [r.step for r in outcome.records if StepFlag.SKIPPED in r.flags] == [3]
        assert not outcome.incidents, "an overflow is a scaler's daily work"
        for record, unscaled in zip(outcome.records, outcome.unscaled, strict=True):
            if name == "sgd" and rank == 0 and record.global_sq_norm is not None:
                assert record.global_sq_norm == pytest.approx(unscaled, rel=1e-5)
        assert sum(record.weighted_sq_norm is not None for record in outcome.records) >= 5


def scaled_nan(rank: int, policy: str, plainly: bool) -> Scaled:
    """A NaN loss on rank 2 at step 7; ``plainly``: at every step from there, and the session sees no loss."""
    link, error, scales, model = ScriptedLink(SIZES), None, [], two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    try:
        with opened(link, on_non_finite=policy) as session:
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
            net, optimizer, scaler = session.prepare(model, optimizer, scaler=scaler)
            for _, inputs, targets in session.loader(Rows(144)):
                optimizer.zero_grad()
                bad = rank == 2 and (session.step >= 7 if plainly else session.step == 7)
                loss = F.mse_loss(net(inputs), targets) * (math.nan if bad else 1.0)
                if plainly:
                    scaler.scale(loss).backward()
                else:
                    session.backward(loss)
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
    except RexError as refusal:
        error = str(refusal)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    incidents = [record for record in link.records if isinstance(record, IncidentRecord)]
    return Scaled(error, weights, scales, [], link.steps, incidents)


def weights_without(left_out: int, num_steps: int) -> torch.Tensor:
    model, data = two_layers(), Rows(144)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, rows in enumerate(epoch_order(0, 0, 144).split(12)[:num_steps]):
        optimizer.zero_grad()
        F.mse_loss(model(data.inputs[rows]), data.targets[rows]).backward()
        if step != left_out:
            optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_b8_a_nan_under_a_scaler_is_skipped_once_and_told_or_stops_by_name(ranks: GlooGroup) -> None:
    for rank, outcome in enumerate(ranks.run(scaled_nan, "skip", False)):
        assert outcome.error is None
        assert torch.allclose(outcome.weights, weights_without(7, 12), rtol=0, atol=1e-10)
        assert outcome.scales == [4.0] * 7 + [2.0] * 5, "skipped once, not twice"
        assert [r.step for r in outcome.records if StepFlag.SKIPPED in r.flags] == [7]
        assert [incident.step for incident in outcome.incidents] == ([7] if rank == 2 else [])
    for outcome in ranks.run(scaled_nan, "stop", False):
        assert outcome.error is not None
        assert "step 7: the gradient is not finite, because the loss is not on rank 2" in outcome.error
        assert torch.allclose(outcome.weights, weights_without(-1, 7), rtol=0, atol=1e-10)
    for outcome in ranks.run(scaled_nan, "stop", True):
        assert outcome.error is not None
        assert "because the gradient of the model's output is not on rank 2" in outcome.error
        assert outcome.scales[-3:] == [2.0, 1.0, 0.5], "only a scale below 1 tells an overflow from a fault"


# --- clipping


def clipped_norms(rank: int, scaled: bool) -> tuple[list[float], list[float], list[StepRecord], list[float]]:
    link, clipped, expected, after = ScriptedLink(SIZES), [], [], []
    data, model = Rows(60), two_layers()
    with opened(link, norm_interval_steps=1) as session:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        net, optimizer, scaler = session.prepare(model, optimizer, scaler=scaler)
        for step, (_, inputs, targets) in enumerate(session.loader(data)):
            rows = epoch_order(0, 0, 60)[12 * step : 12 * step + 12]
            alone = two_layers()
            alone.load_state_dict(model.state_dict())
            (10 * F.mse_loss(alone(data.inputs[rows]), data.targets[rows])).backward()
            expected.append(float(gradient_of(alone).norm()))
            optimizer.zero_grad()
            session.backward(10 * F.mse_loss(net(inputs), targets))
            scaler.unscale_(optimizer)
            clipped.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)))
            after.append(float(gradient_of(model).norm()))
            scaler.step(optimizer)
            scaler.update()
    return clipped, expected, link.steps, after


@pytest.mark.parametrize("scaled", [False, True])
def test_b13_clipping_is_by_the_global_norm_on_all_ranks_and_the_noise_scale_sees_it_unclipped(
    ranks: GlooGroup, scaled: bool
) -> None:
    outcomes = ranks.run(clipped_norms, scaled)
    for rank, (clipped, expected, records, after) in enumerate(outcomes):
        assert clipped == outcomes[0][0], "the same to the last bit"
        assert clipped == pytest.approx(expected, rel=1e-9)
        assert min(clipped) > 1.0, "a gradient that is clipped is the case to show"
        assert after == pytest.approx([1.0] * len(after), rel=1e-5)
        if rank == 0:
            measured = [math.sqrt(record.global_sq_norm or 0.0) for record in records]
            assert measured == pytest.approx(expected, rel=1e-6)
