"""ResNet-50 on ImageNet, or on any folder of images that is sorted by class.

    python -m workloads.imagenet --data-dir /mnt/imagenet --num-workers 4 --use-gpu --loader-processes 8 --amp

``--data-dir`` holds ``train/CLASS/*.JPEG`` and ``val/CLASS/*.JPEG``, on every node. ImageNet has no public download:
its terms are accepted at https://image-net.org, and its validation images come unsorted.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.nn import functional

from rex_ray import get_session
from rex_ray.core.errors import ConfigError
from workloads.arguments import Parser, number, refusing, whole
from workloads.images import seed_chance, warn_of_batch_norm
from workloads.resnet import Norm, resnet50

__all__ = ["check_classes", "check_layout", "count_correct_top5", "load_split", "main", "train_loop"]

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# An image of 224 pixels is cut from the middle of one whose shorter side has 256.
_RESIZE_FACTOR = 256 / 224
_LAYOUT = "it must hold train/CLASS/*.JPEG and val/CLASS/*.JPEG, the same classes in both, on every node"
_ORIGIN = (
    "ImageNet has no public download: accept its terms at https://image-net.org, unpack ILSVRC2012_img_train.tar with "
    "the archive of each class into a folder of its name, and sort the validation images into folders of the same names"
)


def load_split(data_dir: Path, split: str, image_size: int = 224) -> Any:
    """Return ``"train"``, cropped and mirrored at random, or ``"val"``, cropped from the middle.

    Args:
        data_dir: holds a folder per split.
        split: which.
        image_size: width and height of what the network sees, in pixels.

    Returns:
        torchvision's ``ImageFolder``: normalised images, shape ``[3, image_size, image_size]``, and class numbers by
        the alphabetical order of the folders.

    Raises:
        ConfigError: no such folder, or a class without an image.
    """
    try:
        from torchvision import datasets, transforms  # noqa: PLC0415  (an optional extra)
    except ImportError as error:
        raise ConfigError("image folders need torchvision: pip install 'rex-ray[vision]'") from error
    check_layout(data_dir)
    cuts = {
        "train": [transforms.RandomResizedCrop(image_size), transforms.RandomHorizontalFlip()],
        "val": [transforms.Resize(round(image_size * _RESIZE_FACTOR)), transforms.CenterCrop(image_size)],
    }
    to_tensor = [transforms.ToTensor(), transforms.Normalize(_MEAN, _STD)]
    try:
        return datasets.ImageFolder(
            str(data_dir / split), transforms.Compose(cuts[split] + to_tensor), loader=read_image
        )
    except FileNotFoundError as error:
        raise ConfigError(f"data_dir {data_dir}, {split}/: {error}; {_LAYOUT}") from error


def check_layout(data_dir: Path) -> None:
    """Look for the two folders.

    Raises:
        ConfigError: one is missing; says how they come to be.
    """
    for split in ("train", "val"):
        if not (data_dir / split).is_dir():
            raise ConfigError(f"data_dir {data_dir} holds no folder {split}/; {_LAYOUT}. {_ORIGIN}")


def read_image(path: str) -> Any:
    """Return one image, with an error that says which file is damaged."""
    from torchvision.datasets import folder  # noqa: PLC0415  (an optional extra)

    try:
        return folder.default_loader(path)
    except (OSError, SyntaxError) as error:  # Pillow raises SyntaxError for some broken headers
        raise ConfigError(f"{path} is no readable image ({error}); fetch it again or take it away") from error


def check_classes(train_set: Any, val_set: Any) -> int:
    """Return the number of classes.

    Raises:
        ConfigError: the two parts have different ones, so that labels would mean different things.
    """
    if train_set.classes != val_set.classes:
        odd = sorted(set(train_set.classes) ^ set(val_set.classes))
        raise ConfigError(f"train/ and val/ differ in {len(odd)} classes, the first is {odd[0]!r}; {_LAYOUT}")
    return len(train_set.classes)


@torch.no_grad()
def count_correct_top5(model: nn.Module, loader: Iterable[Any]) -> tuple[int, int, int]:
    """Count rows whose class comes first, rows whose class is among the first five, and rows."""
    model.eval()
    first = among_five = count = 0
    for images, labels in loader:
        scores = model(images)
        best = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels[:, None]
        first += int(best[:, 0].sum())
        among_five += int(best.sum())
        count += len(labels)
    model.train()
    return first, among_five, count


def train_loop(config: dict[str, Any]) -> None:
    """Train on one worker: SGD with momentum, a tenth of the rate after each third of the epochs.

    The schedule of He et al. 2016 (arXiv:1512.03385) for 90 epochs; weight decay 1e-4.

    Args:
        config: ``data_dir``, ``image_size``, ``norm``, ``num_epochs``, ``learning_rate``, ``amp``,
            ``loader_processes``, ``seed``.
    """
    session = get_session()
    data_dir, size = Path(config["data_dir"]), config["image_size"]
    train_set, val_set = load_split(data_dir, "train", size), load_split(data_dir, "val", size)
    torch.manual_seed(config["seed"])
    model: nn.Module = resnet50(check_classes(train_set, val_set), config["norm"])
    seed_chance(config["seed"], session.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["learning_rate"], momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=max(config["num_epochs"] // 3, 1))
    device = session.device.type
    # bfloat16, the half precision of CPUs, has the range of float32 and needs no scale.
    scaler = torch.amp.GradScaler(device, enabled=config["amp"] and device == "cuda")
    model, optimizer, schedule, scaler = session.prepare(model, optimizer, schedule, scaler)
    loader = session.loader(train_set, num_workers=config["loader_processes"])
    for _ in session.epochs(config["num_epochs"]):
        for images, labels in loader:
            with torch.autocast(device, enabled=config["amp"]):
                loss = functional.cross_entropy(model(images), labels)
            session.backward(loss)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        schedule.step()
        validation = session.eval_loader(val_set, num_workers=config["loader_processes"])
        first, among_five, count = count_correct_top5(session.unwrap(model), validation)
        session.report({"accuracy": session.pool(first, count), "accuracy_top5": session.pool(among_five, count)})


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and train."""
    from workloads.base import add_common_arguments, checked, launch  # noqa: PLC0415  (Ray: workers need none of it)

    parser = Parser(prog="python -m workloads.imagenet", description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True, help="folder that holds train/ and val/")
    parser.add_argument("--image-size", type=whole(1), default=224, help="pixels (default: 224)")
    parser.add_argument("--norm", choices=get_args(Norm), default="batch")
    parser.add_argument("--learning-rate", type=number(above=0.0), default=0.1)
    parser.add_argument("--amp", action="store_true", help="compute in half precision where that is safe")
    add_common_arguments(parser, global_batch_size=256, num_epochs=90)
    options = checked(parser, arguments)
    check_layout(options.data_dir)  # before a cluster is asked for
    warn_of_batch_norm(options.norm, options.policy)
    loop_config = {
        "data_dir": str(options.data_dir.resolve()),
        "image_size": options.image_size,
        "norm": options.norm,
        "num_epochs": options.num_epochs,
        "learning_rate": options.learning_rate,
        "amp": options.amp,
        "loader_processes": options.loader_processes,
        "seed": options.seed,
    }
    launch("imagenet-resnet50", train_loop, loop_config, options)


if __name__ == "__main__":
    with refusing():
        main()
