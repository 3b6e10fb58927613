"""What a run should not leave behind on this machine's cluster: actors, placement groups, processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import ray
from ray.util import placement_group_table

__all__ = ["leftovers", "search_helpers", "wait_for_no_leftovers"]

_RAYS_SINGLETONS = {"AutoscalingCoordinator", "datasets_stats_actor"}
"""Ray's own, one per cluster and for ever."""

_PROCESSES = ("ray::RayTrainWorker", "ray::TrainController", "ray::ControlActor", "ray::_QueueActor")


def leftovers() -> list[str]:
    """Return actors, placement groups and workers' processes that are still there."""
    actors = ray._private.state.actors().values()
    alive = [a["ActorClassName"] for a in actors if a["State"] != "DEAD" and a["Name"] not in _RAYS_SINGLETONS]
    groups = [str(g["placement_group_id"]) for g in placement_group_table().values() if g["state"] != "REMOVED"]
    return alive + groups + _train_processes() + search_helpers()


def wait_for_no_leftovers(limit_s: float) -> list[str]:
    """Wait until nothing is left, at most for so long; return what still is."""
    deadline = time.monotonic() + limit_s
    while (left := leftovers()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def search_helpers() -> list[str]:
    """Return search helpers of this cluster's control actors, whose environment they inherit."""
    mark = f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"rex_ray.search.helper_main" in words and mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(f"search helper {process.name}")
    return found


def _train_processes() -> list[str]:
    """Return processes of a training run on this cluster; other clusters may share the machine."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in table.splitlines()]
    raylets = {pid for pid, _, args in rows if os.environ["RAY_TMPDIR"] in args}
    return [args for _, parent, args in rows if parent in raylets and args.startswith(_PROCESSES)]
