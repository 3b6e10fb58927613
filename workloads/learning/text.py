"""A word-level language model: which word comes next, its metric the perplexity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from workloads.language_models import perplexity
from workloads.learning.models import scores
from workloads.learning.recipe import Recipe, fingerprint_of

__all__ = ["TextTask"]

_EVAL_ROWS = 256


@dataclass(slots=True, kw_only=True, eq=False)
class TextTask:
    """A ``recipe.Task`` whose rows are stretches of text of one length, read without memory of the stretch before.

    All rows have equally many words, so the mean over rows is the mean over words. What does not fill a row is left
    out, of either text.

    Attributes:
        name: of the task.
        recipe: how it is trained.
        train: numbers of words, in order.
        test: likewise.
        row_words: words of a row to be foretold.
        build: makes the model: from numbers of words, ``[rows, length]``, to scores, ``[rows, length, words]``.
    """

    name: str
    recipe: Recipe
    train: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]
    row_words: int
    build: Callable[[], nn.Module]
    dataset_size: int = field(init=False)
    fingerprint: str = field(init=False)
    _train: tuple[Tensor, Tensor] = field(init=False)
    _test: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._train, self._test = (_rows(words, self.row_words) for words in (self.train, self.test))
        self.dataset_size = len(self._train[0])
        made_by = (self.row_words, self.build())
        self.fingerprint = fingerprint_of(self.name, self.recipe, *made_by, data=(self.train, self.test))

    def with_recipe(self, recipe: Recipe) -> TextTask:
        """Return the same task, trained otherwise."""
        return replace(self, recipe=recipe)

    def make_model(self) -> nn.Module:
        """Return a model with fresh weights."""
        return self.build()

    def batch(self, seed: int, epoch: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return words and the words after them, each of shape ``[rows, row_words]``; nothing is varied."""
        del seed, epoch
        words, following = self._train
        return words[rows], following[rows]

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy per word."""
        return functional.cross_entropy(scores(model, inputs).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the perplexity of the test text."""
        words, following = self._test
        total = 0.0
        for start in range(0, len(words), _EVAL_ROWS):
            part = slice(start, start + _EVAL_ROWS)
            total += float(self.loss(model, words[part], following[part])) * len(words[part])
        return perplexity(total / len(words))


def _rows(words: npt.NDArray[np.int64], length: int) -> tuple[Tensor, Tensor]:
    """Cut a text into rows: word ``k`` of a row's targets is the one after word ``k`` of its inputs."""
    count = (len(words) - 1) // length
    text = torch.from_numpy(words)
    return text[: count * length].view(count, length), text[1 : count * length + 1].view(count, length)
