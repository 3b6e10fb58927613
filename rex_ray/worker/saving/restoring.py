"""Which state a group goes on from, and how every rank comes to hold that same one.

Rank 0 finds the newest whole save; the ranks tell what snapshots they hold; the newest of all wins, and whoever holds
it sends it to the others. So no rank reads a state of its own choice, and only one needs to reach the storage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from rex_ray.core.errors import StorageError
from rex_ray.worker.data.sampler import Position
from rex_ray.worker.group.errand import done_by
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.saving import archive
from rex_ray.worker.saving.archive import Saved
from rex_ray.worker.saving.patience import StallWatch
from rex_ray.worker.saving.reporter import Reporter
from rex_ray.worker.saving.snapshots import SnapshotPlace
from rex_ray.worker.saving.store import LocalStore, cause_of

__all__ = ["Restored", "newest_state"]

_CHUNK_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What training resumes from.

    Attributes:
        state: alike on all ranks.
        where: it came from, in words that follow "from".
        troubles: newer states that were passed over, and why.
    """

    state: dict[str, Any]
    where: str
    troubles: tuple[str, ...]

    def in_words(self, position: Position, num_workers: int) -> str:
        """Say where training goes on, by how many."""
        at = f"epoch {position.epoch}, sample {position.cursor}, step {position.step}"
        return f"resumed at {at} with {num_workers} workers, from {self.where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What all ranks know of a state that one of them holds."""

    step: int
    num_bytes: int
    where: str
    troubles: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A state that ``rank`` holds; nobody else has its data yet."""

    facts: _Facts
    rank: int
    data: bytearray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A snapshot that a rank holds."""

    step: int
    rank: int
    name: str
    store: LocalStore


def newest_state(group: SideGroup, reporter: Reporter, place: SnapshotPlace | None, retry_s: float) -> Restored | None:
    """Return the newest whole state of the run, the same on every rank, or None at a fresh start.

    Args:
        group: every rank of it must call this.
        reporter: finds saves, on rank 0.
        place: where this run's snapshots are; None: it has none.
        retry_s: how long the storage may be asked again where it fails.

    Raises:
        StorageError: there are saves, and neither one of them nor a snapshot is whole, or the storage does not answer;
            on every rank.
        ConfigError: the storage cannot be used, or holds something else; on every rank.
    """
    held: _Held | None = None
    none_whole: StorageError | None = None
    try:
        held = _held_by(group, 0, lambda watch: reporter.restore(watch.moved), "rank 0's look for a save", retry_s)
    except StorageError as error:
        none_whole = error
    troubles = () if held is None else held.facts.troubles
    newer = (
        None if place is None else _newest_snapshot(group, place, newer_than=-1 if held is None else held.facts.step)
    )
    if newer is not None:
        held, troubles = newer, (*troubles, *newer.facts.troubles, *((str(none_whole),) if none_whole else ()))
    elif none_whole is not None:
        raise none_whole
    if held is None:
        what, watch = "rank 0's look at the storage", StallWatch(retry_s)
        done_by(group, 0, reporter.check, what, give_up=lambda: _raise_if_stalled(watch, what))
        return None
    state = archive.state_of(_sent(group, held))
    return Restored(state=state, where=held.facts.where, troubles=troubles)


def _held_by(
    group: SideGroup, rank: int, find: Callable[[StallWatch], Saved | None], what: str, retry_s: float = 0.0
) -> _Held | None:
    """Have one rank find a state; return what all should know of it, and on that rank its data."""
    kept: list[bytearray] = []
    watch = StallWatch(retry_s)

    def act() -> _Facts | None:
        saved = find(watch)
        if saved is None:
            return None
        kept.append(saved.data)
        return _Facts(step=saved.step, num_bytes=len(saved.data), where=saved.where, troubles=saved.troubles)

    facts = done_by(group, rank, act, what, give_up=lambda: _raise_if_stalled(watch, what))
    return None if facts is None else _Held(facts=facts, rank=rank, data=kept[0] if kept else None)


def _raise_if_stalled(watch: StallWatch, what: str) -> None:
    stalled_s = watch.stalled_s()
    if stalled_s is not None:
        raise StorageError(
            f"{what} was given up, since the storage gave nothing for {stalled_s:.0f} s; see whether it can be reached "
            "from that machine, then start again"
        )


def _newest_snapshot(group: SideGroup, place: SnapshotPlace, *, newer_than: int) -> _Held | None:
    """Return the newest whole snapshot beyond a step that any rank holds."""
    own = [
        _Candidate(step=manifest.step, rank=group.rank, name=manifest.name, store=store)
        for manifest, store in place.found()
    ]
    candidates = [candidate for each in group.gather_objects(own, "the ranks' snapshots") for candidate in each]
    troubles: tuple[str, ...] = ()
    for candidate in sorted(candidates, key=lambda candidate: (-candidate.step, candidate.rank, candidate.name)):
        if candidate.step <= newer_than:
            break
        held = _held_by(group, candidate.rank, _reader(candidate), f"a snapshot of rank {candidate.rank}")
        assert held is not None, "a reader finds something or says what is wrong"
        troubles += held.facts.troubles
        if held.facts.num_bytes:
            return replace(held, facts=replace(held.facts, troubles=troubles))
    return None


def _reader(candidate: _Candidate) -> Callable[[StallWatch], Saved]:
    """Return what reads a snapshot; one that is not whole is told of, not raised: there may be another."""

    def read(watch: StallWatch) -> Saved:
        path = candidate.store.path_of(candidate.name)
        try:
            saved = archive.read(candidate.store, candidate.name, watch.moved)
        except (StorageError, OSError) as error:
            return Saved(data=bytearray(), step=-1, where=path, troubles=(f"{path}: {cause_of(error)}",))
        return replace(saved, where=f"a snapshot of rank {candidate.rank}, {path}")

    return read


def _sent(group: SideGroup, held: _Held) -> bytearray:
    """Return the data of one rank on every rank; in pieces, each within a collective's limit."""
    if group.size == 1:
        assert held.data is not None
        return held.data
    buffer = bytearray(held.facts.num_bytes) if held.data is None else held.data
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    for start in range(0, len(buffer), _CHUNK_BYTES):
        group.broadcast(whole[start : start + _CHUNK_BYTES], "the state to resume from", source=held.rank)
    return buffer
