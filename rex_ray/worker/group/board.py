"""Where ranks leave word for one another: the key-value store that a process group has anyway."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed

from rex_ray.core.errors import LinkError

__all__ = ["Board", "group_store", "open_board"]

# Sessions of one process group follow one another, and each must not read the last one's words.
_sessions = itertools.count()


class Board:
    """One text per rank.

    Args:
        store: used by one thread at a time.
        prefix: of every key.
        on_rank_0: the store lives in rank 0's process and dies with it.
    """

    def __init__(self, store: Any, prefix: str, *, on_rank_0: bool) -> None:
        self._store = store
        self._prefix = prefix
        self.on_rank_0 = on_rank_0

    def write(self, rank: int, text: str) -> None:
        """Replace what a rank said.

        Raises:
            RuntimeError: the store is gone.
        """
        self._store.set(self._key(rank), text)

    def read(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """Return what those ranks said that said something.

        Raises:
            RuntimeError: the store is gone.
        """
        found: dict[int, bytes] = {}
        for rank in ranks:
            if self._store.check([self._key(rank)]):
                found[rank] = self._store.get(self._key(rank))
        return found

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def open_board(limit_s: float) -> Board | None:
    """Return the board of the next session of this process; every rank opens its sessions in the same order.

    Args:
        limit_s: of reaching the store.

    Returns:
        None where this version of torch shows no store: waits are then told without the others' words.

    Raises:
        LinkError: rank 0's store cannot be reached.
    """
    c10d: Any = torch.distributed  # its stores have no types
    # torchrun may start the ranks again with the store that the last ones had, words and all.
    prefix = f"rex_ray/presence/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_sessions)}"
    try:
        store: Any = group_store()
        inner = store
        while isinstance(inner, c10d.PrefixStore):
            inner = inner.underlying_store
    except AttributeError:
        return None
    on_rank_0 = isinstance(inner, c10d.TCPStore)
    if on_rank_0:
        store = c10d.PrefixStore("rex_ray", _connected(inner, limit_s))
    return Board(store, prefix, on_rank_0=on_rank_0)


def group_store() -> Any:
    """Return the process group's store.

    Raises:
        AttributeError: this version of torch shows none.
    """
    c10d: Any = torch.distributed
    try:
        return c10d.group.WORLD.get_group_store()
    except AttributeError:  # torch 2.6 has it, but does not show it publicly
        return c10d.distributed_c10d._get_default_store()


def _connected(known: Any, limit_s: float) -> Any:
    """Return a connection of one's own: a thread that blocks in a shared one keeps everybody else from it."""
    try:
        return type(known)(
            known.host,
            known.port,
            is_master=False,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise LinkError(
            f"rank {torch.distributed.get_rank()} could not reach rank 0's store at {known.host}:{known.port} within "
            f"{limit_s:g} s: rank 0 has died, or its machine cannot be reached"
        ) from error
