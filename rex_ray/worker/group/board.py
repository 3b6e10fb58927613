"""Where ranks leave word for one another: the key-value store that a process group has anyway."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed

__all__ = ["Board", "open_board"]

_CONNECT_LIMIT_S = 10.0
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


def open_board() -> Board | None:
    """Return the board of the next session of this process; every rank opens its sessions in the same order.

    Returns:
        None where the process group has no store that can be had: waits are then told without the others' words.
    """
    c10d: Any = torch.distributed  # its stores have no types
    prefix = f"rex_ray/presence/{next(_sessions)}"
    try:
        store: Any = c10d.group.WORLD.get_group_store()
        inner = store
        while isinstance(inner, c10d.PrefixStore):
            inner = inner.underlying_store
        on_rank_0 = isinstance(inner, c10d.TCPStore)
        # A connection of its own: a thread that blocks in a shared one keeps everybody else from it.
        if on_rank_0:
            own = c10d.TCPStore(
                inner.host,
                inner.port,
                is_master=False,
                timeout=timedelta(seconds=_CONNECT_LIMIT_S),
                wait_for_workers=False,
            )
            store = c10d.PrefixStore("rex_ray", own)
    except (AttributeError, RuntimeError, ValueError):
        return None
    return Board(store, prefix, on_rank_0=on_rank_0)
