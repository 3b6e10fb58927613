"""An emulated cluster of single-worker nodes, an elastic run on it in a thread of its own, and what may befall it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig

from experiments._recovery_loop import BATCH, NUM_ROWS, LoggedStep, counted_loop, logged_steps
from rex_ray import RexConfig, RexTrainer
from rex_ray.train.local_cluster import LocalCluster, local_cluster

__all__ = ["DEVICES", "Stage", "stage"]

DEVICES = ("T4", "V100")
"""What the cluster has at the start, one worker each."""

_STEPS_BEFORE = 30
_LOOK_S = 0.05
_LIMIT_S = 300.0
"""Of everything that is waited for: ten times what the slowest takes on two idle cores."""

_ENVIRONMENT = {
    # The loop is imported by the workers.
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    # Off by default on a machine where nobody gives notice; here somebody does.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
}


@contextmanager
def stage(folder: Path, *, max_failures: int) -> Iterator[Stage]:
    """Start a cluster and a run on it, and wait until it has trained for some steps; end both.

    Args:
        folder: for the run's storage and its log, empty.
        max_failures: what Ray Train is allowed; nodes that are drained do not count.
    """
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        with local_cluster(dict.fromkeys(DEVICES[:1], 1)) as cluster:
            nodes = {DEVICES[0]: _node_of(cluster), DEVICES[1]: cluster.add_node(DEVICES[1])}
            running = Stage(cluster, nodes, folder, max_failures)
            try:
                running.begin()
                yield running
            finally:
                running.end()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Stage:
    """A run under way. Everything here is called in the main thread, where Ray wants nodes to be added.

    Args:
        cluster: where it runs.
        nodes: Ray's handles of the nodes, by a name.
        folder: of the run.
        max_failures: see ``stage``.
    """

    def __init__(self, cluster: LocalCluster, nodes: dict[str, Any], folder: Path, max_failures: int) -> None:
        self.folder = folder
        self.trainer = RexTrainer(
            counted_loop,
            train_loop_config={"folder": str(folder)},
            # One batch for all the run: what is compared is which rows its steps saw.
            rex_config=RexConfig(global_batch_size=BATCH, max_global_batch_size=BATCH, checkpoint_interval_s=5.0),
            scaling_config=ScalingConfig(
                num_workers=(1, 3),
                label_selector={cluster.device_label: f"in({','.join(DEVICES)})"},
                elastic_resize_monitor_interval_s=1.0,
            ),
            run_config=RunConfig(
                name="run",
                storage_path=str(folder / "storage"),
                failure_config=FailureConfig(max_failures=max_failures),
            ),
            dataset_size=NUM_ROWS,
        )
        self._cluster = cluster
        self._nodes = nodes
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, name="fit", daemon=True)

    @property
    def steps(self) -> list[LoggedStep]:
        """The steps trained so far."""
        return logged_steps(self.folder)

    def begin(self) -> None:
        """Start to train."""
        self._thread.start()
        self.wait(lambda: len(self.steps) >= _STEPS_BEFORE, "the first steps")

    def finish(self) -> dict[str, float]:
        """Let the run come to its end, at the end of an epoch; return its last metrics."""
        (self.folder / "stop").touch()
        self.wait(lambda: not self._thread.is_alive(), "the end of the run")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return dict(self._result.metrics or {})

    def end(self) -> None:
        """Have no run any more, whatever came in between."""
        (self.folder / "stop").touch()
        self._thread.join(30.0)

    def settle(self, num_workers: int, *, beyond: int) -> None:
        """Wait until a new group of so many workers has trained for some steps.

        Args:
            num_workers: its size.
            beyond: steps that were logged before, by the group whose place it takes.
        """
        old = self.steps[beyond - 1].generation

        def has_settled() -> bool:
            steps = self.steps
            newest = steps[-1]
            if newest.generation == old or newest.num_workers != num_workers:
                return False
            return sum(step.generation == newest.generation for step in steps) >= _STEPS_BEFORE

        self.wait(has_settled, f"{_STEPS_BEFORE} steps of a group of {num_workers}")

    def wait(self, what: Callable[[], object], name: str) -> None:
        """Wait until something is so.

        Raises:
            TimeoutError: it was not within the limit, or the run ended before.
        """
        deadline = time.monotonic() + _LIMIT_S
        while not what():
            if not self._thread.is_alive() and not what():
                raise TimeoutError(f"the run ended while {name} was waited for") from self._error
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name}: not within {_LIMIT_S:.0f} s")
            time.sleep(_LOOK_S)

    # --- what may befall it; each returns when it happened, in s since 1970

    def kill_worker(self) -> float:
        """Have rank 1 be killed in the midst of its next backward pass."""
        (self.folder / "kill").touch()
        self.wait((self.folder / "killed").exists, "the worker's end")
        return (self.folder / "killed").stat().st_ctime

    def add_node(self, name: str, device: str) -> float:
        """Add a node."""
        self._nodes[name] = self._cluster.add_node(device)
        return time.time()

    def remove_node(self, name: str) -> float:
        """Take a node away without notice: its processes are killed."""
        at_s = time.time()
        self._cluster.nodes.remove_node(self._nodes.pop(name), allow_graceful=False)
        return at_s

    def drain_node(self, name: str, notice_s: float) -> float:
        """Give notice that a node will be taken away, and take it away when its time has come."""
        node = self._nodes[name]
        deadline_s = time.time() + notice_s
        is_taken, why_not = GcsClient(address=self._cluster.address).drain_node(
            node.node_id,
            autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
            "spot instance reclaimed",
            int(deadline_s * 1e3),
        )
        assert is_taken, why_not
        while time.time() < deadline_s:
            time.sleep(_LOOK_S)
        return self.remove_node(name)

    def _fit(self) -> None:
        try:
            self._result = self.trainer.fit()
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._error = error


def _node_of(cluster: LocalCluster) -> Any:
    (node,) = cluster.nodes.worker_nodes
    return node
