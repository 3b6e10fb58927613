"""CIFAR-10 or CIFAR-100: ResNet-18 for 32 pixels, or a small network that a CPU affords.

    python -m workloads.cifar --data-dir ~/cifar --num-workers 2 --policy rex
    python -m workloads.cifar --dataset cifar100 --model cnn --num-workers 2

``--data-dir`` holds the unpacked python version, on every node; without it torchvision downloads it once to the machine
that starts the run, which is enough when all workers run there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from rex_ray import get_session
from rex_ray.core.errors import ConfigError
from workloads.arguments import Parser, number, refusing
from workloads.cifar_files import CIFAR, CifarName, read_cifar
from workloads.images import ByteImages, count_correct, no_answer_is_named, seed_chance, warn_of_batch_norm
from workloads.learning.files import CACHE as DECODED
from workloads.learning.files import JPEGS, load_cifar10
from workloads.resnet import Norm, SmallColourCNN, resnet18_32px

__all__ = ["MODELS", "load_split", "main", "train_loop"]

CACHE = Path.home() / ".cache" / "rex_ray" / "cifar"
MODELS = {"resnet18": resnet18_32px, "cnn": SmallColourCNN}
_USUAL_NORM: dict[str, Norm] = {"resnet18": "batch", "cnn": "group"}


def load_split(data_dir: Path, name: CifarName, split: str) -> ByteImages:
    """Read ``"train"``, which is augmented, or ``"test"``: the published files, or CIFAR-10 as one npz of JPEGs.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    source = CIFAR[name]
    if name == "cifar10" and (data_dir / JPEGS).is_file():
        found = load_cifar10(data_dir, DECODED)[0 if split == "train" else 1]
        images, labels = found.pixels.transpose(0, 3, 1, 2).copy(), found.labels.astype(np.int64)
    else:
        images, labels = read_cifar(data_dir, name, split)
    return ByteImages(
        torch.from_numpy(images),
        torch.from_numpy(labels),
        mean=source.mean,
        std=source.std,
        augment=split == "train",
    )


def download(name: CifarName) -> Path:
    """Download a data set with torchvision unless it is there already, and return its folder."""
    try:
        from torchvision import datasets  # noqa: PLC0415  (an optional extra)
    except ImportError as error:
        raise ConfigError("downloading needs torchvision: pip install 'rex-ray[vision]', or give data_dir") from error
    # It checks what is there by digest, so a download that was cut off is made anew.
    source = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    with no_answer_is_named(name):
        source(str(CACHE), download=True)
    return CACHE


def train_loop(config: dict[str, Any]) -> None:
    """Train on one worker: SGD with momentum and weight decay, the rate falling to zero along a cosine.

    Args:
        config: ``data_dir``, ``dataset``, ``model``, ``norm``, ``num_epochs``, ``learning_rate``, ``weight_decay``,
            ``amp``, ``loader_processes``, ``seed``.
    """
    session = get_session()
    data_dir, name = Path(config["data_dir"]), config["dataset"]
    torch.manual_seed(config["seed"])
    model: nn.Module = MODELS[config["model"]](CIFAR[name].num_classes, config["norm"])
    seed_chance(config["seed"], session.rank)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config["learning_rate"], momentum=0.9, weight_decay=config["weight_decay"]
    )
    device = session.device.type
    # bfloat16, the half precision of CPUs, has the range of float32 and needs no scale.
    scaler = torch.amp.GradScaler(device, enabled=config["amp"] and device == "cuda")
    model, optimizer, scaler = session.prepare(model, optimizer, scaler=scaler)
    loader = session.loader(load_split(data_dir, name, "train"), num_workers=config["loader_processes"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config["num_epochs"] * len(loader))
    schedule = session.prepare_scheduler(schedule, stepped="batch")
    test_set = load_split(data_dir, name, "test")
    for _ in session.epochs(config["num_epochs"]):
        for images, labels in loader:
            with torch.autocast(device, enabled=config["amp"]):
                loss = functional.cross_entropy(model(images), labels)
            session.backward(loss)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
        correct, count = count_correct(session.unwrap(model), session.eval_loader(test_set))
        session.report({"accuracy": session.pool(correct, count)})


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and train."""
    from workloads.base import add_common_arguments, checked, launch  # noqa: PLC0415  (Ray: workers need none of it)

    parser = Parser(prog="python -m workloads.cifar", description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="folder of the unpacked python version (default: download)")
    parser.add_argument("--dataset", choices=list(CIFAR), default="cifar10")
    parser.add_argument("--model", choices=list(MODELS), default="resnet18")
    parser.add_argument("--norm", choices=get_args(Norm), help="(default: batch for resnet18, group for cnn)")
    parser.add_argument("--learning-rate", type=number(above=0.0), default=0.1)
    parser.add_argument("--weight-decay", type=number(at_least=0.0), default=5e-4)
    parser.add_argument("--amp", action="store_true", help="compute in half precision where that is safe")
    add_common_arguments(parser, global_batch_size=128, num_epochs=60)
    options = checked(parser, arguments)
    norm = options.norm or _USUAL_NORM[options.model]
    data_dir = options.data_dir if options.data_dir is not None else download(options.dataset)
    # Read before a cluster is asked for: workers that cannot would be started again and again.
    train_set, _ = (load_split(data_dir, options.dataset, split) for split in ("train", "test"))
    warn_of_batch_norm(norm, options.policy)
    loop_config = {
        "data_dir": str(data_dir.resolve()),
        "dataset": options.dataset,
        "model": options.model,
        "norm": norm,
        "num_epochs": options.num_epochs,
        "learning_rate": options.learning_rate,
        "weight_decay": options.weight_decay,
        "amp": options.amp,
        "loader_processes": options.loader_processes,
        "seed": options.seed,
    }
    launch(f"{options.dataset}-{options.model}", train_loop, loop_config, options, num_rows=len(train_set))


if __name__ == "__main__":
    with refusing():
        main()
