"""What workers and the control server say to one another: a closed list of plain records, written as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias, get_args

from rex_ray.control.codec import Codec, CodecError
from rex_ray.core.types import Allocation, StepRecord, WorkerSpec
from rex_ray.hosting.wire import Batch
from rex_ray.standalone.frames import frame, parsed
from rex_ray.watch import seams
from rex_ray.watch.backlog import Mark, Shown
from rex_ray.worker import link
from rex_ray.worker.link import GroupInfo

__all__ = [
    "Answer",
    "AskNews",
    "AskRowLimits",
    "AskSights",
    "Join",
    "Lost",
    "Put",
    "Refusal",
    "Request",
    "answer_in",
    "framed",
    "request_in",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Put:
    """Here are records; the answer says that they were taken."""

    batch: Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A group has formed; what is its first allocation?"""

    group: GroupInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class AskNews:
    """What is newer than this? Answered within ``POLL_LIMIT_S``."""

    generation: str
    version: int
    save_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRowLimits:
    """How many rows are kinds of device given at most?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskSights:
    """What has happened since this mark, and where does the run stand?"""

    mark: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A rank of a group has failed."""

    generation: str
    rank: int
    reason: str


Request: TypeAlias = Put | Join | AskNews | AskRowLimits | AskSights | Lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was asked for."""

    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why there is no answer.

    Attributes:
        reason: in one line.
        infeasible: no allocation fits the group's bounds, which is the user's to hear.
    """

    reason: str
    infeasible: bool = False


# Step records travel as a batch's table.
_RECORDS: Final = [kind for kind in get_args(link.Record) if kind is not StepRecord]
_CODEC: Final = Codec(
    [
        *get_args(Request),
        Answer,
        Refusal,
        Allocation,
        Batch,
        GroupInfo,
        WorkerSpec,
        link.KindLimit,
        link.SaveRequest,
        *_RECORDS,
        Mark,
        Shown,
        seams.WorkerView,
        *get_args(seams.Sight),
    ]
)


def framed(message: Request | Answer | Refusal) -> bytes:
    """Return a message as a frame.

    Raises:
        FrameError: it is too large.
    """
    return frame(_CODEC.encode(message))


def request_in(data: bytes) -> Request:
    """Return the request in a frame's bytes. What a batch holds is for ``hosting.intake`` to judge.

    Raises:
        CodecError: there is none; says what is wrong.
    """
    message = _CODEC.decode(parsed(data))
    match message:
        case Put():
            return message
        case Join(group=GroupInfo() as group) if _is_sound(group):
            return message
        case AskNews(generation=str(), version=int(), save_number=int()):
            return message
        case AskRowLimits():
            return message
        case AskSights(mark=Mark(life=int(), num_sights=int())):
            return message
        case Lost(generation=str(), rank=int(), reason=str()):
            return message
    raise CodecError(f"a {type(message).__name__} is no request")


def answer_in(data: bytes) -> Answer | Refusal:
    """Return the answer in a frame's bytes.

    Raises:
        CodecError: there is none.
    """
    message = _CODEC.decode(parsed(data))
    if isinstance(message, Answer | Refusal):
        return message
    raise CodecError(f"a {type(message).__name__} is no answer")


def _is_sound(group: GroupInfo) -> bool:
    """Whether a group is one in kind; odd numbers in it are the controller's to refuse."""
    counts = (group.global_batch_size, group.step, group.local_batch_multiple)
    return (
        isinstance(group.generation, str)
        and all(_is_count(count) for count in counts)
        and (group.dataset_size is None or _is_count(group.dataset_size))
        and group.optimizer in ("sgd", "adam")
        and (group.allocation is None or isinstance(group.allocation, Allocation))
        and isinstance(group.workers, tuple)
        and all(_is_worker(worker, rank) for rank, worker in enumerate(group.workers))
    )


def _is_worker(worker: object, rank: int) -> bool:
    return (
        isinstance(worker, WorkerSpec)
        and worker.rank == rank
        and isinstance(worker.device, str)
        and isinstance(worker.node, str)
        and _is_count(worker.min_local_batch_size)
        and all(size is None or _is_count(size) for size in (worker.max_local_batch_size, worker.memory_bytes))
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53
