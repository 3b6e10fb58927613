"""What Ray Train runs on each worker: the user's loop inside a session."""

from __future__ import annotations

import inspect
import logging
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint
from ray.util.queue import Queue

from rex_ray.core.errors import ConfigError
from rex_ray.train.drains import node_tag
from rex_ray.train.link import RayLink
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.session import open_session

__all__ = ["RayReporter", "TrainLoop", "Wiring", "call_loop", "device_kind", "run_worker"]

TrainLoop: TypeAlias = Callable[[dict[str, Any]], Any] | Callable[[], Any]

_STATE_FILE = "session.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What a worker is told of its run.

    Attributes:
        options: the worker's intervals and limits.
        device_label: node label that bears the kind of device.
        control: handle of the control actor.
        queue: where its records go.
    """

    options: WorkerOptions
    device_label: str
    control: Any
    queue: Queue


class RayReporter:
    """Saves and restores a session's state as a Ray Train checkpoint; a ``rex_ray.worker.link.Reporter``."""

    def report(self, metrics: Mapping[str, Any], state: Mapping[str, Any] | None) -> None:
        """Report metrics, with the state as a checkpoint that rank 0 writes. A barrier over all ranks."""
        if state is None or ray.train.get_context().get_world_rank() != 0:
            ray.train.report(dict(metrics))
            return
        with tempfile.TemporaryDirectory(prefix="rex_ray-") as directory:
            torch.save(dict(state), Path(directory) / _STATE_FILE)
            ray.train.report(dict(metrics), checkpoint=Checkpoint.from_directory(directory))

    def restore(self) -> Mapping[str, Any] | None:
        """Return the state of the run's newest checkpoint, or None at a fresh start.

        Raises:
            ConfigError: the checkpoint was made by something else.
        """
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return None
        with checkpoint.as_directory() as directory:
            path = Path(directory) / _STATE_FILE
            if not path.exists():
                raise ConfigError(
                    f"the checkpoint {checkpoint.path} holds no session; it was not made by session.report, so give "
                    "this run another name"
                )
            state: Mapping[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
            return state


def run_worker(config: dict[str, Any], *, loop: TrainLoop, wiring: Wiring) -> Any:
    """Open this worker's session and run the user's loop in it.

    Args:
        config: the user's ``train_loop_config``.
        loop: the user's loop.
        wiring: how to reach the run's controller.
    """
    _log_to_console()
    context = ray.train.get_context()
    link = RayLink(wiring.control, wiring.queue, context.get_world_rank(), context.get_world_size())
    with open_session(
        options=wiring.options,
        device=device_kind(wiring.device_label),
        node=_node_name(),
        link=link,
        reporter=RayReporter(),
        torch_device=ray.train.torch.get_device(),
    ):
        return call_loop(loop, config)


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
