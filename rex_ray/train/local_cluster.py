"""A mixed cluster on one machine: real Ray nodes, one per kind of device, labelled as real ones are.

Nothing here makes a worker slow; that is ``rex_ray.worker.emulation``'s affair. The nodes are real processes that
listen on the loopback only, in a session directory of their own, and leave nothing behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray.cluster_utils import Cluster

from rex_ray.core.errors import ConfigError, LinkError
from rex_ray.train.placement import label_selectors
from rex_ray.train.telemetry import first_line

__all__ = ["LocalCluster", "local_cluster", "quiet_surroundings"]

QUIET_ENVIRONMENT: Mapping[str, str] = {
    # Ray rewrites 127.0.0.1 into the machine's public address, and then listens on every interface, unless it believes
    # that it is on a platform without clusters. Of the platform nothing else depends on this switch.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # gloo picks an interface by the host's name otherwise.
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Level of Ray's own Python loggers in its helpers. Without a dashboard, Train's placement-group cleaner warns every
    # second that it cannot query it ("Failed to query Ray Train Controller actor state"), and is right to go on. The
    # loggers of Train's workers and controller are set by RunConfig(logging_config=...), whatever stands here.
    "RAY_LOGGER_LEVEL": "error",
    # Nobody gives a process of this machine notice; and Ray logs an error about how the watcher's actor is made.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Ray's measure of "too many processes at once" is a node's CPUs; actors that need none are many here.
    "RAY_worker_maximum_startup_concurrency": "32",
    # Prometheus metrics of Train: nobody scrapes them here.
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # A worker without a GPU keeps CUDA_VISIBLE_DEVICES as it is; this is Ray's future default, it warns until then.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # How often Train looks after its workers: reports wait for it, and so does the end of a run.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # Many workers share few cores; torch's threads would only fight one another.
    "OMP_NUM_THREADS": "1",
}
"""Set while the cluster lives, where the caller has not set it: Ray's processes inherit it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """A running local cluster.

    Attributes:
        devices: workers per kind of device.
        device_label: node label that bears the kind.
        address: where the cluster listens.
        nodes: Ray's handle of the nodes; remove some with ``nodes.remove_node``.
        object_store_bytes: size of each node's object store.
    """

    devices: Mapping[str, int]
    device_label: str
    address: str
    nodes: Cluster
    object_store_bytes: int = 80 * 2**20

    @property
    def num_workers(self) -> int:
        """Workers that the cluster has a CPU for."""
        return sum(self.devices.values())

    def add_node(self, device: str, num_workers: int = 1) -> Any:
        """Add a node of one kind of device with room for so many workers; return Ray's handle. Main thread only."""
        labels = {self.device_label: device}
        with _in_time():
            return self.nodes.add_node(num_cpus=num_workers, labels=labels, **_common(self.object_store_bytes))

    @property
    def label_selectors(self) -> list[dict[str, str]]:
        """One selector per worker, for ``ScalingConfig(label_selector=...)``."""
        return label_selectors(self.devices, self.device_label)


@contextlib.contextmanager
def local_cluster(
    devices: Mapping[str, int],
    *,
    device_label: str = "ray.io/accelerator-type",
    log_to_driver: bool = False,
    head_cpus: int = 0,
    object_store_bytes: int = 80 * 2**20,
) -> Iterator[LocalCluster]:
    """Start a labelled cluster on this machine, connect to it, and take it down whole.

    Args:
        devices: workers per kind of device, such as ``{"T4": 2, "V100": 2}``: one node with as many CPUs for each.
        device_label: node label that bears the kind.
        log_to_driver: print what the workers print; their logs stand in the session directory anyway, while it lives.
        head_cpus: CPUs of the head node, which has no label and needs none for training (Tune's trials do).
        object_store_bytes: size of each node's object store.

    Yields:
        The cluster; ``ray`` is connected to it.

    Raises:
        ConfigError: no devices, a count below 1, or this process is already connected to a cluster.
        LinkError: a node did not start within Ray's own limit.
    """
    selectors = label_selectors(devices, device_label)  # validates the counts before anything starts
    if ray.is_initialized():
        raise ConfigError(
            "this process is already connected to a Ray cluster; call ray.shutdown() before local_cluster()"
        )
    del selectors
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_surroundings())
        cluster = stack.enter_context(_nodes(devices, device_label, head_cpus, object_store_bytes))
        ray.init(
            address=cluster.address,
            namespace="rex_ray",
            log_to_driver=log_to_driver,
            logging_level=logging.ERROR,
        )
        stack.callback(ray.shutdown)
        yield LocalCluster(
            devices=dict(devices),
            device_label=device_label,
            address=cluster.address,
            nodes=cluster,
            object_store_bytes=object_store_bytes,
        )


def _common(object_store_bytes: int) -> dict[str, Any]:
    """Return what every node is started with."""
    return {"node_ip_address": "127.0.0.1", "object_store_memory": object_store_bytes}


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    """Have a node that does not come up be an error of ours: Ray raises a bare ``Exception``.

    It is not tried again: what was late may come up beside its successor, and be a node too many.

    Raises:
        LinkError: a node did not start within Ray's own limit.
    """
    try:
        yield
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, TimeoutError):
            raise
        raise LinkError(
            f"a node of the cluster on this machine did not start. Ray, which gives each some 30 s, says: "
            f"{first_line(error)} Try again when the machine has less to do"
        ) from error


@contextlib.contextmanager
def _nodes(devices: Mapping[str, int], device_label: str, head_cpus: int, object_store_bytes: int) -> Iterator[Cluster]:
    common = _common(object_store_bytes)
    cluster = Cluster(shutdown_at_exit=True)
    try:
        with _in_time():
            cluster.add_node(
                num_cpus=head_cpus, include_dashboard=False, no_monitor=True, dashboard_agent_listen_port=0, **common
            )
            for device, count in devices.items():
                cluster.add_node(num_cpus=count, labels={device_label: device}, wait=False, **common)
            cluster.wait_for_nodes(timeout=60)
        yield cluster
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def quiet_surroundings() -> Iterator[None]:
    """Environment, logger level and session directory of a cluster that leaves no trace."""
    # Sockets lie below it, and a socket's path has at most 107 characters: not below a long TMPDIR, then.
    session = Path(tempfile.mkdtemp(prefix="rex-", dir="/tmp"))
    added = {name: value for name, value in QUIET_ENVIRONMENT.items() if name not in os.environ}
    before = os.environ.get("RAY_TMPDIR")
    # Also keeps "the current cluster" of other processes of this machine apart from ours.
    os.environ["RAY_TMPDIR"] = str(session)
    os.environ.update(added)
    # Ray read the switch when it was imported; the environment reaches its child processes only.
    has_clusters, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    logger = logging.getLogger("ray")
    level = logger.level
    try:
        yield
    finally:
        logger.setLevel(level)
        ray_constants.ENABLE_RAY_CLUSTER = has_clusters
        for name in added:
            os.environ.pop(name, None)
        if before is None:
            os.environ.pop("RAY_TMPDIR", None)
        else:
            os.environ["RAY_TMPDIR"] = before
        shutil.rmtree(session, ignore_errors=True)
