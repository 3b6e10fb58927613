"""The training loader: torch's DataLoader over the elastic sampler, one plan with every batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from rex_ray.core.errors import ConfigError, RexError
from rex_ray.worker.data.sampler import ElasticSampler, Position
from rex_ray.worker.group.switch import Switch
from rex_ray.worker.measuring.timing import now_s
from rex_ray.worker.tracker import StepTracker
from rex_ray.worker.tree import map_tensors, slice_rows

__all__ = [
    "TrainLoader",
    "batches_drawn_ahead",
    "check_loader_options",
    "check_map_style",
    "make_data_loader",
    "to_device",
]

_DECIDED_HERE = {
    "batch_size": "the allocation decides how many rows a rank gets; set RexConfig.global_batch_size",
    "shuffle": "each epoch has its own order, drawn from RexConfig.seed; leave it out",
    "sampler": "the rows follow one global order that all ranks share; wrap the data set to choose rows",
    "batch_sampler": "the allocation decides the batches; leave it out",
    "drop_last": "every row is seen once per epoch; leave it out",
}


def check_map_style(dataset: object, call: str) -> int:
    """Return the number of rows of a map-style data set.

    Raises:
        ConfigError: it is iterable-style, or empty.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{call} needs a map-style data set, with __len__ and __getitem__, and {type(dataset).__name__} is not "
            "one: shares of a stream without a length cannot be changed without losing rows"
        )
    if len(dataset) == 0:
        raise ConfigError(f"{call} got a data set of 0 rows")
    return len(dataset)


def check_loader_options(options: dict[str, Any]) -> None:
    """Refuse DataLoader options that the session decides.

    Raises:
        ConfigError: one of them was given; the message says what to do instead.
    """
    for name, remedy in _DECIDED_HERE.items():
        if name in options:
            raise ConfigError(f"session.loader does not take {name}={options[name]!r}: {remedy}")
    if options.get("in_order") is False:
        raise ConfigError("session.loader needs in_order=True: weights belong to batches in the order of their draw")


def batches_drawn_ahead(options: dict[str, Any]) -> int:
    """Return how many batches a DataLoader with these options draws beyond the one in the user's hand."""
    num_workers = int(options.get("num_workers", 0))
    prefetch_factor = options.get("prefetch_factor")
    return num_workers * (2 if prefetch_factor is None else int(prefetch_factor))


class _EpochDataset(Dataset[Any]):
    """Tells a data set its epoch in whichever process it is read.

    The epoch travels with each index, so persistent loader processes need no other channel, and a batch drawn
    before an epoch's end cannot see the next one's value.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._epoch: int | None = None

    def __getitem__(self, index: tuple[int, int]) -> Any:
        epoch, row = index
        self._tell(epoch)
        return self._dataset[row]

    def __getitems__(self, indices: Sequence[tuple[int, int]]) -> list[Any]:
        self._tell(indices[0][0])
        rows = [row for _, row in indices]
        fetch_all: Callable[[list[int]], list[Any]] | None = getattr(self._dataset, "__getitems__", None)
        return fetch_all(rows) if fetch_all else [self._dataset[row] for row in rows]

    def _tell(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._dataset.set_epoch(epoch)
            self._epoch = epoch


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a batch's tensors to where the model computes, without waiting for the copy."""
    if device.type == "cpu":
        return batch
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def wants_epoch(dataset: object) -> bool:
    """Whether a data set asks to be told the epoch."""
    return callable(getattr(dataset, "set_epoch", None))


def make_data_loader(dataset: Any, sampler: ElasticSampler, options: dict[str, Any]) -> DataLoader[Any]:
    """Return torch's DataLoader over the sampler's batches."""
    if int(options.get("num_workers", 0)) > 0:
        # Starting loader processes anew for each epoch costs more than a small epoch.
        options = {"persistent_workers": True, **options}
    source = _EpochDataset(dataset) if wants_epoch(dataset) else dataset
    return DataLoader(source, batch_sampler=sampler, **options)


class TrainLoader:
    """Yields this rank's batches of the current epoch, from the first sample that is not consumed yet.

    Iterating again after leaving a loop early goes on where the loop was left: a batch counts as consumed once its
    gradient was reduced, or once the next one was asked for.

    Args:
        dataset: the user's data set.
        data_loader: torch's DataLoader over ``sampler``.
        sampler: draws the rows.
        switch: agrees on new shares before each batch.
        tracker: follows the batch in hand.
        global_batch_size: reference batch, for ``len``.
        start_pass: settles what the last pass left, and returns where this one begins.
        end_pass: called when an epoch's last batch is consumed.
    """

    def __init__(
        self,
        *,
        dataset: Any,
        data_loader: DataLoader[Any],
        sampler: ElasticSampler,
        switch: Switch,
        tracker: StepTracker,
        global_batch_size: int,
        start_pass: Callable[[], Position],
        end_pass: Callable[[], None],
    ) -> None:
        self.dataset = dataset
        self._data_loader: DataLoader[Any] | None = data_loader
        self._sampler = sampler
        self._switch = switch
        self._tracker = tracker
        self._global_batch_size = global_batch_size
        self._start_pass = start_pass
        self._end_pass = end_pass
        self._newest: _Pass | None = None

    def __len__(self) -> int:
        """Reference steps per epoch, ``ceil(N / M0)``: what a learning-rate schedule should count."""
        return math.ceil(len(self.dataset) / self._global_batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass."""
        if self._data_loader is None:
            raise RexError("the session that made this loader is closed")
        self._sampler.rewind(self._start_pass())
        self._newest = _Pass(self, iter(self._data_loader))
        return self._newest

    def next_batch(self, asking: _Pass, batches: Iterator[Any]) -> Any:
        """Hand out the next batch of the newest pass."""
        if asking is not self._newest:
            raise RexError("this iterator of session.loader was replaced by a newer one; use one at a time")
        self._tracker.asked_for_next()
        asked_s = now_s()
        self._switch.boundary(self._tracker.position.step, self._tracker.last_step_s)
        drawing_s = now_s()
        try:
            batch = next(batches)
        except StopIteration:
            self._newest = None
            self._end_pass()
            raise
        plan = self._sampler.drawn.popleft()
        assert plan.step == self._tracker.position.step, "a pass hands out its plans in step order"
        batch = to_device(batch, self._tracker.device)
        step = self._tracker.begin(plan, asked_s=asked_s, waited_s=now_s() - drawing_s)
        return batch if step.num_rows else slice_rows(batch, 0, 0, num_rows=1)

    def stop(self) -> None:
        """Let go of the iterator, and with it of the loader processes."""
        self._newest = self._data_loader = None


class _Pass:
    """One iteration over the loader."""

    def __init__(self, loader: TrainLoader, batches: Iterator[Any]) -> None:
        self._loader = loader
        self._batches = batches
        self._exhausted = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._exhausted:
            raise StopIteration
        try:
            return self._loader.next_batch(self, self._batches)
        except StopIteration:
            self._exhausted = True
            raise
