"""A look at a cluster before anything trains on it: a probe per kind of node, and a reduction among them.

The same reports and the same judgement as a session's own look at its start (``rex_ray.worker.preflight``); here they
come from actors that are placed for the purpose, on nodes that may be busy, missing a package, or unreachable.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import GetTimeoutError, RayError

from rex_ray.core.errors import ConfigError, LinkError
from rex_ray.train.examination import Examination, NodeFacts, Probe, chosen_nodes, findings_of
from rex_ray.train.reaching import connect
from rex_ray.train.telemetry import first_line
from rex_ray.worker.group.presence import Presence
from rex_ray.worker.preflight.facts import WorkerFacts, collect
from rex_ray.worker.preflight.look import timed_all_reduce

__all__ = ["connected", "examine"]

_GRACE_S = 5.0


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Be connected to a running cluster; one that this process is connected to already is used as it is.

    Args:
        address: as ``ray.init`` takes it; default: the cluster that this machine is part of; ``"local"`` starts one.

    Raises:
        ConfigError: there is none.
    """
    if ray.is_initialized():
        yield
        return
    try:
        connect(address or "auto", log_to_driver=False, logging_level="error")
    except ConfigError as error:
        raise ConfigError(f"{error}; or look at this machine alone with --address local") from error
    try:
        yield
    finally:
        ray.shutdown()


def examine(device_label: str, timeout_s: float) -> Examination:
    """Place a probe per kind of node, have them report and reduce a vector, and judge.

    Args:
        device_label: node label that names a kind of device.
        timeout_s: of placing and reporting, and again of the reduction.
    """
    nodes = tuple(_node(entry, device_label) for entry in ray.nodes() if entry["Alive"])
    with contextlib.ExitStack() as stack:
        placed = []
        for node in chosen_nodes(nodes):
            actor = _place(node)
            stack.callback(ray.kill, actor, no_restart=True)
            placed.append((node, actor))
        probes = _reports(placed, timeout_s)
        actors = [actor for (_, actor), probe in zip(placed, probes, strict=True) if probe.facts is not None]
        backend, took_s, error = _reduced(actors, [p.facts for p in probes if p.facts is not None], timeout_s)
    found = Examination(nodes=nodes, probes=tuple(probes), backend=backend, all_reduce_s=took_s, all_reduce_error=error)
    return replace(found, findings=tuple(findings_of(found, device_label)))


class _ProbeActor:
    """Runs on the node that is looked at."""

    def __init__(self, kind: str | None) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._kind = kind

    def report(self) -> WorkerFacts:
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"
        return collect(self._kind or name, self._device)

    def address(self) -> str:
        """A free port of this machine, as the others reach it."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def reduce(self, backend: str, address: str, rank: int, size: int, limit_s: float) -> float | None:
        dist.init_process_group(
            backend, init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=limit_s)
        )
        presence = Presence.of_process_group(limit_s)
        try:
            presence.meet(limit_s)
            return timed_all_reduce(self._device, limit_s, presence)
        finally:
            presence.leave()


def _node(entry: Mapping[str, Any], device_label: str) -> NodeFacts:
    resources = entry["Resources"]
    return NodeFacts(
        node_id=entry["NodeID"],
        label=entry["Labels"].get(device_label) or None,
        num_cpus=resources.get("CPU", 0.0),
        num_gpus=resources.get("GPU", 0.0),
    )


def _place(node: NodeFacts) -> Any:
    options = {
        "num_cpus": 0,
        "num_gpus": 1 if node.num_gpus >= 1 else 0,
        "label_selector": {"ray.io/node-id": node.node_id},
    }
    return ray.remote(_ProbeActor).options(**options).remote(node.label)


def _reports(placed: Sequence[tuple[NodeFacts, Any]], timeout_s: float) -> list[Probe]:
    references = [actor.report.remote() for _, actor in placed]
    ready, _ = ray.wait(references, num_returns=len(references), timeout=timeout_s) if references else ([], [])
    probes = []
    for (node, _), reference in zip(placed, references, strict=True):
        if reference not in ready:
            why = f"no probe started within {timeout_s:g} s"
            why += "; all its GPUs may be in use" if node.num_gpus >= 1 else "; the node may be overloaded"
            probes.append(Probe(node=node, error=why))
            continue
        try:
            probes.append(Probe(node=node, facts=ray.get(reference)))
        except RayError as error:
            probes.append(Probe(node=node, error=first_line(error)))
    return probes


def _reduced(
    actors: Sequence[Any], workers: Sequence[WorkerFacts], timeout_s: float
) -> tuple[str | None, float | None, str | None]:
    """Have the probes reduce a vector; return backend, seconds and error."""
    types = {worker.device_type for worker in workers}
    if len(workers) < 2 or len(types) > 1:
        return None, None, None
    backend = "nccl" if types == {"cuda"} else "gloo"
    try:
        address = ray.get(actors[0].address.remote(), timeout=timeout_s)
        calls = [
            actor.reduce.remote(backend, address, rank, len(actors), timeout_s) for rank, actor in enumerate(actors)
        ]
        took_s = max(ray.get(calls, timeout=2 * timeout_s + _GRACE_S))
    except GetTimeoutError:
        return backend, None, f"the probes' all-reduce over {backend} did not end within {2 * timeout_s + _GRACE_S:g} s"
    except (RayError, LinkError) as error:
        return backend, None, f"the probes' all-reduce over {backend} failed: {first_line(error)}"
    return backend, took_s, None
