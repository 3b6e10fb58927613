"""Evaluating over ranks: every row once, and sums that are exact whatever each rank saw."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, repeat
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from rex_ray.core.errors import ConfigError, DataError
from rex_ray.worker.data.column_reader import ColumnReader, comes_in_columns
from rex_ray.worker.data.dataloader import num_processes, to_device
from rex_ray.worker.data.make_source import is_stream
from rex_ray.worker.data.map_style import check_map_style
from rex_ray.worker.data.requests import Request
from rex_ray.worker.data.sending import SendableCollate
from rex_ray.worker.data.stream_end import UnknownLengthError
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.row_cutting import opaque_part, slice_rows

__all__ = ["EvalLoader", "Summable", "pool_ratio", "pool_sum"]

Summable: TypeAlias = torch.Tensor | float

_MOST_DIMENSIONS = 64
"""Of any tensor of torch's."""

_DECIDED_HERE = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


class EvalLoader:
    """Yields this rank's part of a data set, in order, without padding: over all ranks every row comes once.

    Of a map-style data set it is every n-th row. A stream is taken for this rank's own, all of it; one that every
    rank was given whole is ``whole``, and every n-th row of it is this rank's.

    Args:
        dataset: map-style, a stream, or a shard of Ray Data.
        rank: whose part.
        num_ranks: parts.
        local_batch_size: rows per batch.
        whole: every rank was given the same stream; None: it is this rank's own.
        device: tells where batches are moved to.
        on_start: called when an iteration begins; returns whether ranks must all call the model equally often. A rank
            with fewer batches then yields one of no rows; of a stream nobody knows how many there are.
        in_step: they must, whatever that returns.
        options: further DataLoader options.
    """

    def __init__(  # noqa: PLR0913 - each is said once, by the session
        self,
        dataset: Any,
        *,
        rank: int,
        num_ranks: int,
        local_batch_size: int,
        whole: bool | None,
        device: Callable[[], torch.device],
        on_start: Callable[[], bool],
        options: dict[str, Any],
        in_step: bool = False,
    ) -> None:
        for name in _DECIDED_HERE:
            if name in options:
                raise ConfigError(
                    f"session.eval_loader does not take {name}={options[name]!r}: it gives each rank its part of the "
                    "rows in order; set local_batch_size for the rows per batch"
                )
        self.dataset = dataset
        self._device = device
        self._on_start = on_start
        self._in_step = in_step
        self._most = 0
        self._collate = options.get("collate_fn")
        self._streamed = is_stream(dataset, "session.eval_loader")
        if whole is not None and (not self._streamed or comes_in_columns(dataset)):
            raise ConfigError(
                f"whole={whole} was given with a {type(dataset).__name__}, which is divided among the ranks anyhow; it "
                "says whose the rows of a stream are"
            )
        if in_step and self._streamed:
            raise ConfigError(
                f"in_step=True was given with a {type(dataset).__name__}, a stream, of whose batches nobody knows how "
                "many the other ranks have; sum over this rank's rows, and combine the sums with session.pool"
            )
        part: Any = dataset
        if not self._streamed:
            num_rows = check_map_style(dataset, "session.eval_loader")
            part = Subset(dataset, range(rank, num_rows, num_ranks))
            self._most = math.ceil(math.ceil(num_rows / num_ranks) / local_batch_size)
        elif whole:
            part = _EveryNth(dataset, rank, num_ranks)
        self._batches: Iterable[Any] = (
            _ColumnBatches(dataset, local_batch_size, dict(options))
            if comes_in_columns(dataset)
            else _data_loader(part, local_batch_size, options)
        )

    def __len__(self) -> int:
        """Batches of this rank; ranks may differ by one, also down to none.

        Raises:
            ConfigError: the rows are a stream, which nobody has counted. It is a TypeError too.
        """
        if self._streamed:
            raise UnknownLengthError(f"the batches of a stream ({type(self.dataset).__name__}) were counted by nobody")
        assert isinstance(self._batches, DataLoader)
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        in_step, missing = self._on_start() or self._in_step, self._most
        for batch in self._batches:
            yield to_device(batch, self._device())
            missing -= 1
        for _ in range(missing if in_step else 0):
            yield to_device(self._no_rows(), self._device())

    def _no_rows(self) -> Any:
        """Return a batch without rows: one is drawn and cut off, since none cannot be collated.

        Raises:
            DataError: it cannot be cut off, and would be evaluated twice.
        """
        (batch,) = DataLoader(Subset(self.dataset, [0]), batch_size=1, collate_fn=self._collate)
        if (kind := opaque_part(batch)) is not None:
            raise DataError(
                f"evaluating: a rank that has fewer batches than others needs one of no rows, and a {kind} cannot be "
                "cut to none; have collate_fn return tensors, in tuples, lists or mappings, and make it of them later"
            )
        # Not as for training, where a row that cannot be told from a constant goes along without a weight.
        return slice_rows(batch, 0, 0, num_rows=1)


