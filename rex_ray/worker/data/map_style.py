"""Batches of a map-style data set, whose rows all ranks share by one global order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from rex_ray.core.errors import ConfigError, DataError
from rex_ray.worker.data.dataloader import make_data_loader
from rex_ray.worker.data.failures import LOADER_FAILED, Failure
from rex_ray.worker.data.row_reader import RowBatch, RowReader
from rex_ray.worker.data.sampler import ElasticSampler, Plan, Position
from rex_ray.worker.data.source import Drawn
from rex_ray.worker.row_cutting import empty_like

__all__ = ["MapSource", "check_map_style", "is_map_style"]


def is_map_style(dataset: object) -> bool:
    """Whether a data set has rows that can be asked for by number."""
    return not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def check_map_style(dataset: Any, call: str) -> int:
    """Return the number of rows of a map-style data set.

    Raises:
        ConfigError: it is empty.
    """
    num_rows = len(dataset)
    if num_rows == 0:
        raise ConfigError(f"{call} got a data set of 0 rows")
    return num_rows


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
        self._loader: DataLoader[Any] | None = make_data_loader(reader, sampler, options)
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
        assert self._loader is not None
        if len(self.dataset) != self._num_rows:
            raise DataError(
                f"rank {self._rank}, epoch {position.epoch}: the training set has {len(self.dataset)} rows now, and "
                f"had {self._num_rows} when session.loader was called; every epoch's order was agreed by that number. "
                "Start a new run with data that changed"
            )
        self._sampler.rewind(position)
        self._batches = iter(self._loader)

    def draw(self) -> Drawn | None:
        """See ``Source``."""
        try:
            fetched = next(self._batches)
        except StopIteration:
            return None
        except RuntimeError as error:
            raise self._error(self._sampler.drawn[0], Failure.of(LOADER_FAILED, error)) from error
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
        self._loader = None

    def close(self, timeout_s: float) -> None:
        """Nothing is under way between ranks."""

    def _error(self, plan: Plan, failure: Failure) -> DataError:
        return failure.to_error(rank=self._rank, epoch=plan.epoch, step=plan.step)
