"""Lightning's automatic optimisation trains like one process on the same global batches, whatever the shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from launched import SHARES, flat, launched
from scripted import Rows, two_layers
from torch import nn

from rex_ray.core.errors import ConfigError
from rex_ray.worker.data.sampler import epoch_order

pytest.importorskip("lightning")
# Each process imports these libraries first, which takes half a minute on a busy machine.
pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_ROWS, BATCH, EPOCHS = 40, sum(SHARES), 2


def normalised() -> nn.Module:
    return nn.Sequential(two_layers(), nn.BatchNorm1d(1).double()).double()


def one_process() -> tuple[torch.Tensor, float]:
    data, test, model = Rows(NUM_ROWS), Rows(7), two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for epoch in range(EPOCHS):
        for rows in epoch_order(0, epoch, NUM_ROWS).split(BATCH):
            optimizer.zero_grad()
            F.mse_loss(model(data.inputs[rows]), data.targets[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
    return flat(model), F.mse_loss(model(test.inputs), test.targets).item()


def module_of(net: nn.Module) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            _, inputs, targets = batch
            return F.mse_loss(self.net(inputs), targets)

        def validation_step(self, batch: Any, index: int) -> None:
            _, inputs, targets = batch
            error = F.mse_loss(self.net(inputs), targets)
            self.log("error", error, batch_size=len(inputs), sync_dist=True, on_epoch=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Module()


def trainer_of(**options: Any) -> Any:
    from lightning.pytorch import Trainer

    from rex_ray.integrations.lightning import RexCallback, RexStrategy

    options = {"callbacks": [RexCallback()], "max_epochs": EPOCHS, **options}
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(
        strategy=RexStrategy(), accelerator="cpu", devices=1, use_distributed_sampler=False, **quiet, **options
    )


def lightning_loop(rank: int, shares: tuple[int, ...]) -> tuple[torch.Tensor, float]:
    from rex_ray.integrations.lightning import EvalBatches, TrainBatches

    with launched(rank, shares=shares):
        module = module_of(two_layers())
        trainer = trainer_of(gradient_clip_val=0.1)
        trainer.fit(module, TrainBatches(Rows(NUM_ROWS)), EvalBatches(Rows(7), local_batch_size=2))
        return flat(module.net), float(trainer.callback_metrics["error"])


@pytest.mark.parametrize("shares", [SHARES, (12, 0)])
def test_lightning_equals_one_process_whatever_the_shares(pair: GlooGroup, shares: tuple[int, ...]) -> None:
    expected, error = one_process()
    for parameters, measured in pair.run(lightning_loop, shares):
        assert torch.allclose(parameters, expected, rtol=0, atol=1e-12)
        assert measured == pytest.approx(error, rel=1e-12)


def statistics(rank: int) -> list[torch.Tensor]:
    """What BatchNorm holds when validation begins."""
    from lightning.pytorch import Callback

    from rex_ray.integrations.lightning import EvalBatches, RexCallback, TrainBatches

    seen = []

    class Looks(Callback):
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                seen.append(pl_module.net[1].running_var.clone())

    with launched(rank):
        trainer = trainer_of(callbacks=[RexCallback(), Looks()])
        trainer.fit(module_of(normalised()), TrainBatches(Rows(NUM_ROWS)), EvalBatches(Rows(7), local_batch_size=2))
    return seen


def test_running_statistics_are_alike_when_an_epoch_is_evaluated(pair: GlooGroup) -> None:
    first, second = pair.run(statistics)
    assert len(first) == EPOCHS
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def what_is_refused(rank: int) -> list[str]:
    from rex_ray.integrations.lightning import TrainBatches

    told = []
    for session_options, options in (
        ({"weight_by": "tokens"}, {}),
        ({}, {"accumulate_grad_batches": 2}),
        ({}, {"callbacks": []}),
    ):
        with launched(rank, **session_options):
            try:
                trainer_of(**options).fit(module_of(two_layers()), TrainBatches(Rows(24)))
            except ConfigError as error:
                told.append(str(error))
    return told


def test_what_would_not_be_exact_is_refused_with_a_remedy(pair: GlooGroup) -> None:
    for tokens, accumulation, callback in pair.run(what_is_refused):
        assert "session.backward(loss, weight=...)" in tokens
        assert "raise global_batch_size" in accumulation
        assert "RexCallback()" in callback
