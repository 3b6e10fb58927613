"""The step's gradient is the single-process gradient of all its rows, whatever the split and the loop around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scripted import Rows, ScriptedLink, gradient_of, opened, two_layers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from rex_ray.worker.session import Session

pytestmark = pytest.mark.dist

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def mean_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(inputs), targets)


def penalised_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return mean_loss(model, inputs, targets) + 0.1 * sum(p.square().sum() for p in model.parameters())


def loss_of_two_calls(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(inputs), targets) + (model(inputs.flip(1)) * targets).mean()


class FedItsOwnOutput(nn.Module):
    """A recurrent use of one prepared model: the loop feeds its output back to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.cell = nn.Linear(6, 6).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.cell(inputs))


def loss_of_recurrence(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (model(model(inputs)) - targets).square().mean()


class LossInside(nn.Module):
    """A model that returns its loss beside its predictions, as many language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = two_layers()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        predictions = self.net(inputs)
        return {"loss": F.mse_loss(predictions, targets), "predictions": predictions}


def inner_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    result = model(inputs, targets)
    return result["loss"] + 0.3 * (result["predictions"] ** 2).mean()


MODELS_AND_LOSSES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "mean": (two_layers, mean_loss),
    "penalty on weights": (two_layers, penalised_loss),
    "called twice": (two_layers, loss_of_two_calls),
    "fed its own output": (FedItsOwnOutput, loss_of_recurrence),
    "loss inside": (LossInside, inner_loss),
}


def reference_gradient(build: Callable[[], nn.Module], loss: Loss, data: Rows, rows: torch.Tensor) -> torch.Tensor:
    model = build()
    loss(model, data.inputs[rows], data.targets[rows]).backward()
    return gradient_of(model)


def all_rows(session: Session, ids: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the ids that all ranks together hold."""
    seen = torch.zeros(num_rows, dtype=torch.int64)
    seen[ids] += 1
    return session.pool_sum(seen).nonzero().reshape(-1)


def worst_gradient_error(rank: int, name: str, sizes: tuple[int, ...], num_rows: int) -> float:
    """Compare every step of an epoch with one process that holds all of the step's rows."""
    build, loss = MODELS_AND_LOSSES[name]
    data, worst = Rows(num_rows), 0.0
    with opened(ScriptedLink(sizes), global_batch_size=sum(sizes)) as session:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        ddp, optimizer = session.prepare(model, optimizer)
        for ids, inputs, targets in session.loader(data):
            loss(ddp, inputs, targets).backward()
            expected = reference_gradient(build, loss, data, all_rows(session, ids, num_rows))
            worst = max(worst, float((gradient_of(model) - expected).abs().max()))
            optimizer.step()
            optimizer.zero_grad()
    return worst


@pytest.mark.parametrize("name", MODELS_AND_LOSSES)
def test_weighted_gradient_equals_the_single_process_gradient(ranks: GlooGroup, name: str) -> None:
    for sizes, num_rows in [((8, 8, 48), 200), ((1, 30, 5), 100), ((5, 0, 7), 40), ((4, 4, 4), 37)]:
        if name == "loss inside" and 0 in sizes:
            continue  # its inner loss of stand-in rows is not empty, but weighs nothing: checked below
        assert max(ranks.run(worst_gradient_error, name, sizes, num_rows)) < 1e-10


def test_a_loss_inside_the_model_weighs_nothing_on_a_rank_without_rows(ranks: GlooGroup) -> None:
    assert max(ranks.run(worst_gradient_error, "loss inside", (5, 0, 7), 40)) < 1e-10


def worst_error_of_random_splits(rank: int, seed: int) -> float:
    """Random shares, 0 included, a random number of micro-batches on each rank, and the tail that is left."""
    draw = torch.Generator().manual_seed(seed)
    sizes = tuple(int(size) for size in torch.randint(0, 15, (3,), generator=draw))
    total, num_rows = max(sum(sizes), 3), int(torch.randint(60, 90, (1,), generator=draw))
    sizes = sizes if sum(sizes) == total else (total, 0, 0)
    data, worst = Rows(num_rows), 0.0
    own_draw = torch.Generator().manual_seed(100 * seed + rank)
    with opened(ScriptedLink(sizes), global_batch_size=total) as session:
        model = two_layers()
        ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for batch in session.loader(data):
            num_chunks = int(torch.randint(1, 6, (1,), generator=own_draw))
            for _, inputs, targets in session.micro_batches(batch, num_chunks):
                session.backward(mean_loss(ddp, inputs, targets))
            expected = reference_gradient(two_layers, mean_loss, data, all_rows(session, batch[0], num_rows))
            worst = max(worst, float((gradient_of(model) - expected).abs().max()))
            optimizer.step()
            optimizer.zero_grad()
    return worst


@pytest.mark.parametrize("seed", range(6))
def test_random_splits_and_unequal_accumulation_equal_the_single_process_gradient(ranks: GlooGroup, seed: int) -> None:
    assert max(ranks.run(worst_error_of_random_splits, seed)) < 1e-10


def plain_ddp_error(rank: int) -> float:
    """The same comparison with DDP as it comes: it takes the mean of the ranks' means."""
    data, sizes = Rows(64), (8, 8, 48)
    start = sum(sizes[:rank])
    rows = torch.arange(start, start + sizes[rank])
    model = two_layers()
    mean_loss(DistributedDataParallel(model), data.inputs[rows], data.targets[rows]).backward()
    return float((gradient_of(model) - reference_gradient(two_layers, mean_loss, data, torch.arange(64))).abs().max())


def trained_parameters(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Five steps under shares 8/8/48, beside one process on the same 64 rows per step."""
    data = Rows(320)
    model, alone = two_layers(), two_layers()
    own_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    with opened(ScriptedLink((8, 8, 48)), global_batch_size=64) as session:
        ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for ids, inputs, targets in session.loader(data):
            mean_loss(ddp, inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            rows = all_rows(session, ids, 320)
            mean_loss(alone, data.inputs[rows], data.targets[rows]).backward()
            own_optimizer.step()
            own_optimizer.zero_grad()
        assert session.step == 5
    flat = [torch.cat([p.detach().reshape(-1) for p in net.parameters()]) for net in (model, alone)]
    return flat[0], flat[1]


def test_b1_unequal_shares_train_like_one_process_and_plain_ddp_does_not(ranks: GlooGroup) -> None:
    for ours, alone in ranks.run(trained_parameters):
        assert torch.allclose(ours, alone, rtol=0, atol=1e-10)
    assert min(ranks.run(plain_ddp_error)) > 1e-3


class NormalisedAndDropped(nn.Module):
    """BatchNorm and dropout: neither may run on an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8, 1)
        ).double()
        self.sizes_seen: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.sizes_seen.append(len(inputs))
        return self.net(inputs.view(len(inputs), -1))


