"""What Ray Train runs on each worker: the user's loop inside a session."""

from __future__ import annotations

import inspect
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import ray
import ray.train
import ray.train.torch
import torch
from ray.util.queue import Queue

from rex_ray.core.errors import LinkError
from rex_ray.train.drains import node_tag, wait_out_notice
from rex_ray.train.link import RayLink
from rex_ray.train.reporter import RayReporter
from rex_ray.train.snapshot_folders import remove_stale_snapshots
from rex_ray.worker.opening import open_session
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.saving.snapshots import SnapshotPlace

__all__ = ["TrainLoop", "Wiring", "call_loop", "device_kind", "run_worker"]

TrainLoop: TypeAlias = Callable[[dict[str, Any]], Any] | Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What a worker is told of its run.

    Attributes:
        options: the worker's intervals and limits.
        device_label: node label that bears the kind of device.
        control: handle of the control actor.
        queue: where its records go.
        run_id: identity of this ``fit``; local snapshots of another one are none of ours.
    """

    options: WorkerOptions
    device_label: str
    control: Any
    queue: Queue
    run_id: str


def run_worker(config: dict[str, Any], *, loop: TrainLoop, wiring: Wiring) -> Any:
    """Open this worker's session and run the user's loop in it.

    Args:
        config: the user's ``train_loop_config``.
        loop: the user's loop.
        wiring: how to reach the run's controller.
    """
    _log_to_console()
    remove_stale_snapshots()
    context = ray.train.get_context()
    link = RayLink(wiring.control, wiring.queue, context.get_world_rank(), context.get_world_size())
    try:
        with open_session(
            options=wiring.options,
            device=device_kind(wiring.device_label),
            node=_node_name(),
            link=link,
            reporter=RayReporter(wiring.options.storage_retry_s),
            torch_device=ray.train.torch.get_device(),
            snapshots=SnapshotPlace(run=wiring.run_id, node=_node_name()),
        ):
            return call_loop(loop, config)
    except LinkError:  # also what the session makes of a backend's own error, as it ends
        wait_out_notice()
        raise


def device_kind(device_label: str) -> str:
    """Return the kind of this worker's device: its own node's label, else the GPU's name, else ``"cpu"``.

    Never what was asked for: Ray gives rank ``i`` any of the nodes.
    """
    kind: str | None = ray.get_runtime_context().get_node_labels().get(device_label)
    if kind:
        return kind
    device = ray.train.torch.get_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)


def call_loop(loop: TrainLoop, config: dict[str, Any]) -> Any:
    """Call a loop that takes the configuration, or nothing; Ray Train accepts both."""
    required = [
        parameter
        for parameter in inspect.signature(loop).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return loop(config) if required else loop()  # type: ignore[call-arg]


def _node_name() -> str:
    """The machine's name and Ray's for it: several nodes may share a machine."""
    return f"{socket.gethostname()}/{node_tag(ray.get_runtime_context().get_node_id())}"


def _log_to_console() -> None:
    """Ray Train gives the root logger a handler; rex_ray's own lines go there too, from INFO on."""
    logging.getLogger("rex_ray").setLevel(logging.INFO)
