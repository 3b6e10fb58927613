"""Batches of a map-style data set, whose rows all ranks share by one global order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from rex_ray.core.errors import ConfigError, DataError, RexError
from rex_ray.worker.data.failures import Failure, handed_out_nothing
from rex_ray.worker.data.loader_processes import LoaderProcesses
from rex_ray.worker.data.row_reader import RowBatch, RowReader
from rex_ray.worker.data.sampler import ElasticSampler, Plan, Position
from rex_ray.worker.data.source import Drawn
from rex_ray.worker.row_cutting import empty_like

__all__ = ["MapSource", "check_map_style", "is_map_style"]

_MOST_NAMED_KEYS = 4


def is_map_style(dataset: object) -> bool:
    """Whether a data set has rows that can be asked for by number."""
    return not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def check_map_style(dataset: Any, call: str) -> int:
    """Return the number of rows of a map-style data set.

    Raises:
        ConfigError: it is empty, or a mapping by other keys than numbers, or does not say how many rows it has.
    """
    name = type(dataset).__name__
    if isinstance(dataset, Mapping) and not _has_row_0(dataset):
        keys = ", ".join(repr(key) for key in list(dataset)[:_MOST_NAMED_KEYS])
        raise ConfigError(
            f"{call} was given a {name} with the keys {keys}{', ...' if len(dataset) > _MOST_NAMED_KEYS else ''}; rows "
            "are asked for by number, 0 to len() - 1: give one of its data sets, or a list of its values"
        )
    try:
        num_rows = len(dataset)
    except Exception as error:
        raise ConfigError(
            f"{call} was given a {name} whose rows cannot be counted (len() raised {type(error).__name__}: {error}): "
            "have its __len__ return a whole number, or give it as a stream, an IterableDataset"
        ) from error
    if num_rows == 0:
        raise ConfigError(f"{call} got a data set of 0 rows")
    return num_rows


def _has_row_0(dataset: Any) -> bool:
    """Whether a mapping is one of rows by their numbers, or has rows beside its keys, as a tensor dictionary does."""
    try:
        dataset[0]
    except Exception:  # noqa: BLE001 - whatever a library says to a key that is none
        return False
    return True


class MapSource:
    """Draws this rank's slices of each epoch's order.

    Args:
        dataset: the user's.
        sampler: decides the rows.
        rank: this rank.
        by_tokens: rows weigh nothing, so that a collate function may make of them what it likes.
        options: the user's DataLoader options.
    """

    def __init__(
        self, dataset: Any, *, sampler: ElasticSampler, rank: int, by_tokens: bool, options: dict[str, Any]
    ) -> None:
        self.dataset = dataset
        self._num_rows = len(dataset)
        self._sampler = sampler
        self._rank = rank
        self._by_tokens = by_tokens
        options = dict(options)
        reader = RowReader(dataset, options.pop("collate_fn", None))
        self._processes = LoaderProcesses(reader, sampler, options, rank)
        self._batches: Iterator[RowBatch] = iter(())

    @property
    def next_undrawn(self) -> int:
        """See ``Source``."""
        return self._sampler.next_undrawn

    def num_reference_steps(self, reference_batch: int) -> int:
        """Return ``ceil(N / M0)``."""
        return math.ceil(self._num_rows / reference_batch)

    def rewind(self, position: Position) -> None:
        """See ``Source``.

        Raises:
            DataError: the data set has another number of rows than it had.
        """
        if len(self.dataset) != self._num_rows:
            raise DataError(
                f"rank {self._rank}, epoch {position.epoch}: the training set has {len(self.dataset)} rows now, and "
                f"had {self._num_rows} when session.loader was called; every epoch's order was agreed by that number. "
                "Start a new run with data that changed"
            )
        self._sampler.rewind(position)
        self._batches = iter(())  # processes that are no longer wanted end before others begin
        self._batches = self._processes.begin()

    def draw(self) -> Drawn | None:
        """See ``Source``."""
        try:
            fetched = next(self._batches)
        except StopIteration:
            return None
        except RexError:
            raise
        except Exception as error:
            raise self._error(self._sampler.drawn[0], handed_out_nothing(error)) from error
        plan = self._sampler.drawn.popleft()
        if fetched.failure is not None:
            raise self._error(plan, fetched.failure)
        num_rows = plan.num_rows[self._rank]
        if not num_rows:
            return Drawn(plan=plan, batch=empty_like(fetched.batch, 1))
        if fetched.num_rows != num_rows and not self._by_tokens:
            raise DataError(
                f"rank {self._rank}, epoch {plan.epoch}, step {plan.step}: collate_fn was given {num_rows} rows and "
                f"returned a batch of {fetched.num_rows}, so the rank would be weighted by rows that it does not have. "
                "Have it keep every row, leave unusable rows out of the data set beforehand, or weight ranks by what "
                "is there: weight_by='tokens' and session.backward(loss, weight=...)"
            )
        return Drawn(plan=plan, batch=fetched.batch)

    def is_complete(self, position: Position) -> bool:
        """Whether the position is at the epoch's last row."""
        return position.cursor >= self._num_rows

    def save(self, position: Position) -> None:
        """The position says everything."""

    def stop(self) -> None:
        """See ``Source``."""
        self._batches = iter(())
        self._processes.stop()

    def close(self, timeout_s: float) -> None:
        """Nothing is under way between ranks."""

    def _error(self, plan: Plan, failure: Failure) -> DataError:
        return failure.to_error(rank=self._rank, epoch=plan.epoch, step=plan.step)