def train_with_an_empty_share(rank: int, normalise: bool) -> tuple[float, list[int], bool, int]:
    data = Rows(6)
    model = NormalisedAndDropped() if normalise else two_layers()
    error = 0.0
    with opened(ScriptedLink((1, 1, 0)), global_batch_size=3) as session:
        ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        num_steps = 0
        for ids, inputs, targets in session.loader(data):
            assert len(inputs) == len(targets) == len(ids) == (rank < 2)
            loss = mean_loss(ddp, inputs, targets)
            assert bool(loss.isnan()) == (rank == 2)
            loss.backward()
            if not normalise:
                expected = reference_gradient(two_layers, mean_loss, data, all_rows(session, ids, 6))
                error = max(error, float((gradient_of(model) - expected).abs().max()))
            optimizer.step()
            optimizer.zero_grad()
            num_steps += 1
    finite = all(bool(p.isfinite().all()) for p in [*model.parameters(), *model.buffers()])
    return error, getattr(model, "sizes_seen", []), finite and model.training, num_steps


def test_a3_a_share_of_no_rows_joins_with_weight_nothing(ranks: GlooGroup) -> None:
    plain = ranks.run(train_with_an_empty_share, False)
    assert max(error for error, *_ in plain) < 1e-10
    for _, sizes_seen, sound, num_steps in ranks.run(train_with_an_empty_share, True):
        assert sound
        assert num_steps == 3
        assert 0 not in sizes_seen


