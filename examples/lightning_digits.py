"""A LightningModule on two workers: the strategy, the callback and two loaders are all that is of rex_ray."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from rex_ray import launch
from rex_ray.integrations.lightning import EvalBatches, RexCallback, RexStrategy, TrainBatches
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


class Digits(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, index):
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        correct = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", correct, batch_size=len(labels), sync_dist=True, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)]


def digits():
    images, labels = load_digits(return_X_y=True)
    rows = TensorDataset(torch.from_numpy(images).float() / 16, torch.from_numpy(labels))
    return torch.utils.data.random_split(rows, [1500, 297], torch.Generator().manual_seed(0))


def main(num_epochs):
    torch.manual_seed(0)
    train_set, test_set = digits()
    trainer = Trainer(
        strategy=RexStrategy(),
        callbacks=[RexCallback()],
        accelerator="auto",
        devices=1,  # of this worker
        max_epochs=num_epochs,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        enable_checkpointing=False,  # the session saves
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Digits(), TrainBatches(train_set), EvalBatches(test_set))
    return float(trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    launch(main, 3, num_workers=2, global_batch_size=64)
