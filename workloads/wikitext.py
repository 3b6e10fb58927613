"""A word-level language model on WikiText-2: an LSTM or a small transformer.

    python -m workloads.wikitext --data-dir ~/wikitext-2 --num-workers 2 --policy rex
    python -m workloads.wikitext --model transformer --train-part valid --eval-part test --data-dir FOLDER

``--data-dir`` holds ``wiki.train.tokens`` and the other parts, on every node; without it the archive is downloaded and
its SHA-256 checked, once, to the machine that starts the run, which is enough when all workers run there.

A row is a stretch of text of fixed length, and the last one is shorter: a rank's gradient is weighted by its words,
not by its rows (``weight_by="tokens"``), which makes it exactly the mean over all words of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from rex_ray import get_session
from rex_ray.core.errors import ConfigError
from workloads.arguments import Parser, number, refusing, whole
from workloads.images import seed_chance
from workloads.language_models import LSTMModel, TransformerModel, perplexity
from workloads.wikitext_files import Vocabulary, download, find_text, read_words

__all__ = ["MODELS", "NO_WORD", "TextRows", "load_parts", "main", "perplexity", "sum_of_losses", "train_loop"]

NO_WORD = -100
"""Stands where a row is too short to have a word; ``cross_entropy`` leaves it out."""

_MAX_GRADIENT_NORM = 1.0
_NUM_HEADS = 4


def _lstm(num_words: int, config: Mapping[str, Any]) -> nn.Module:
    return LSTMModel(num_words, width=config["width"], num_layers=config["num_layers"], dropout=config["dropout"])


def _transformer(num_words: int, config: Mapping[str, Any]) -> nn.Module:
    return TransformerModel(
        num_words,
        width=config["width"],
        num_layers=config["num_layers"],
        num_heads=_NUM_HEADS,
        dropout=config["dropout"],
    )


MODELS: Mapping[str, Callable[[int, Mapping[str, Any]], nn.Module]] = {"lstm": _lstm, "transformer": _transformer}


class TextRows(Dataset[tuple[Tensor, Tensor]]):
    """A text cut into rows: ``length`` words, and the word that follows each of them.

    Every word but the text's first is asked for exactly once. The last row is filled up with ``NO_WORD``.

    Args:
        words: numbers of words, shape ``[words]``.
        length: words per row.

    Raises:
        ConfigError: fewer than two words, or rows without length.
    """

    def __init__(self, words: npt.NDArray[np.int64], length: int) -> None:
        if length < 1:
            raise ConfigError(f"a row must have at least one word, got length {length}")
        if len(words) < 2:
            raise ConfigError(f"a text of {len(words)} words has none to predict")
        self._words = torch.from_numpy(words)
        self._length = length

    def __len__(self) -> int:
        return math.ceil((len(self._words) - 1) / self._length)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):  # slices of a tensor have no end to run into
            raise IndexError(index)
        start = index * self._length
        inputs = self._words[start : start + self._length]
        targets = self._words[start + 1 : start + 1 + self._length]
        missing = self._length - len(targets)
        if missing:
            inputs = functional.pad(inputs[: len(targets)], (0, missing))
            targets = functional.pad(targets, (0, missing), value=NO_WORD)
        return inputs, targets


def load_parts(data_dir: Path, train_part: str, eval_part: str, length: int) -> tuple[TextRows, TextRows, int]:
    """Read two parts and number their words by what occurs in the first.

    Returns:
        Rows to train on, rows to evaluate on, and the size of the vocabulary.

    Raises:
        ConfigError: a part is missing or damaged.
    """
    train_words = read_words(find_text(data_dir, train_part))
    eval_words = read_words(find_text(data_dir, eval_part))
    vocabulary = Vocabulary.of(train_words)
    return (
        TextRows(vocabulary.encode(train_words), length),
        TextRows(vocabulary.encode(eval_words), length),
        len(vocabulary),
    )


@torch.no_grad()
def sum_of_losses(model: nn.Module, loader: Iterable[Any]) -> tuple[float, int]:
    """Return the words' cross-entropies in nats, added up, and how many words this rank's part has."""
    model.eval()
    nats, count = 0.0, 0
    for words, targets in loader:
        scores = model(words).flatten(0, 1)
        losses = functional.cross_entropy(scores, targets.flatten(), ignore_index=NO_WORD, reduction="none")
        nats += float(losses.double().sum())
        count += int((targets != NO_WORD).sum())
    model.train()
    return nats, count


def train_loop(config: dict[str, Any]) -> None:
    """Train on one worker: Adam, gradients cut to a norm, the rate falling to zero along a cosine.

    Args:
        config: ``data_dir``, ``train_part``, ``eval_part``, ``length``, ``model``, ``width``, ``num_layers``,
            ``dropout``, ``num_epochs``, ``learning_rate``, ``loader_processes``, ``seed``.
    """
    session = get_session()
    train_set, eval_set, num_words = load_parts(
        Path(config["data_dir"]), config["train_part"], config["eval_part"], config["length"]
    )
    torch.manual_seed(config["seed"])
    model = MODELS[config["model"]](num_words, config)
    seed_chance(config["seed"], session.rank)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=config["learning_rate"])
    model, optimizer = session.prepare(model, optimizer)
    loader = session.loader(train_set, num_workers=config["loader_processes"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config["num_epochs"] * len(loader))
    schedule = session.prepare_scheduler(schedule, stepped="batch")
    for _ in session.epochs(config["num_epochs"]):
        for words, targets in loader:
            loss = functional.cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=NO_WORD)
            session.backward(loss, weight=int((targets != NO_WORD).sum()))
            nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRADIENT_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        nats, count = sum_of_losses(session.unwrap(model), session.eval_loader(eval_set, local_batch_size=16))
        session.report({"perplexity": perplexity(session.pool(nats, count))})


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and train."""
    from workloads.base import add_common_arguments, checked, launch  # noqa: PLC0415  (Ray: workers need none of it)

    parser = Parser(prog="python -m workloads.wikitext", description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="folder of wiki.train.tokens (default: download)")
    parser.add_argument("--train-part", choices=["train", "valid", "test"], default="train")
    parser.add_argument("--eval-part", choices=["train", "valid", "test"], default="valid")
    parser.add_argument("--model", choices=list(MODELS), default="lstm")
    parser.add_argument("--length", type=whole(1), default=35, help="words per row (default: 35)")
    parser.add_argument("--width", type=whole(1), default=200, help="of embedding and layers (default: 200)")
    parser.add_argument("--num-layers", type=whole(1), default=2)
    parser.add_argument("--dropout", type=number(at_least=0.0, below=1.0), default=0.2)
    parser.add_argument("--learning-rate", type=number(above=0.0), default=2e-3)
    add_common_arguments(parser, global_batch_size=40, num_epochs=10)
    options = checked(parser, arguments)
    if options.model == "transformer" and options.width % _NUM_HEADS:
        parser.error(f"argument --width: must be a multiple of {_NUM_HEADS} for a transformer, got {options.width}")
    data_dir = options.data_dir if options.data_dir is not None else download()
    # Read before a cluster is asked for: workers that cannot would be started again and again.
    train_set, _, _ = load_parts(data_dir, options.train_part, options.eval_part, options.length)
    loop_config = {
        "data_dir": str(data_dir.resolve()),
        "train_part": options.train_part,
        "eval_part": options.eval_part,
        "length": options.length,
        "model": options.model,
        "width": options.width,
        "num_layers": options.num_layers,
        "dropout": options.dropout,
        "num_epochs": options.num_epochs,
        "learning_rate": options.learning_rate,
        "loader_processes": options.loader_processes,
        "seed": options.seed,
    }
    launch(f"wikitext2-{options.model}", train_loop, loop_config, options, num_rows=len(train_set), weight_by="tokens")


if __name__ == "__main__":
    with refusing():
        main()