def weigh_the_last_batch(rank: int) -> tuple[list[tuple[int, ...]], list[int], float]:
    """1,000 rows in steps of 96 under shares 8/24/64."""
    data, plans, ids_seen, error = Rows(1000), [], [], 0.0
    with opened(ScriptedLink((8, 24, 64)), global_batch_size=96) as session:
        model = two_layers()
        ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for ids, inputs, targets in session.loader(data):
            plans.append(tuple(session.pool_sum(F.one_hot(torch.tensor(rank), 3) * len(ids)).tolist()))
            ids_seen += ids.tolist()
            mean_loss(ddp, inputs, targets).backward()
            expected = reference_gradient(two_layers, mean_loss, data, all_rows(session, ids, 1000))
            error = float((gradient_of(model) - expected).abs().max())
            optimizer.step()
            optimizer.zero_grad()
    return plans, ids_seen, error


def test_a2_last_partial_batch_is_split_and_weighted_by_its_real_rows(ranks: GlooGroup) -> None:
    results = ranks.run(weigh_the_last_batch)
    plans = results[0][0]
    assert len(plans) == 11
    assert set(plans[:10]) == {(8, 24, 64)}
    assert sum(plans[10]) == 40
    assert all(abs(rows - 40 * share / 96) <= 1 for rows, share in zip(plans[10], (8, 24, 64), strict=True))
    assert sorted(row for _, ids, _ in results for row in ids) == list(range(1000))
    assert max(error for *_, error in results) < 1e-10


def accumulate_unequally(rank: int, how: str) -> tuple[float, int]:
    """Micro-batches 4/2/1 on the three ranks; count reductions through a hook of the user's."""
    data, num_rows, error, reductions = Rows(120), 120, 0.0, 0

    def counting_hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        nonlocal reductions
        reductions += bucket.is_last()
        average = bucket.buffer().div_(3)
        return dist.all_reduce(average, async_op=True).get_future().then(lambda future: future.value()[0])

    with opened(ScriptedLink((12, 9, 19)), global_batch_size=40) as session:
        model = two_layers()
        ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        session.register_comm_hook(None, counting_hook)
        for batch in session.loader(data):
            num_chunks = (4, 2, 1)[rank]
            if how == "micro_batches":
                for _, inputs, targets in session.micro_batches(batch, num_chunks):
                    session.backward(mean_loss(ddp, inputs, targets))
            else:
                pieces = list(zip(batch[1].tensor_split(num_chunks), batch[2].tensor_split(num_chunks), strict=True))
                with session.accumulate():
                    for inputs, targets in pieces[:-1]:
                        mean_loss(ddp, inputs, targets).backward()
                mean_loss(ddp, *pieces[-1]).backward()
            expected = reference_gradient(two_layers, mean_loss, data, all_rows(session, batch[0], num_rows))
            error = max(error, float((gradient_of(model) - expected).abs().max()))
            optimizer.step()
            optimizer.zero_grad()
    return error, reductions


@pytest.mark.parametrize("how", ["micro_batches", "accumulate"])
def test_b4_unequal_accumulation_reduces_once_and_equals_the_reference(ranks: GlooGroup, how: str) -> None:
    for error, reductions in ranks.run(accumulate_unequally, how):
        assert error < 1e-10
        assert reductions == 3  # steps


