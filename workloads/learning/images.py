"""Classification of small images: augmentation as a function of (seed, epoch, row), real files decoded once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from workloads.learning.models import scores
from workloads.learning.recipe import Recipe, fingerprint_of

__all__ = ["Augmentation", "ImageTask", "Images"]

_EVAL_ROWS = 500


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Images:
    """Images and what they show.

    Attributes:
        pixels: unsigned bytes, shape ``[rows, height, width, channels]``.
        labels: class numbers, shape ``[rows]``.
    """

    pixels: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint8]

    def part(self, rows: slice) -> Images:
        """Return some rows only."""
        return Images(pixels=self.pixels[rows], labels=self.labels[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """How images are varied from epoch to epoch.

    Attributes:
        flip: mirror left and right, one time in two.
        max_shift: most pixels up, down, left and right; the edge is repeated where nothing was.
    """

    flip: bool = False
    max_shift: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class ImageTask:
    """A ``recipe.Task`` whose metric is the fraction of test images that are classified correctly.

    Attributes:
        name: of the task.
        recipe: how it is trained.
        train: what is learnt from.
        test: what is judged by.
        augmentation: of the former.
        build: makes the model.
    """

    name: str
    recipe: Recipe
    train: Images
    test: Images
    augmentation: Augmentation
    build: Callable[[], nn.Module]
    dataset_size: int = field(init=False)
    fingerprint: str = field(init=False)
    _train: _Pixels = field(init=False)
    _test: _Pixels = field(init=False)
    _labels: Tensor = field(init=False)
    _test_labels: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.dataset_size = len(self.train.labels)
        mean, std = _statistics(self.train.pixels)
        self._train, self._test = _Pixels(self.train.pixels, mean, std), _Pixels(self.test.pixels, mean, std)
        self._labels = torch.from_numpy(self.train.labels.astype(np.int64))
        self._test_labels = torch.from_numpy(self.test.labels.astype(np.int64))
        data = [array for images in (self.train, self.test) for array in (images.pixels, images.labels)]
        self.fingerprint = fingerprint_of(self.name, self.recipe, self.augmentation, self.build(), data=data)

    def with_recipe(self, recipe: Recipe) -> ImageTask:
        """Return the same task, trained otherwise."""
        return replace(self, recipe=recipe)

    def make_model(self) -> nn.Module:
        """Return a model with fresh weights."""
        return self.build()

    def batch(self, seed: int, epoch: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised images, shape ``[rows, channels, height, width]``, and their labels."""
        flips, shifts = _variations(self.augmentation, seed, epoch, self.dataset_size)
        images = self._train.varied(rows, flips[rows], shifts[rows])
        return images, self._labels[rows]

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return functional.cross_entropy(scores(model, inputs), targets)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the fraction of test images classified correctly."""
        correct = 0
        for start in range(0, len(self._test_labels), _EVAL_ROWS):
            part = slice(start, start + _EVAL_ROWS)
            correct += int((scores(model, self._test.plain(part)).argmax(dim=1) == self._test_labels[part]).sum())
        return correct / len(self._test_labels)


class _Pixels:
    """Images such that whole pixels are gathered at once: three channels lie in one 32-bit word, beside an empty one.

    Args:
        pixels: unsigned bytes, shape ``[rows, height, width, 1 or 3]``.
        mean: of each channel over the training set, shape ``[channels]``.
        std: likewise.
    """

    def __init__(self, pixels: npt.NDArray[np.uint8], mean: Tensor, std: Tensor) -> None:
        rows, self._height, self._width, self._channels = pixels.shape
        if self._channels == 3:
            pixels = np.concatenate([pixels, np.zeros((*pixels.shape[:3], 1), dtype=np.uint8)], axis=3)
        # A copy: files are read-only, which torch's tensors cannot be.
        words = np.array(pixels, order="C").view(np.int32 if self._channels == 3 else np.uint8)
        self._words = torch.from_numpy(words.reshape(rows, self._height * self._width))
        self._mean, self._std = mean, std

    def plain(self, part: slice) -> Tensor:
        """Return consecutive images as they are."""
        return self._normalised(self._words[part])

    def varied(self, rows: Tensor, flips: Tensor, shifts: Tensor) -> Tensor:
        """Return images mirrored and shifted, each as its ``flips [rows]`` and ``shifts [rows, 2]`` say."""
        down = (torch.arange(self._height) - shifts[:, :1]).clamp_(0, self._height - 1)
        right = torch.arange(self._width).expand(len(rows), -1)
        right = torch.where(flips[:, None], self._width - 1 - right, right)
        right = (right - shifts[:, 1:]).clamp_(0, self._width - 1)
        place = (rows * (self._height * self._width))[:, None, None] + (down * self._width)[:, :, None] + right[:, None]
        return self._normalised(self._words.view(-1)[place.view(len(rows), -1)])

    def _normalised(self, words: Tensor) -> Tensor:
        pixels = words.contiguous().view(torch.uint8).view(len(words), self._height, self._width, -1)
        images = (pixels[..., : self._channels].float() - self._mean) / self._std
        return images.permute(0, 3, 1, 2)  # channels last in memory, which convolutions on a CPU like


def _statistics(pixels: npt.NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel, from how often each value is there."""
    values = np.arange(256)
    means, stds = [], []
    for channel in np.moveaxis(pixels, -1, 0):
        counts = np.bincount(channel.ravel(), minlength=256)
        means.append(mean := float(counts @ values) / channel.size)
        stds.append(max(float(counts @ (values - mean) ** 2) / channel.size, 1.0) ** 0.5)
    return torch.tensor(means), torch.tensor(stds)


@lru_cache(maxsize=4)
def _variations(augmentation: Augmentation, seed: int, epoch: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return for each row whether it is mirrored, shape ``[rows]``, and its shift, shape ``[rows, 2]``."""
    digest = hashlib.sha256(f"augmentation/{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    flips = torch.rand(num_rows, generator=generator) < (0.5 if augmentation.flip else 0.0)
    most = augmentation.max_shift
    return flips, torch.randint(-most, most + 1, (num_rows, 2), generator=generator)
