"""How ranks find together and get their first allocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rex_ray.core.errors import ConfigError, LinkError, RexError
from rex_ray.core.types import Allocation, OptimizerFamily, WorkerSpec
from rex_ray.worker.group.protocol import check_shares
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.link import ControlLink, GroupInfo, NullLink
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.user_warning import warn

__all__ = ["Member", "StreamMember", "gather_members", "group_info", "join", "reference_batch"]

# While rank 0 asks the controller, the others wait in a collective; its limit must not pass first.
_SHARE_OF_LIMIT = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMember:
    """What each rank tells the others of its stream.

    Attributes:
        end: an epoch ends with all streams or with the shortest; must be the same everywhere.
        num_processes: loader processes that read it.
        length: rows by its own account, None where it gives none.
    """

    end: Literal["all", "shortest"]
    num_processes: int
    length: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What each rank tells the others.

    Attributes:
        spec: who it is.
        dataset_size: rows of its training set; must be the same everywhere; None for a stream.
        ahead: batches that its loader draws ahead.
        optimizer: what its gradient is given to.
        stream: of a stream.
    """

    spec: WorkerSpec
    dataset_size: int | None
    ahead: int
    optimizer: OptimizerFamily = "sgd"
    stream: StreamMember | None = None


def reference_batch(options: WorkerOptions, dataset_size: int | None, num_ranks: int) -> int:
    """Return the reference batch for this data set, lowered to its rows where that was asked for.

    Of a stream (None) nobody knows the rows, and none are refused.

    Raises:
        ConfigError: fewer rows per step than workers, or, unless clamping, than the data set has; or fewer rows in
            the data set than shares are multiples of.
    """
    wanted = options.global_batch_size
    if wanted < num_ranks:
        raise ConfigError(
            f"global_batch_size={wanted} is below the {num_ranks} workers, and each should have a row: raise it or "
            "use fewer workers"
        )
    if dataset_size is None or wanted <= dataset_size:
        return wanted
    if options.small_dataset == "error":
        raise ConfigError(
            f"global_batch_size={wanted} is more than the training set's {dataset_size} rows: lower it, or set "
            "small_dataset='clamp' to have it lowered to the rows"
        )
    multiple = options.local_batch_multiple
    lowered = dataset_size // multiple * multiple
    if not lowered:
        raise ConfigError(
            f"the training set's {dataset_size} rows make no share of local_batch_multiple={multiple}: lower it to at "
            f"most {dataset_size}"
        )
    of_them = "" if lowered == dataset_size else f" {lowered} of"
    warn(
        f"global_batch_size={wanted} is lowered to{of_them} the training set's {dataset_size} rows, shared by "
        f"{num_ranks} workers"
    )
    return lowered


def gather_members(group: SideGroup, member: Member) -> Sequence[Member]:
    """Return what every rank tells, in rank order.

    Raises:
        ConfigError: ranks have training sets of different sizes or kinds, or end their streams differently.
    """
    members: list[Member] = group.gather_objects(member, "the group's members")
    sizes = [other.dataset_size for other in members]
    if None in sizes and len(set(sizes)) > 1:
        kinds = ", ".join("a stream" if size is None else f"{size} rows" for size in sizes)
        raise ConfigError(f"the ranks' training sets are of two kinds ({kinds}): all bring a stream, or none does")
    ends = [other.stream.end for other in members if other.stream is not None]
    if len(set(ends)) > 1:
        raise ConfigError(f"the ranks ask for {ends} as the end of their streams: give all the same end=")
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"the ranks' training sets have {sizes} rows: every rank must be given the whole data set, which "
            "session.loader divides"
        )
    return members


def group_info(
    generation: str,
    members: Sequence[Member],
    global_batch_size: int,
    step: int,
    resumed: Allocation | None,
    local_batch_multiple: int = 1,
) -> GroupInfo:
    """Return what the controller is told about the group."""
    return GroupInfo(
        generation=generation,
        workers=tuple(member.spec for member in members),
        dataset_size=members[0].dataset_size,
        global_batch_size=global_batch_size,
        step=step,
        allocation=resumed,
        optimizer=members[0].optimizer,
        local_batch_multiple=local_batch_multiple,
    )


def join(group: SideGroup, link: ControlLink, info: GroupInfo, options: WorkerOptions) -> Allocation:
    """Announce the group through rank 0 and return the first allocation, the same on every rank.

    A controller that does not answer costs no training: shares are equal then, with a warning. One that refuses the
    group is heard by every rank, so that none is left waiting for a rank 0 that has already failed.

    Raises:
        RexError: the controller refused the group, or answered with shares for another one.
        LinkError: rank 0 did not answer the others.
    """
    first: Allocation | RexError | None = None
    if group.rank == 0:
        limit_s = min(options.join_timeout_s, _SHARE_OF_LIMIT * options.collective_timeout_s)
        try:
            first = link.join(info, limit_s)
        except LinkError as error:
            warn(f"the controller did not answer, so training starts with equal shares: {error}")
            first = NullLink().join(info, 0.0)
        except RexError as refusal:
            first = refusal
    agreed: Allocation | RexError = group.broadcast_object(first, "the first allocation")
    if isinstance(agreed, RexError):
        raise agreed
    check_shares(agreed, group.size)
    return agreed
