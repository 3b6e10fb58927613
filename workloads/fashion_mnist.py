"""A small CNN on Fashion-MNIST (60,000 + 10,000 real 28 x 28 images of clothing).

    python -m workloads.fashion_mnist --data-dir ~/fashion-mnist --num-workers 2

``--data-dir`` holds the four idx files, raw or gzip-compressed, on every node; without it torchvision downloads them
once to the machine that starts the run, which is enough when all workers run there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from rex_ray import get_session
from rex_ray.core.errors import ConfigError
from workloads.arguments import Parser, number, refusing
from workloads.idx import find_idx, read_labelled
from workloads.images import count_correct, no_answer_is_named

__all__ = ["FashionMNIST", "SmallCNN", "load_split", "main", "train_loop"]

CACHE = Path.home() / ".cache" / "rex_ray" / "fashion_mnist"
_PREFIX = {"train": "train", "test": "t10k"}
# Mean and standard deviation of the training set's pixels, as every user of this data set normalises them.
_MEAN, _STD = 0.2860, 0.3530


class FashionMNIST(Dataset[tuple[Tensor, int]]):
    """Images as normalised float tensors of shape ``[1, 28, 28]``, labels as integers.

    Args:
        images: pixels, shape ``[rows, 28, 28]``, unsigned bytes.
        labels: shape ``[rows]``.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        # Kept as bytes: as floats every worker would hold four times as much.
        self._images = images
        self._labels: list[int] = labels.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = self._images[index].to(torch.float32) / 255.0
        return ((pixels - _MEAN) / _STD).unsqueeze(0), self._labels[index]


class SmallCNN(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Return one score per class, shape ``[rows, 10]``."""
        scores: Tensor = self.classifier(self.features(images))
        return scores


def load_split(data_dir: Path, split: str) -> FashionMNIST:
    """Read ``"train"`` or ``"test"`` from idx files.

    Raises:
        ConfigError: a file is missing or damaged, or images and labels do not belong together.
    """
    images, labels = read_labelled(data_dir, _PREFIX[split])
    return FashionMNIST(torch.tensor(images), torch.tensor(labels))


def download() -> Path:
    """Download the data set with torchvision unless it is there already, and return its folder."""
    if find_idx(CACHE, "train-images-idx3-ubyte") is None:
        try:
            from torchvision import datasets  # noqa: PLC0415  (an optional extra, needed for the download alone)
        except ImportError as error:
            raise ConfigError(
                "downloading needs torchvision: pip install 'rex-ray[vision]', or give data_dir"
            ) from error
        with no_answer_is_named("Fashion-MNIST"):
            datasets.FashionMNIST(str(CACHE), download=True)
    return CACHE


def train_loop(config: dict[str, Any]) -> None:
    """Train on one worker.

    Args:
        config: ``data_dir``, ``num_epochs``, ``learning_rate``, ``loader_processes``, ``seed``.
    """
    session = get_session()
    data_dir = Path(config["data_dir"])
    torch.manual_seed(config["seed"])
    model: nn.Module = SmallCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=config["learning_rate"], momentum=0.9)
    model, optimizer = session.prepare(model, optimizer)
    loader = session.loader(load_split(data_dir, "train"), num_workers=config["loader_processes"])
    test_set = load_split(data_dir, "test")
    for _ in session.epochs(config["num_epochs"]):
        for images, labels in loader:
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        correct, count = count_correct(session.unwrap(model), session.eval_loader(test_set))
        session.report({"accuracy": session.pool(correct, count)})


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and train."""
    from workloads.base import add_common_arguments, checked, launch  # noqa: PLC0415  (Ray: workers need none of it)

    parser = Parser(prog="python -m workloads.fashion_mnist", description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="folder of the idx files (default: download)")
    parser.add_argument("--learning-rate", type=number(above=0.0), default=0.05)
    add_common_arguments(parser, global_batch_size=128, num_epochs=5)
    options = checked(parser, arguments)
    data_dir = options.data_dir if options.data_dir is not None else download()
    # Read before a cluster is asked for: workers that cannot would be started again and again.
    train_set, _ = (load_split(data_dir, split) for split in ("train", "test"))
    loop_config = {
        "data_dir": str(data_dir.resolve()),
        "num_epochs": options.num_epochs,
        "learning_rate": options.learning_rate,
        "loader_processes": options.loader_processes,
        "seed": options.seed,
    }
    launch("fashion_mnist", train_loop, loop_config, options, num_rows=len(train_set))


if __name__ == "__main__":
    with refusing():
        main()
