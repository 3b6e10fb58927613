"""Tells the kinds of data sets apart, and makes the source that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from rex_ray.core.errors import ConfigError
from rex_ray.worker.data.column_reader import ColumnReader, comes_in_columns
from rex_ray.worker.data.counts import StepCounts
from rex_ray.worker.data.dataloader import batches_drawn_ahead, num_processes
from rex_ray.worker.data.map_style import MapSource, check_map_style, is_map_style
from rex_ray.worker.data.sampler import ElasticSampler, Position
from rex_ray.worker.data.schedule import Schedule
from rex_ray.worker.data.source import Source
from rex_ray.worker.data.stream import Streams, StreamSource
from rex_ray.worker.data.stream_end import WhenToEnd
from rex_ray.worker.data.stream_marks import StreamMark, read_marks, why_lost
from rex_ray.worker.data.stream_reader import StreamReader
from rex_ray.worker.group.joining import Member, StreamMember
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.user_warning import warn

__all__ = ["Offer", "SourceMaker", "is_stream", "offered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a rank's data set is, as the others must know it.

    Attributes:
        num_rows: of a map-style data set; None for a stream.
        ahead: batches that are drawn beyond the one in the loop's hand.
        stream: of a stream.
    """

    num_rows: int | None
    ahead: int
    stream: StreamMember | None


def offered(dataset: Any, end: WhenToEnd | None, options: dict[str, Any]) -> Offer:
    """Return what a data set given to ``session.loader`` is.

    Args:
        dataset: the user's.
        end: when an epoch of streams ends; None: the user did not say.
        options: the user's DataLoader options.

    Raises:
        ConfigError: it is no data set, or an empty one, or has no use for ``end``.
    """
    streamed = is_stream(dataset, "session.loader")
    if end is not None and (not streamed or end not in get_args(WhenToEnd)):
        raise ConfigError(
            f"end={end!r} was given with a {type(dataset).__name__}: it says when an epoch of streams ends, with "
            "'all' of them or with the 'shortest'; a map-style data set's ends with its last row"
        )
    ahead = batches_drawn_ahead(options)
    if not streamed:
        return Offer(num_rows=check_map_style(dataset, "session.loader"), ahead=ahead, stream=None)
    stream = StreamMember(end=end or "all", num_processes=num_processes(options), length=_own_length(dataset))
    # A stream is read one batch ahead of the one in the loop's hand.
    return Offer(num_rows=None, ahead=ahead + 1, stream=stream)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceMaker:
    """Makes one rank's source of training batches.

    Attributes:
        dataset: the user's.
        options: the user's DataLoader options.
        schedule: allocations by step.
        values: the ranks, to agree on values with.
        collective_timeout_s: limit of what ranks tell each other of their streams.
        by_tokens: ranks are weighted by tokens rather than rows.
        tell: has the journal told of what was dealt with: a kind, and a sentence.
    """

    dataset: Any
    options: dict[str, Any]
    schedule: Schedule
    values: SideGroup
    collective_timeout_s: float
    by_tokens: bool
    tell: Callable[[str, str], None]

    def map_source(self, num_rows: int, seed: int) -> Source:
        """Return the source of a data set that all ranks share."""
        rank = self.values.rank
        sampler = ElasticSampler(dataset_size=num_rows, rank=rank, seed=seed, schedule=self.schedule)
        return MapSource(self.dataset, sampler=sampler, rank=rank, by_tokens=self.by_tokens, options=self.options)

    def stream_source(
        self, members: Sequence[Member], position: Position, saved: Mapping[str, Any] | None
    ) -> tuple[Source, Position]:
        """Return the source of this rank's stream, and where training goes on. Collective.

        Args:
            members: what every rank told, in rank order.
            position: where a save was made, else the start.
            saved: what the save holds of the streams.

        Raises:
            ConfigError: options that the stream has no use for.
        """
        told = [member.stream for member in members if member.stream is not None]
        streams = Streams(
            rank=self.values.rank,
            lengths=tuple(stream.length for stream in told),
            end=told[0].end,
            schedule=self.schedule,
            counts=StepCounts(SideGroup(self.collective_timeout_s, self.values.presence)),
            gather=self.values.gather_objects,
            tell=self.tell,
        )
        if not position.cursor:
            return self._stream(streams, None), position
        marks = () if saved is None else read_marks(saved)
        repeatable = not comes_in_columns(self.dataset)
        lost = why_lost(marks, [stream.num_processes for stream in told], resumable=repeatable)
        if saved is not None and lost is None:
            return self._stream(streams, (tuple(saved["rows"]), marks[self.values.rank])), position
        warn(
            f"epoch {position.epoch} begins anew, since its streams cannot go on where the save was made: {lost}. "
            f"{position.cursor} rows of it are trained on a second time; only a map-style data set keeps every row to "
            "once per epoch then"
        )
        return self._stream(streams, None), Position(epoch=position.epoch, step=position.step)

    def _stream(self, streams: Streams, resumed: tuple[tuple[int, ...], StreamMark] | None) -> Source:
        options = dict(self.options)
        collate: Callable[[Any], Any] | None = options.pop("collate_fn", None)
        reader: ColumnReader | StreamReader
        if comes_in_columns(self.dataset):
            reader = ColumnReader(self.dataset, collate, options)
        else:
            reader = StreamReader(self.dataset, collate, {} if resumed is None else resumed[1].resumptions())
        return StreamSource(reader, streams, options, resumed)


def _own_length(dataset: Any) -> int | None:
    """Return the number of rows that a stream says it has, None where it says nothing."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
