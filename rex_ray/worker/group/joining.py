"""How ranks find together and get their first allocation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from rex_ray.core.errors import ConfigError, LinkError, RexError
from rex_ray.core.types import Allocation, OptimizerFamily, WorkerSpec
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.group.switch import check_shares
from rex_ray.worker.link import ControlLink, GroupInfo, NullLink
from rex_ray.worker.options import WorkerOptions

__all__ = ["Member", "gather_members", "group_info", "join", "reference_batch"]

# While rank 0 asks the controller, the others wait in a collective; its limit must not pass first.
_SHARE_OF_LIMIT = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What each rank tells the others.

    Attributes:
        spec: who it is.
        dataset_size: rows of its training set; must be the same everywhere.
        ahead: batches that its loader draws ahead.
        optimizer: what its gradient is given to.
    """

    spec: WorkerSpec
    dataset_size: int
    ahead: int
    optimizer: OptimizerFamily = "sgd"


def reference_batch(options: WorkerOptions, dataset_size: int, num_ranks: int) -> int:
    """Return the reference batch for this data set, lowered to its rows where that was asked for.

    Raises:
        ConfigError: fewer rows per step than workers, or, unless clamping, than the data set has.
    """
    wanted = options.global_batch_size
    if wanted < num_ranks:
        raise ConfigError(
            f"global_batch_size={wanted} is below the {num_ranks} workers, and each should have a row: raise it or "
            "use fewer workers"
        )
    if wanted <= dataset_size:
        return wanted
    if options.small_dataset == "error":
        raise ConfigError(
            f"global_batch_size={wanted} is more than the training set's {dataset_size} rows: lower it, or set "
            "small_dataset='clamp' to have it lowered to the rows"
        )
    warnings.warn(
        f"global_batch_size={wanted} is lowered to the training set's {dataset_size} rows, shared by {num_ranks} "
        "workers",
        stacklevel=3,
    )
    return dataset_size


def gather_members(group: SideGroup, member: Member) -> Sequence[Member]:
    """Return what every rank tells, in rank order.

    Raises:
        ConfigError: ranks have training sets of different sizes.
    """
    members: list[Member] = group.gather_objects(member, "the group's members")
    sizes = [other.dataset_size for other in members]
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"the ranks' training sets have {sizes} rows: every rank must be given the whole data set, which "
            "session.loader divides"
        )
    return members


def group_info(
    generation: str, members: Sequence[Member], global_batch_size: int, step: int, resumed: Allocation | None
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
            warnings.warn(f"the controller did not answer, so training starts with equal shares: {error}", stacklevel=4)
            first = NullLink().join(info, 0.0)
        except RexError as refusal:
            first = refusal
    agreed: Allocation | RexError = group.broadcast_object(first, "the first allocation")
    if isinstance(agreed, RexError):
        raise agreed
    check_shares(agreed, group.size)
    return agreed
