"""The local cluster: labelled, on the loopback only, and gone without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from rex_ray import ConfigError, LinkError, local_cluster
from rex_ray.train.local_cluster import LocalCluster, _in_time
from rex_ray.train.placement import live_nodes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

# Runs a cluster in a process of its own and tells what it saw. /proc/net/tcp*: state 0A is LISTEN.
SCRIPT = """
import os, pathlib, subprocess
from rex_ray import local_cluster

def processes():
    table = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    return {int(pid): (int(parent), args) for pid, parent, args in (line.split(None, 2) for line in table.splitlines())}

def ours(session):
    "Processes of the session, and those that they started."
    all_of_them = processes()
    mine = {pid for pid, (_, args) in all_of_them.items() if session in args}
    while more := {pid for pid, (parent, _) in all_of_them.items() if parent in mine} - mine:
        mine |= more
    return mine

def listening(pids):
    held = {os.readlink(fd) for pid in pids for fd in pathlib.Path(f"/proc/{pid}/fd").glob("*") if fd.is_symlink()}
    rows = [row.split() for kind in ("tcp", "tcp6") for row in open(f"/proc/net/{kind}").readlines()[1:]]
    return {row[1].rsplit(":", 1)[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held}

before = dict(os.environ)
with local_cluster({"T4": 1}) as cluster:
    session = os.environ["RAY_TMPDIR"]
    started = ours(session)
    assert len(started) >= 4
    # 127.0.0.1 as IPv4, and as IPv4 in IPv6, as the kernel writes them.
    assert listening(started) == {"0100007F", "0000000000000000FFFF00000100007F"}, listening(started)
assert dict(os.environ) == before
assert not pathlib.Path(session).exists()
assert not started & set(processes())
"""


def test_nodes_bear_their_kind_and_a_cpu_per_worker(cluster: LocalCluster) -> None:
    kinds = {node.labels[cluster.device_label]: node.resources["CPU"] for node in live_nodes() if len(node.labels) > 1}
    assert kinds == cluster.devices == {"T4": 1, "V100": 1}
    assert cluster.num_workers == 2
    assert cluster.address.startswith("127.0.0.1:")


def test_a_cluster_inside_a_cluster_is_refused(cluster: LocalCluster) -> None:
    with pytest.raises(ConfigError, match=r"already connected.*ray\.shutdown"), local_cluster({"T4": 1}):
        pass
    assert ray.is_initialized()


def test_a_cluster_listens_on_the_loopback_only_and_leaves_no_trace(cluster: LocalCluster) -> None:
    # Not within the surroundings of the cluster that the other tests share.
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "GLOO_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, env=surroundings, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr == ""


def test_devices_are_checked_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'T4' needs a whole number"), local_cluster({"T4": 0}):
        pass


def test_a_node_that_comes_too_late_is_an_error_with_a_remedy_and_other_errors_stay_what_they_are() -> None:
    with pytest.raises(LinkError, match=r"timed out during startup\. Try again when the machine has less"), _in_time():
        raise Exception("The current node timed out during startup.")  # noqa: TRY002 - what Ray raises
    with pytest.raises(LinkError), _in_time():
        raise TimeoutError("2 of 3 nodes are there")
    with pytest.raises(ValueError, match="object store"), _in_time():
        raise ValueError("the object store is too small")
