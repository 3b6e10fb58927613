"""Tells the kinds of data sets apart, and makes the source that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rex_ray.core.errors import ConfigError
from rex_ray.worker.data.column_reader import ColumnReader, comes_in_columns
from rex_ray.worker.data.map_style import is_map_style
from rex_ray.worker.data.stream import Streams, StreamSource
from rex_ray.worker.data.stream_marks import StreamMark, read_marks, why_lost
from rex_ray.worker.data.stream_reader import StreamReader

__all__ = ["is_stream", "make_stream", "own_length", "resume_streams"]


def is_stream(dataset: object, call: str) -> bool:
    """Whether a data set is a stream, rather than map-style.

    Raises:
        ConfigError: it is neither, or a stream that can be read once only.
    """
    if is_map_style(dataset):
        return False
    name = type(dataset).__name__
    if hasattr(dataset, "__next__"):
        raise ConfigError(
            f"{call} was given a {name}, which can be read only once: give it an IterableDataset, whose __iter__ "
            "begins the stream anew for each epoch"
        )
    if not comes_in_columns(dataset) and not hasattr(dataset, "__iter__"):
        raise ConfigError(
            f"{call} was given a {name}, which is no data set: it needs __len__ and __getitem__ (map-style), or "
            "__iter__ (a stream), or to be a shard of Ray Data"
        )
    return True


def own_length(dataset: Any) -> int | None:
    """Return the number of rows that a stream says it has, None where it says nothing."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def resume_streams(
    saved: Mapping[str, Any], processes: Sequence[int], dataset: Any
) -> tuple[tuple[int, ...], tuple[StreamMark, ...]] | str:
    """Return every rank's rows and mark to go on from in the middle of an epoch, or why that cannot be.

    Args:
        saved: what ``StreamSource.save`` returned.
        processes: every rank's loader processes now.
        dataset: the user's.
    """
    marks = read_marks(saved)
    lost = why_lost(marks, processes, resumable=not comes_in_columns(dataset))
    return (tuple(saved["rows"]), marks) if lost is None else lost


def make_stream(
    dataset: Any,
    streams: Streams,
    options: dict[str, Any],
    resumed: tuple[tuple[int, ...], tuple[StreamMark, ...]] | None,
) -> StreamSource:
    """Return the source of a stream.

    Args:
        dataset: the user's.
        streams: what the ranks agreed on.
        options: the user's DataLoader options.
        resumed: every rank's rows and mark where the first pass goes on within an epoch.

    Raises:
        ConfigError: options that the stream has no use for.
    """
    options = dict(options)
    collate: Callable[[Any], Any] | None = options.pop("collate_fn", None)
    own = None if resumed is None else (resumed[0], resumed[1][streams.rank])
    reader: ColumnReader | StreamReader
    if comes_in_columns(dataset):
        reader = ColumnReader(dataset, collate, options)
    else:
        reader = StreamReader(dataset, collate, {} if own is None else own[1].resumptions())
    return StreamSource(reader, streams, options, own)
