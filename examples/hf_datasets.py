"""Hugging Face datasets: one that every worker holds whole, and one that is streamed, each worker its own shards."""

import argparse

import torch
import torch.nn.functional as F
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from rex_ray import launch, session
from sklearn.datasets import load_digits
from torch import nn


def digits():
    images, labels = load_digits(return_X_y=True)
    return Dataset.from_dict({"image": images / 16, "label": labels}).with_format("torch")


def main(num_epochs, streaming):
    rows = digits()
    if streaming:
        stream = rows.to_iterable_dataset(num_shards=8).shuffle(seed=0, buffer_size=256)
        train_set = split_dataset_by_node(stream, rank=session.rank, world_size=session.world_size)
    else:
        train_set = rows
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    loader = session.loader(train_set)
    for _ in session.epochs(num_epochs):
        seen = 0
        for batch in loader:
            F.cross_entropy(model(batch["image"].float()), batch["label"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += len(batch["label"])
        correct = count = 0
        for batch in session.eval_loader(rows):
            with torch.no_grad():
                outputs = session.unwrap(model)(batch["image"].float())
            correct += int((outputs.argmax(1) == batch["label"]).sum())
            count += len(outputs)
        session.report({"accuracy": session.pool(correct, count), "rows": int(session.pool_sum(seen))})
    return session.pool(correct, count), int(session.pool_sum(seen))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streaming", action="store_true")
    launch(main, 3, parser.parse_args().streaming, num_workers=2, global_batch_size=64)