def hold_gradients_over_two_batches(rank: int) -> float:
    """The user's own no_sync over loader batches of 12 and 7 rows: the sum of both batches' gradients."""
    data = Rows(19)
    expected = torch.zeros(())
    with opened(ScriptedLink((1, 3, 8))) as session:
        model = two_layers()
        ddp, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for ids, inputs, targets in session.loader(data):
            rows = all_rows(session, ids, 19)
            expected = expected + reference_gradient(two_layers, mean_loss, data, rows)
            with ddp.no_sync() if len(rows) == 12 else nullcontext():
                mean_loss(ddp, inputs, targets).backward()
    return float((gradient_of(model) - expected).abs().max())


def test_no_sync_over_batches_of_different_shares_gives_the_sum_of_their_gradients(ranks: GlooGroup) -> None:
    assert max(ranks.run(hold_gradients_over_two_batches)) < 1e-10


TOKENS = (10, 200, 35)


def token_gradients(rank: int, weight_by: str, chunks: int) -> tuple[float, float]:
    """Distance of one step's gradient to the mean over tokens, and to the mean over samples of the ranks' means."""
    torch.manual_seed(11)
    inputs = torch.randn(3, 200, 6, dtype=torch.float64)
    targets = torch.randn(3, 200, 1, dtype=torch.float64)

    def masked_mean(model: nn.Module, row: int, tokens: slice = slice(None)) -> tuple[torch.Tensor, int]:
        mask = torch.arange(200) < TOKENS[row]
        losses = (model(inputs[row : row + 1]) - targets[row]).square().reshape(-1)[tokens]
        count = int(mask[tokens].sum())
        return (losses * mask[tokens]).sum() / count, count

    with opened(ScriptedLink((1, 1, 1)), global_batch_size=3, weight_by=weight_by) as session:
        model = two_layers()
        ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for _batch in session.loader(Rows(3)):
            if chunks == 1:
                loss, count = masked_mean(ddp, rank)
                session.backward(loss, weight=count if weight_by == "tokens" else None)
            else:
                with session.accumulate(weight=TOKENS[rank]):
                    loss, count = masked_mean(ddp, rank, slice(0, 7))
                    session.backward(loss, weight=count)
                half = ddp(inputs[rank : rank + 1])
                mask = (torch.arange(200) < TOKENS[rank]) & (torch.arange(200) >= 7)
                loss = ((half - targets[rank]).square().reshape(-1) * mask).sum() / mask.sum()
                session.backward(loss, weight=int(mask.sum()))
            optimizer.step()
    by_tokens, by_samples = two_layers(), two_layers()
    sum(masked_mean(by_tokens, row)[0] * TOKENS[row] / sum(TOKENS) for row in range(3)).backward()
    sum(masked_mean(by_samples, row)[0] / 3 for row in range(3)).backward()
    ours = gradient_of(model)
    return (
        float((ours - gradient_of(by_tokens)).abs().max()),
        float((ours - gradient_of(by_samples)).abs().max()),
    )


def test_b2_token_weights_give_the_token_mean_and_row_weights_the_sample_mean(ranks: GlooGroup) -> None:
    for num_chunks in (1, 2):
        for to_tokens, to_samples in ranks.run(token_gradients, "tokens", num_chunks):
            assert to_tokens < 1e-10
            assert to_samples > 1e-3
    for to_tokens, to_samples in ranks.run(token_gradients, "samples", 1):
        assert to_samples < 1e-10
        assert to_tokens > 1e-3


def compressed_gradient_error(rank: int) -> tuple[float, float]:
    data, sizes = Rows(64), (8, 8, 48)
    with opened(ScriptedLink(sizes), global_batch_size=64) as session:
        model = two_layers()
        ddp, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        session.register_comm_hook(None, bf16_compress_hook)
        for _, inputs, targets in session.loader(data):
            mean_loss(ddp, inputs, targets).backward()
    expected = reference_gradient(two_layers, mean_loss, data, torch.arange(64))
    return float((gradient_of(model) - expected).abs().max()), float(expected.abs().max())


def test_a_users_bf16_hook_keeps_exact_weights(ranks: GlooGroup) -> None:
    for error, largest in ranks.run(compressed_gradient_error):
        assert error < largest * 2**-7  # a few roundings to 8 bits of precision
