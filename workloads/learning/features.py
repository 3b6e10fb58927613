"""Fixed features of small images, and a network on top of them: real SGD on real images at a tenth of a CNN's price.

The features are those of Coates, Lee and Ng (2011, "An Analysis of Single-Layer Networks in Unsupervised Feature
Learning"): whitened 6 x 6 patches, compared with random patches of the training set (which they found nearly as good
as learnt ones), halves of either sign, averaged over the image's quarters. They are computed once; what SGD trains is
the network behind them. Images are not varied, since their features would have to be computed again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from workloads.learning.images import Images
from workloads.learning.models import scores
from workloads.learning.recipe import Recipe, fingerprint_of

__all__ = ["FeatureTask", "Features", "patch_features"]

_LAW = 1  # raised when the code below changes what comes of it
_SIDE, _STRIDE = 6, 2
_LEAST_VARIANCE = 10 / 255**2  # of a patch's pixels: flat patches are not blown up (Coates et al. 2011)
_WHITENING = 0.1
_THRESHOLD = 0.25
_ROWS = 500


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Features:
    """A set of rows.

    Attributes:
        values: shape ``[rows, features]``, half precision.
        labels: class numbers, shape ``[rows]``.
    """

    values: npt.NDArray[np.float16]
    labels: npt.NDArray[np.uint8]


@dataclass(slots=True, kw_only=True, eq=False)
class FeatureTask:
    """A ``recipe.Task`` on fixed features, whose metric is the fraction of test rows classified correctly.

    Attributes:
        name: of the task.
        recipe: how it is trained.
        train: what is learnt from; its mean and deviation normalise both sets.
        test: what is judged by.
        build: makes the model.
    """

    name: str
    recipe: Recipe
    train: Features
    test: Features
    build: Callable[[], nn.Module]
    dataset_size: int = field(init=False)
    fingerprint: str = field(init=False)
    _train: tuple[Tensor, Tensor] = field(init=False)
    _test: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.dataset_size = len(self.train.labels)
        values = torch.from_numpy(self.train.values).float()
        mean, std = values.mean(dim=0), values.std(dim=0) + 1e-3
        self._train = ((values - mean) / std, _as_tensor(self.train.labels))
        test = torch.from_numpy(self.test.values).float()
        self._test = ((test - mean) / std, _as_tensor(self.test.labels))
        data = [array for part in (self.train, self.test) for array in (part.values, part.labels)]
        self.fingerprint = fingerprint_of(self.name, self.recipe, self.build(), data=data)

    def with_recipe(self, recipe: Recipe) -> FeatureTask:
        """Return the same task, trained otherwise."""
        return replace(self, recipe=recipe)

    def make_model(self) -> nn.Module:
        """Return a model with fresh weights."""
        return self.build()

    def batch(self, seed: int, epoch: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return features, shape ``[rows, features]``, and labels; nothing is varied."""
        del seed, epoch
        values, labels = self._train
        return values[rows], labels[rows]

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return functional.cross_entropy(scores(model, inputs), targets)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the fraction of test rows classified correctly."""
        values, labels = self._test
        return int((scores(model, values).argmax(dim=1) == labels).sum()) / len(labels)


def patch_features(train: Images, test: Images, num_patches: int, cache: Path) -> tuple[Features, Features]:
    """Return the features of both sets, eight per patch; kept on disk, since they take a minute or two.

    Args:
        train: images that the patches are drawn from.
        test: the others.
        num_patches: how many patches every place of an image is compared with.
        cache: where features are kept.
    """
    digest = hashlib.sha256(f"{_LAW}/{num_patches}".encode())
    for images in (train, test):
        digest.update(images.pixels.tobytes())
    path = cache / f"features-{digest.hexdigest()[:16]}.npz"
    if not path.is_file():
        with _one_thread():
            weight, bias = _filters(train, num_patches)
            arrays: dict[str, Any] = {
                "train": _compared(train, weight, bias),
                "test": _compared(test, weight, bias),
            }
        cache.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        with part.open("wb") as stream:
            np.savez(stream, **arrays)
        part.replace(path)
    with np.load(path, allow_pickle=False) as stored:
        return (
            Features(values=stored["train"], labels=train.labels),
            Features(values=stored["test"], labels=test.labels),
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums are taken in another order by more threads, and rounded otherwise: the same images, the same bytes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _filters(train: Images, num_patches: int) -> tuple[Tensor, Tensor]:
    """Return weight ``[pixels of a patch, patches]`` and bias: whitening, then the product with each random patch."""
    generator = torch.Generator().manual_seed(0)
    pixels = _scaled(train.pixels[:: max(1, len(train.pixels) // 2000)])
    patches = functional.unfold(pixels, _SIDE).permute(0, 2, 1).reshape(-1, pixels.shape[1] * _SIDE**2)
    patches = _contrast(patches[torch.randperm(len(patches), generator=generator)[:100_000]])
    mean = patches.mean(dim=0)
    variances, axes = torch.linalg.eigh(torch.cov(patches.T))
    whiten = axes @ torch.diag((variances + _WHITENING).rsqrt()) @ axes.T
    white = (patches - mean) @ whiten
    chosen = white[torch.randperm(len(white), generator=generator)[:num_patches]]
    weight = whiten @ (chosen / chosen.norm(dim=1, keepdim=True)).T
    return weight, -(mean @ weight)


def _compared(images: Images, weight: Tensor, bias: Tensor) -> npt.NDArray[np.float16]:
    parts = []
    for start in range(0, len(images.pixels), _ROWS):
        pixels = _scaled(images.pixels[start : start + _ROWS])
        places = (pixels.shape[2] - _SIDE) // _STRIDE + 1
        white = _contrast(functional.unfold(pixels, _SIDE, stride=_STRIDE).permute(0, 2, 1)) @ weight + bias
        halves = torch.cat([functional.relu(white - _THRESHOLD), functional.relu(-white - _THRESHOLD)], dim=2)
        maps = halves.permute(0, 2, 1).reshape(len(pixels), -1, places, places)
        parts.append(functional.avg_pool2d(maps, places // 2).flatten(1).half())
    values: npt.NDArray[np.float16] = torch.cat(parts).numpy()
    return values


def _scaled(pixels: npt.NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2).float() / 255


def _contrast(patches: Tensor) -> Tensor:
    centred = patches - patches.mean(dim=-1, keepdim=True)
    return centred / (centred.var(dim=-1, keepdim=True) + _LEAST_VARIANCE).sqrt()


def _as_tensor(labels: npt.NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))
