"""A run's control actor and its queue: on the driver's node, owned by the driver, and one of each per run."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.queue import Queue

from rex_ray.config import RexConfig
from rex_ray.core.errors import ConfigError, LinkError
from rex_ray.core.types import LearntShape
from rex_ray.train.arrow_store import ArrowStore
from rex_ray.train.control_actor import ControlActor

__all__ = ["control_name", "control_plane", "wait_for_its_turn"]

_START_LIMIT_S: Final = 60.0
_MOST_QUEUED_BATCHES: Final = 10_000

# Ray ends the actors of a driver that was killed within seconds; until then the next one finds them.
_TURN_LIMIT_S: Final = 30.0
_LOOK_S: Final = 0.25

# A namespace of its own, and not the driver's, which each job has for itself: the name is to be found by all.
_NAMESPACE: Final = "rex_ray"


def control_name(store: ArrowStore) -> str:
    """Return what the control actor of the run with this storage is called, by whichever driver it was started."""
    place = f"{store.filesystem.type_name}:{store.path_of('')}"
    return f"rex_ray-control-{hashlib.sha256(place.encode()).hexdigest()[:16]}"


def wait_for_its_turn(store: ArrowStore, limit_s: float = _TURN_LIMIT_S) -> None:
    """Wait until no other driver on this cluster trains under the same name and storage.

    Each would go on from the other's saves, and put the other's journal aside.

    Raises:
        ConfigError: one still does.
    """
    deadline = time.monotonic() + limit_s
    while _is_taken(control_name(store)):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"a run is under way in {store.path_of('')} on this cluster, and this one would go on from its saves; "
                "wait for its end or stop it (ray job list, ray job stop), or give this one another name"
            )
        time.sleep(_LOOK_S)


def _is_taken(name: str) -> bool:
    try:
        ray.get_actor(name, namespace=_NAMESPACE)
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def control_plane(
    config: RexConfig,
    run_id: str,
    store: ArrowStore,
    journal_dir: Path,
    learnt: tuple[LearntShape, ...],
    elsewhere: ArrowStore | None,
    memory: str | None,
) -> Iterator[tuple[Any, Queue]]:
    """Have a control actor and its queue, and end both.

    Args:
        config: of the run.
        run_id: of this ``fit``.
        store: of the run.
        journal_dir: where the actor writes its journal.
        learnt: what is known of kinds of devices.
        elsewhere: where else profiles and memory are kept.
        memory: of an earlier ``fit``'s controller.

    Raises:
        LinkError: the control actor did not start within the limit.
    """
    here = {"num_cpus": 0, "label_selector": {"ray.io/node-id": ray.get_runtime_context().get_node_id()}}
    with contextlib.ExitStack() as stack:
        queue_name = f"rex_ray-queue-{run_id}"
        # It may be lost with what it holds, and comes back empty.
        queue = Queue(_MOST_QUEUED_BATCHES, actor_options={"name": queue_name, "max_restarts": -1, **here})
        stack.callback(_kill, queue.actor)
        control = (
            ray.remote(ControlActor)
            .options(name=control_name(store), namespace=_NAMESPACE, max_restarts=-1, max_concurrency=100, **here)
            .remote(config, queue_name, str(journal_dir), learnt, elsewhere, memory)
        )
        stack.callback(_kill, control)
        try:
            ray.get(control.status.remote(), timeout=_START_LIMIT_S)
        except GetTimeoutError:
            raise LinkError(f"the control actor did not start within {_START_LIMIT_S:g} s") from None
        yield control, queue


def _kill(actor: Any) -> None:
    with contextlib.suppress(RayError):  # it, or the whole cluster, may be gone already
        ray.kill(actor, no_restart=True)
