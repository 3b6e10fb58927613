"""The tasks by name: which data, which model, which recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np

from rex_ray.core.errors import ConfigError, nearest_name_hint
from workloads.language_models import LSTMModel
from workloads.learning.features import FeatureTask, patch_features
from workloads.learning.files import CACHE, load_cifar10, load_fashion_mnist
from workloads.learning.images import Augmentation, Images, ImageTask
from workloads.learning.models import convolutional, perceptron
from workloads.learning.recipe import Recipe, Task
from workloads.learning.text import TextTask
from workloads.wikitext_files import END, UNKNOWN, Vocabulary, find_text, read_words

__all__ = ["SHARED", "load_task", "task_names"]

_REPOSITORY = Path(__file__).parents[2]
SHARED = _REPOSITORY.parent / "shared" / "data"
"""Where the real sets are looked for by default: beside the repository."""
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist

_CIFAR10 = Recipe(num_epochs=32, reference_batch_size=256, learning_rate=0.02, target=0.65, evaluations_per_epoch=4)
_PATCHES = 64  # 512 features
_CIFAR10_CNN = Recipe(num_epochs=10, reference_batch_size=256, learning_rate=0.02, target=0.63)
_FASHION = Recipe(num_epochs=8, reference_batch_size=256, learning_rate=0.02, target=0.865)
_DIGITS = Recipe(num_epochs=24, reference_batch_size=64, learning_rate=0.1, weight_decay=1e-4, target=0.9)
_WIKITEXT = Recipe(
    num_epochs=12,
    reference_batch_size=32,
    learning_rate=2.0,
    weight_decay=0.0,
    max_grad_norm=1.0,
    target=40.0,
    higher_is_better=False,
)
_WORDS = 2000  # most frequent ones that are told apart: the scores of all 13,000 would take most of the time
_ROW_WORDS = 35


def task_names() -> tuple[str, ...]:
    """Return the names of all tasks."""
    return tuple(_BUILDERS)


def load_task(name: str, data_dir: Path | None = None) -> Task:
    """Return a task with its data; loaded once per process.

    Args:
        name: see ``task_names``.
        data_dir: where its files are; default: beside the repository, or where the system's package has them.

    Raises:
        ConfigError: there is no such task, or its files are missing.
    """
    if name not in _BUILDERS:
        raise ConfigError(f"no task of real SGD is called {name!r}{nearest_name_hint(name, _BUILDERS)}")
    return _loaded(name, None if data_dir is None else data_dir.resolve())


@cache
def _loaded(name: str, data_dir: Path | None) -> Task:
    return _BUILDERS[name](data_dir)


def _cifar10(data_dir: Path | None) -> FeatureTask:
    train, test = patch_features(*load_cifar10(data_dir or SHARED), num_patches=_PATCHES, cache=CACHE)
    return FeatureTask(
        name="cifar10", recipe=_CIFAR10, train=train, test=test, build=lambda: perceptron(8 * _PATCHES, 64, 10)
    )


def _cifar10_cnn(data_dir: Path | None) -> ImageTask:
    train, test = load_cifar10(data_dir or SHARED)
    return ImageTask(
        name="cifar10_cnn",
        recipe=_CIFAR10_CNN,
        train=train,
        test=test,
        augmentation=Augmentation(flip=True, max_shift=2),
        build=lambda: convolutional(3, 32, 10),
    )


def _fashion(data_dir: Path | None) -> ImageTask:
    train, test = load_fashion_mnist(data_dir or _DEBIAN)
    return ImageTask(
        name="fashion_mnist",
        recipe=_FASHION,
        train=train,
        test=test,
        augmentation=Augmentation(flip=True, max_shift=1),
        build=lambda: convolutional(1, 28, 10),
    )


def _wikitext2(data_dir: Path | None) -> TextTask:
    """Train on the validation text and evaluate on the test text: the training text is not at hand, and ten times it.

    Perplexities are over the most frequent words, all others being one, so they are no figures of other work.
    """
    folder = data_dir or SHARED
    train, test = (read_words(find_text(folder, part)) for part in ("valid", "test"))
    frequent = Vocabulary.of(train).words[: _WORDS - 2]
    vocabulary = Vocabulary(tuple(dict.fromkeys((UNKNOWN, END, *frequent))))
    return TextTask(
        name="wikitext2",
        recipe=_WIKITEXT,
        train=vocabulary.encode(train),
        test=vocabulary.encode(test),
        row_words=_ROW_WORDS,
        build=lambda: LSTMModel(len(vocabulary), width=64, num_layers=1, dropout=0.0),
    )


def _digits(data_dir: Path | None) -> ImageTask:
    del data_dir  # they come with scikit-learn
    from sklearn.datasets import load_digits  # noqa: PLC0415  (slow to import, needed here alone)

    found = load_digits()
    pixels = (found.images * 15).astype(np.uint8)[..., None]
    images = Images(pixels=pixels, labels=found.target.astype(np.uint8))
    return ImageTask(
        name="digits",
        recipe=_DIGITS,
        train=images.part(slice(1437)),
        test=images.part(slice(1437, None)),
        augmentation=Augmentation(),
        build=lambda: perceptron(64, 32, 10),
    )


_BUILDERS: Mapping[str, Callable[[Path | None], Task]] = {
    "cifar10": _cifar10,
    "cifar10_cnn": _cifar10_cnn,
    "fashion_mnist": _fashion,
    "wikitext2": _wikitext2,
    "digits": _digits,
}
