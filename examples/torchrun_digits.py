"""Trains scikit-learn's digits under plain torchrun, without Ray.

    torchrun --standalone --nproc-per-node=2 examples/torchrun_digits.py --output runs/digits
    rex-ray report runs/digits

On one kind of device the shares stay equal. To see them move on a machine without GPUs, let the ranks pass for two
kinds, and have the slow one sleep:

    REX_RAY_DEVICE=T4,V100 torchrun --standalone --nproc-per-node=2 examples/torchrun_digits.py \
        --output runs/digits --sleep-ms-per-row 2 1
"""

from __future__ import annotations

import argparse
import time

import torch
from rex_ray import RexConfig
from rex_ray.standalone import training
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1500 images to train on, and 297 to evaluate on."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32) / 16
    targets = torch.tensor(labels)
    return TensorDataset(inputs[:1500], targets[:1500]), TensorDataset(inputs[1500:], targets[1500:])


def main() -> None:
    """Train, and print the accuracy on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="runs/digits", help="the run's folder")
    parser.add_argument("--num-epochs", type=int, default=8)
    parser.add_argument("--global-batch-size", type=int, default=100)
    parser.add_argument("--sleep-ms-per-row", type=float, nargs="+", default=[0.0], help="per rank, to be slow")
    arguments = parser.parse_args()

    config = RexConfig(global_batch_size=arguments.global_batch_size)
    with training(config, output=arguments.output) as session:
        train_set, test_set = digits()
        sleeps_s = [sleep_ms / 1e3 for sleep_ms in arguments.sleep_ms_per_row]
        sleep_s = sleeps_s[session.rank % len(sleeps_s)]

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(train_set)
        for _ in session.epochs(arguments.num_epochs):
            for inputs, labels in loader:
                loss = F.cross_entropy(model(inputs), labels)
                time.sleep(sleep_s * len(inputs))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            correct = count = 0
            with torch.no_grad():
                for inputs, labels in session.eval_loader(test_set):
                    correct += int((session.unwrap(model)(inputs).argmax(dim=1) == labels).sum())
                    count += len(labels)
            accuracy = session.pool(correct, count)
            session.report({"accuracy": accuracy})
        if session.rank == 0:
            print(f"accuracy {accuracy:.3f}, shares {session.allocation.local_batch_sizes}")


if __name__ == "__main__":
    main()
