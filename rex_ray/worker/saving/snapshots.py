"""Copies of the state on the workers' own machines, between two saves: what a restart loses is seconds then.

Replicas are alike, so a few copies are enough: rank 0 keeps one, and the first rank on another node. That outlives the
death of any process and the loss of any one node. They lie in memory where there is room (``/dev/shm``), are written
on a thread, and are nobody's after the run.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rex_ray.core.errors import StorageError
from rex_ray.worker.measuring.timing import now_s
from rex_ray.worker.saving import archive
from rex_ray.worker.saving.manifest import MANIFEST, Manifest
from rex_ray.worker.saving.store import LocalStore, cause_of
from rex_ray.worker.tree import map_tensors, tensors_in

__all__ = ["SNAPSHOT_PREFIX", "SnapshotPlace", "Snapshots", "holders"]

SNAPSHOT_PREFIX: Final = "rex_ray-run-"
"""Of every folder of snapshots; the run's identity follows."""

_ROOM: Final = 8
_LARGEST_SHARE: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlace:
    """Where a run keeps its snapshots on this machine.

    Attributes:
        run: identity of the run; snapshots of another are never looked at.
        node: the machine's name, since several emulated nodes may share one.
        roots: folders to keep them in, the first one with room; each is searched when training resumes.
    """

    run: str
    node: str
    roots: tuple[Path, ...] = (Path("/dev/shm"), Path(tempfile.gettempdir()))

    def own_folders(self) -> Iterator[Path]:
        """Yield this node's folder below each root; it may not be there yet."""
        for root in self.roots:
            yield root / f"{SNAPSHOT_PREFIX}{self.run}" / re.sub(r"[^\w.-]", "_", self.node)

    def found(self) -> list[tuple[Manifest, LocalStore]]:
        """Return what snapshots of this run are on this machine, whole as far as their manifests tell."""
        result = []
        for root in self.roots:
            for folder in sorted((root / f"{SNAPSHOT_PREFIX}{self.run}").glob("*")):
                store = LocalStore(folder)
                for name in store.folders():
                    with contextlib.suppress(StorageError, OSError):
                        result.append((archive.read_manifest(store, name), store))
        return result

    def remove(self) -> None:
        """Remove every snapshot of this run from this machine."""
        for root in self.roots:
            shutil.rmtree(root / f"{SNAPSHOT_PREFIX}{self.run}", ignore_errors=True)


def holders(nodes: list[str]) -> tuple[int, ...]:
    """Return the ranks that keep snapshots: rank 0, and the first on another node.

    Args:
        nodes: every rank's node.
    """
    others = (rank for rank, node in enumerate(nodes) if node != nodes[0])
    return tuple(rank for rank in (0, next(others, None)) if rank is not None)


class Snapshots:
    """One rank's snapshots.

    Args:
        place: where to.
        keeps: whether this rank is one that keeps them.
        interval_s: shortest time between two.
        on_trouble: told what went wrong, once per kind; a snapshot that fails costs nothing but itself.
    """

    def __init__(
        self, place: SnapshotPlace, *, keeps: bool, interval_s: float, on_trouble: Callable[[str], None]
    ) -> None:
        self._place = place
        self._keeps = keeps
        self._interval_s = interval_s
        self._on_trouble = on_trouble
        self._told: set[str] = set()
        self._due_s = now_s() + interval_s
        self._writer: threading.Thread | None = None

    def due(self) -> bool:
        """Whether it is time for the next, by this rank's clock; rank 0 is asked."""
        return now_s() >= self._due_s and not self._is_writing()

    def keep_on_first(self, rank: int) -> None:
        """Keep them on rank 0 alone: of a sharded model no other has the whole."""
        self._keeps = self._keeps and rank == 0

    def postpone(self) -> None:
        """Something better was just made: begin to count anew."""
        self._due_s = now_s() + self._interval_s

    def take(self, collect: Callable[[], Mapping[str, Any]]) -> None:
        """Copy the state, and write the copy in the background; every rank must call this.

        Args:
            collect: returns the state; asks the other ranks on the way.
        """
        began_s = now_s()
        state = collect()
        if self._keeps and not self._is_writing():
            copied = map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), dict(state))
            self._writer = threading.Thread(target=self._write, args=(copied,), name="rex_ray-snapshot", daemon=True)
            self._writer.start()
        # What it cost stays a small share of the time, however large the model and short the interval.
        cost_s = now_s() - began_s
        self._due_s = now_s() + max(self._interval_s, cost_s / _LARGEST_SHARE)

    def close(self, limit_s: float, *, keep: bool) -> None:
        """Let the last one be written, within a limit.

        Args:
            limit_s: longest wait.
            keep: a restart may want them; else they are removed.
        """
        if self._writer is not None:
            self._writer.join(limit_s)
        if not keep:
            self._place.remove()

    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def _write(self, state: dict[str, Any]) -> None:
        num_bytes = sum(tensor.nbytes for tensor in tensors_in(state))
        try:
            store = self._store_for(num_bytes)
            if store is None:
                self._tell(f"no room for snapshots of {num_bytes / 2**20:.0f} MiB in {self._roots()}")
                return
            self._prune()
            name = f"snapshot_{state['position']['step']:010d}-{state['generation'][:8]}"
            archive.write(store, name, state)
        except Exception as error:  # noqa: BLE001 - on a thread of its own; training goes on whatever it is
            self._tell(f"a snapshot in {self._roots()} failed: {cause_of(error)}")

    def _store_for(self, num_bytes: int) -> LocalStore | None:
        for root, folder in zip(self._place.roots, self._place.own_folders(), strict=True):
            if root.is_dir() and shutil.disk_usage(root).free > _ROOM * num_bytes:
                return LocalStore(folder)
        return None

    def _prune(self) -> None:
        """Keep the newest whole snapshot only, so that there are two when the next is written."""
        found = [path for folder in self._place.own_folders() for path in folder.glob("*")]
        whole = [path for path in found if (path / MANIFEST).is_file()]
        newest = max(whole, key=lambda path: path.stat().st_mtime_ns, default=None)
        for path in found:
            if path != newest:
                shutil.rmtree(path, ignore_errors=True)

    def _roots(self) -> str:
        return " or ".join(str(root) for root in self._place.roots)

    def _tell(self, trouble: str) -> None:
        if trouble not in self._told:
            self._told.add(trouble)
            self._on_trouble(trouble)
