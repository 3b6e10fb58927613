"""What the image workloads have in common: images kept as bytes, augmentation, and counting right answers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from rex_ray.core.errors import ConfigError

__all__ = [
    "ByteImages",
    "count_correct",
    "no_answer_is_named",
    "seed_chance",
    "shifted_and_mirrored",
    "warn_of_batch_norm",
]

_SHIFT_PIXELS = 4
_RANKS_APART = 100_003
"""Seeds of the ranks' chance lie so far apart: a prime, so that no run's seeds meet those of a neighbour's."""


class ByteImages(Dataset[tuple[Tensor, int]]):
    """Images as normalised float tensors of shape ``[channels, height, width]``, labels as integers.

    Args:
        images: pixels, shape ``[rows, channels, height, width]``, unsigned bytes.
        labels: shape ``[rows]``.
        mean: per channel, of pixels between 0 and 1.
        std: standard deviation likewise.
        augment: shift and mirror each image at random whenever it is drawn.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, *, mean: Sequence[float], std: Sequence[float], augment: bool = False
    ) -> None:
        # Kept as bytes: as floats every worker would hold four times as much.
        self._images = images
        self._labels: list[int] = labels.tolist()
        self._mean = torch.tensor(mean).view(-1, 1, 1)
        self._std = torch.tensor(std).view(-1, 1, 1)
        self._augment = augment

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = self._images[index]
        if self._augment:
            pixels = shifted_and_mirrored(pixels)
        return (pixels.to(torch.float32) / 255.0 - self._mean) / self._std, self._labels[index]


def shifted_and_mirrored(image: Tensor) -> Tensor:
    """Return the image shifted by up to 4 pixels each way, black where nothing was, and mirrored every other time.

    The usual augmentation of CIFAR (He et al. 2016, arXiv:1512.03385, section 4.2).

    Args:
        image: shape ``[channels, height, width]``.
    """
    height, width = image.shape[-2:]
    padded = functional.pad(image, (_SHIFT_PIXELS,) * 4)
    top, left, mirror = (int(torch.randint(n, ())) for n in (2 * _SHIFT_PIXELS + 1, 2 * _SHIFT_PIXELS + 1, 2))
    crop = padded[:, top : top + height, left : left + width]
    return crop.flip(-1) if mirror else crop


def seed_chance(seed: int, rank: int) -> None:
    """Give each rank a chance of its own; before, with one seed for all, every rank makes the same model."""
    torch.manual_seed(seed + _RANKS_APART * (rank + 1))


@torch.no_grad()
def count_correct(model: nn.Module, loader: Iterable[Any]) -> tuple[int, int]:
    """Count correct predictions and rows of this rank's part of the test set."""
    model.eval()
    correct = count = 0
    for images, labels in loader:
        correct += int((model(images).argmax(dim=1) == labels).sum())
        count += len(labels)
    model.train()
    return correct, count


def warn_of_batch_norm(norm: str, policy: str) -> None:
    """Say what unequal shares do to batch normalisation, before a run of hours."""
    if norm == "batch" and policy != "bsp":
        warnings.warn(
            f"BatchNorm takes its statistics from each worker's own rows, whose number policy {policy!r} changes; "
            "--norm group depends on no other row",
            stacklevel=2,
        )


@contextmanager
def no_answer_is_named(what: str) -> Iterator[None]:
    """Have a download by torchvision that fails say what to do: it raises what sockets and digests make of it.

    Args:
        what: is downloaded.

    Raises:
        ConfigError: there was no answer, or not the published files.
    """
    try:
        yield
    except (OSError, HTTPException, RuntimeError) as error:
        raise ConfigError(f"{what} could not be downloaded ({error}); fetch it elsewhere and give data_dir") from error