def _data_loader(part: Any, local_batch_size: int, options: dict[str, Any]) -> DataLoader[Any]:
    if num_processes(options):
        options = {**options, "collate_fn": SendableCollate(options.get("collate_fn") or default_collate)}
    return DataLoader(part, batch_size=local_batch_size, **options)


class _EveryNth(IterableDataset[Any]):
    """Every n-th row of a stream."""

    def __init__(self, stream: Iterable[Any], first: int, step: int) -> None:
        self._stream = stream
        self._first = first
        self._step = step

    def __iter__(self) -> Iterator[Any]:
        return islice(self._stream, self._first, None, self._step)


class _ColumnBatches:
    """Batches of a shard that comes in columns."""

    def __init__(self, shard: Any, num_rows: int, options: dict[str, Any]) -> None:
        self._reader = ColumnReader(shard, options.pop("collate_fn", None), options)
        self._num_rows = num_rows
        self._passes = 0
        if options:
            raise ConfigError(
                f"session.eval_loader has no use for {', '.join(options)} with a {type(shard).__name__}; it takes "
                "collate_fn, prefetch_batches and the shard's own shuffling"
            )

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        for request in repeat(Request(self._passes, 0, self._num_rows)):
            fetched = self._reader.__getitems__([request])
            if fetched.failure is not None:
                error = DataError(f"evaluating: {fetched.failure.what}: {fetched.failure.error}")
                raise error from fetched.failure.cause
            if fetched.num_rows:
                yield fetched.batch
            if fetched.ended:
                return


def pool_sum(group: SideGroup, values: Summable) -> torch.Tensor:
    """Return the sum of ``values`` over ranks, on the CPU: integers as int64, everything else as float64.

    A rank that saw nothing may still hold the plain 0 that its sum began with; the others say what shape it has.

    Raises:
        ConfigError: the ranks' values have different shapes; on every rank.
    """
    # A Python number is in double precision; torch would make it single.
    tensor = torch.tensor(values, dtype=torch.float64) if isinstance(values, float) else torch.as_tensor(values)
    tensor = tensor.detach().cpu()
    form = _Form(tuple(tensor.shape), tensor.is_floating_point(), tensor.dim() == 0 and not tensor.item())
    # A loop may pool within a step: a tensor takes one exchange, an object two and its pickling.
    told = group.gather(torch.tensor(form.encoded(), dtype=torch.int64), "session.pool").tolist()
    forms = [_Form.decoded(each) for each in told]
    shapes = {each.shape for each in forms if not each.is_zero} or {form.shape}
    if len(shapes) > 1:
        named = ", ".join(f"rank {rank}: {list(each.shape)}" for rank, each in enumerate(forms))
        raise ConfigError(
            f"session.pool_sum was given values of different shapes ({named}), which have no sum; begin on every rank "
            "with zeros of one shape, such as torch.zeros(num_classes)"
        )
    exact = torch.float64 if any(each.is_float for each in forms) else torch.int64
    return group.sum(tensor.to(exact).expand(shapes.pop()), "session.pool")


class _Form(NamedTuple):
    """What ranks must know of each other's values before they add them up: bytes would be added in any case."""

    shape: tuple[int, ...]
    is_float: bool
    is_zero: bool

    def encoded(self) -> list[int]:
        """Return it as numbers, always as many."""
        sizes = [*self.shape, *[0] * (_MOST_DIMENSIONS - len(self.shape))]
        return [self.is_float, self.is_zero, len(self.shape), *sizes]

    @classmethod
    def decoded(cls, told: list[int]) -> _Form:
        """Return the form that was encoded so."""
        is_float, is_zero, dim, *sizes = told
        return cls(shape=tuple(sizes[:dim]), is_float=bool(is_float), is_zero=bool(is_zero))


def pool_ratio(group: SideGroup, numerator: Summable, denominator: Summable) -> float:
    """Return the ratio of two sums over ranks; NaN where the second one is 0."""
    pair = torch.tensor([float(numerator), float(denominator)], dtype=torch.float64)
    above, below = group.sum(pair, "session.pool").tolist()
    return above / below if below else float("nan")
