"""How the ranks of a launch find out that they mean the same run, and where its control server is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rex_ray.core.errors import ConfigError, RexError
from rex_ray.standalone.connection import Address
from rex_ray.standalone.handshake import PROTOCOL
from rex_ray.worker.group.presence import Presence
from rex_ray.worker.group.side_group import SideGroup

__all__ = ["Meeting", "agreed", "side_group"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the ranks of a run meet.

    Attributes:
        address: of the control server.
        token: the run's.
        run: its identity, by rank 0.
    """

    address: Address
    token: str
    run: str


@contextmanager
def side_group(limit_s: float) -> Iterator[SideGroup]:
    """Have a group of all ranks to agree on small things before a session opens.

    Raises:
        LinkError: some rank did not come within the limit; names it.
    """
    presence = Presence.of_process_group(limit_s)
    try:
        presence.meet(limit_s)
        group = SideGroup(limit_s, presence)
        yield group
        group.close()
    except BaseException as error:
        presence.leave(error)
        raise
    presence.leave()


def agreed(group: SideGroup, settings: Mapping[str, Any], open_on_first: Callable[[], Meeting]) -> Meeting:
    """Compare what the ranks were told, and learn from rank 0 where to meet.

    Args:
        group: all ranks.
        settings: of this rank.
        open_on_first: called on rank 0.

    Raises:
        ConfigError: a rank was told something else; on every rank.
        RexError: rank 0's, on every rank.
    """
    told: list[Mapping[str, Any]] = group.gather_objects(
        {"protocol": PROTOCOL, **settings}, "the ranks' configurations"
    )
    differing = _difference(told)
    if differing is not None:
        raise ConfigError(differing)
    meeting: Meeting | RexError | None = None
    if group.rank == 0:
        try:
            meeting = open_on_first()
        except RexError as error:
            meeting = error
    heard: Meeting | RexError = group.broadcast_object(meeting, "the control server's address")
    if isinstance(heard, RexError):
        raise heard
    return heard


def _difference(told: Sequence[Mapping[str, Any]]) -> str | None:
    """Say which rank was told what else than rank 0, None where all were told the same."""
    for rank, other in enumerate(told):
        for name in sorted({*told[0], *other}):
            first, here = told[0].get(name), other.get(name)
            if first != here:
                return (
                    f"rank {rank} has {name}={here!r} where rank 0 has {name}={first!r}: every rank must be started "
                    "with the same configuration"
                )
    return None
