"""Nothing of a run's local snapshots is left behind, on whichever machine they were taken."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import ray
from ray.exceptions import RayError

from rex_ray.train.telemetry import first_line
from rex_ray.worker.saving.snapshots import SNAPSHOT_PREFIX, SnapshotPlace

__all__ = ["remove_stale_snapshots", "snapshots_removed"]

logger = logging.getLogger("rex_ray")

# A run that goes on writes there every few seconds or minutes.
_STALE_S: Final = 86_400.0
_REMOVE_LIMIT_S: Final = 10.0


@contextlib.contextmanager
def snapshots_removed(run: str) -> Iterator[None]:
    """Remove the run's snapshots from every machine of the cluster when the block ends, within a limit.

    Workers that end well remove their own; this is for those that were killed, and for machines that the run has left.

    Args:
        run: identity of the run.
    """
    try:
        yield
    finally:
        _remove(run)
        with contextlib.suppress(RayError, ValueError):
            _remove_elsewhere(run)


def remove_stale_snapshots(roots: Sequence[Path] = SnapshotPlace(run="", node="").roots) -> None:
    """Remove what runs left on this machine whose driver was killed, a day after they last wrote.

    Args:
        roots: folders in which snapshots are kept.
    """
    for root in roots:
        for folder in root.glob(f"{SNAPSHOT_PREFIX}*"):
            with contextlib.suppress(OSError):
                newest_s = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
                if time.time() - newest_s > _STALE_S:
                    shutil.rmtree(folder)


def _remove(run: str) -> None:
    SnapshotPlace(run=run, node="").remove()


def _remove_elsewhere(run: str) -> None:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    here = ray.get_runtime_context().get_node_id()
    own = next((node["NodeManagerAddress"] for node in nodes if node["NodeID"] == here), None)
    on_others = {node["NodeManagerAddress"]: node["NodeID"] for node in nodes if node["NodeManagerAddress"] != own}
    if not on_others:
        return
    remove = ray.remote(_remove)
    tasks = [
        remove.options(num_cpus=0, label_selector={"ray.io/node-id": node_id}).remote(run)
        for node_id in on_others.values()
    ]
    done, late = ray.wait(tasks, num_returns=len(tasks), timeout=_REMOVE_LIMIT_S)
    for task in late:
        ray.cancel(task)
    if late:
        logger.warning("%d machines did not say whether they removed the run's snapshots", len(late))
    for task in done:
        try:
            ray.get(task)
        except RayError as error:
            logger.warning("a machine could not remove the run's snapshots: %s", first_line(error))
