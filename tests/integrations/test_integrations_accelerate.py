"""A loop written for Accelerate trains like one process on the same global batches, whatever the shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from launched import SHARES, flat, launched
from scripted import Rows, gradient_of, two_layers
from torch import nn
from torch.utils.data import DataLoader

from rex_ray.core.errors import ConfigError
from rex_ray.worker.data.sampler import epoch_order

pytest.importorskip("accelerate")
# Each process imports these libraries first, which takes half a minute on a busy machine.
pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_ROWS, BATCH, EPOCHS = 40, sum(SHARES), 2


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def one_process() -> torch.Tensor:
    """The plain loop, in the session's order: its last batch has the 4 rows that are left."""
    data, model = Rows(NUM_ROWS), two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = schedule_of(optimizer)
    for epoch in range(EPOCHS):
        for rows in epoch_order(0, epoch, NUM_ROWS).split(BATCH):
            F.mse_loss(model(data.inputs[rows]), data.targets[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return flat(model)


def accelerated_loop(rank: int) -> tuple[torch.Tensor, list[int], list[int], float]:
    from rex_ray.integrations.accelerate import RexAccelerator

    with launched(rank) as session:
        accelerator = RexAccelerator()
        data, model = Rows(NUM_ROWS), two_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        loader = DataLoader(data, batch_size=BATCH, shuffle=True)
        test_loader = DataLoader(Rows(7), batch_size=2)
        prepared = accelerator.prepare(model, optimizer, loader, test_loader, schedule_of(optimizer))
        net, optimizer, loader, test_loader, scheduler = prepared
        assert accelerator.prepare(net, optimizer, loader, test_loader, scheduler) == prepared  # not twice
        sizes, seen = [], []
        for _ in session.epochs(EPOCHS):
            for ids, inputs, targets in loader:
                sizes.append(len(ids))
                with accelerator.accumulate(net):
                    accelerator.backward(F.mse_loss(net(inputs), targets))
                    accelerator.clip_grad_norm_(net.parameters(), 0.1)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        net.eval()
        errors = []
        with torch.no_grad():
            for ids, inputs, targets in test_loader:
                outputs = net(inputs)
                gathered = accelerator.gather_for_metrics({"ids": ids, "errors": (outputs - targets).square()})
                seen += gathered["ids"].tolist()
                errors.append(gathered["errors"])
        return flat(model), sizes, seen, float(torch.cat(errors).mean())


def test_an_accelerated_loop_equals_one_process_whatever_the_shares(pair: GlooGroup) -> None:
    expected = one_process()
    results = pair.run(accelerated_loop)
    model, test_rows = two_layers(), Rows(7)
    nn.utils.vector_to_parameters(expected, model.parameters())
    error = F.mse_loss(model(test_rows.inputs), test_rows.targets).item()
    for rank, (parameters, sizes, seen, measured) in enumerate(results):
        assert torch.allclose(parameters, expected, rtol=0, atol=1e-12)
        assert sizes == 2 * [*3 * [SHARES[rank]], (1, 3)[rank]]
        assert sorted(seen) == list(range(7))  # 4 rows and 3: gathered in step, none twice
        assert measured == pytest.approx(error, rel=1e-12)


def token_loop(rank: int) -> float:
    """Ranks weighted by tokens: the first shares' two rows count as much as the other's."""
    from rex_ray.integrations.accelerate import RexAccelerator

    with launched(rank, weight_by="tokens"):
        accelerator = RexAccelerator()
        data, model = Rows(NUM_ROWS), two_layers()
        net, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.0), DataLoader(data, BATCH, shuffle=True)
        )
        worst = 0.0
        for step, (ids, inputs, targets) in enumerate(loader):
            tokens = ids % 3
            losses = (net(inputs) - targets).square().squeeze(1)
            accelerator.backward((losses * tokens).sum() / tokens.sum().clamp(min=1), weight=float(tokens.sum()))
            alone, rows = two_layers(), epoch_order(0, 0, NUM_ROWS).split(BATCH)[step]
            losses = (alone(data.inputs[rows]) - data.targets[rows]).square().squeeze(1)
            ((losses * (rows % 3)).sum() / (rows % 3).sum()).backward()
            worst = max(worst, float((gradient_of(model) - gradient_of(alone)).abs().max()))
            optimizer.step()
            optimizer.zero_grad()
    return worst


def test_tokens_weigh_an_accelerated_loop(pair: GlooGroup) -> None:
    assert max(pair.run(token_loop)) < 1e-12


def what_is_refused(rank: int) -> list[str]:
    from rex_ray.integrations.accelerate import RexAccelerator

    told = []

    def refused(call: Any) -> None:
        try:
            call()
        except ConfigError as error:
            told.append(str(error))

    with launched(rank):
        model = two_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        refused(lambda: RexAccelerator(gradient_accumulation_steps=2).prepare(model, optimizer))
        accelerator = RexAccelerator()
        accelerator.gradient_accumulation_steps = 1
        refused(lambda: accelerator.prepare(model))
        refused(lambda: accelerator.prepare(DataLoader(Rows(24), 12)))
        refused(lambda: accelerator.save_state("here"))
        refused(lambda: accelerator.load_state("here"))
        refused(lambda: accelerator.skip_first_batches(None, 3))
    return told


def test_what_would_not_be_exact_is_refused_with_a_remedy(pair: GlooGroup) -> None:
    for told in pair.run(what_is_refused):
        assert [bool(text) for text in told] == [True] * 6
        assert "raise global_batch_size instead" in told[0]
        assert "the model and its optimizer in one call" in told[1]
        assert "make it with shuffle=True" in told[2]
