"""A run's queue and control actor: on the driver's node, owned by the driver, and one of each per run."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import ActorAlreadyExistsError, GetTimeoutError, RayError
from ray.util.queue import Queue

from rex_ray.config import RexConfig
from rex_ray.core.errors import ConfigError, LinkError
from rex_ray.core.types import LearntShape
from rex_ray.train.arrow_store import ArrowStore
from rex_ray.train.control_actor import NAMESPACE, ControlActor

__all__ = ["control_of", "queue_of"]

logger = logging.getLogger("rex_ray")

_START_LIMIT_S: Final = 60.0
_MOST_QUEUED_BATCHES: Final = 10_000

# Ray ends the actors of a driver that was killed within seconds, and of one whose machine is gone, or that was a Ray
# Client, within about a minute. Until then the next driver finds them.
_TURN_LIMIT_S: Final = 90.0
_RETRY_S: Final = 0.25


@contextlib.contextmanager
def queue_of(store: ArrowStore, limit_s: float = _TURN_LIMIT_S) -> Iterator[Queue]:
    """Have the run's queue, and with it the turn: whoever else on this cluster asks for it meanwhile waits.

    Two drivers under one name and storage would each go on from the other's saves, and put the other's journal aside.
    So nothing of the run's is touched before this is had.

    Args:
        store: of the run.
        limit_s: how long to wait for another driver's end.

    Raises:
        ConfigError: another driver still trains under the same name and storage.
    """
    deadline_s = time.monotonic() + limit_s
    is_told = False
    while (queue := _queue_unless_taken(_queue_name(store))) is None:
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"a run is under way in {store.path_of('')} on this cluster, and this one would go on from its saves; "
                "wait for its end or stop it (ray job list, ray job stop), or give this one another name"
            )
        if not is_told:
            logger.warning("waiting up to %.0f s for the end of the run in %s", limit_s, store.path_of(""))
            is_told = True
        time.sleep(_RETRY_S)
    try:
        yield queue
    finally:
        _kill(queue.actor)


@contextlib.contextmanager
def control_of(
    store: ArrowStore,
    config: RexConfig,
    run_id: str,
    journal_dir: Path,
    learnt: tuple[LearntShape, ...],
    elsewhere: ArrowStore | None,
    memory: str | None,
) -> Iterator[Any]:
    """Have the control actor of a run whose queue one has, and end it.

    Args:
        store: of the run.
        config: of the run.
        run_id: of this ``fit``.
        journal_dir: where the actor writes its journal.
        learnt: what is known of kinds of devices.
        elsewhere: where else profiles and memory are kept.
        memory: of an earlier ``fit``'s controller.

    Raises:
        LinkError: the control actor did not start within the limit.
    """
    control = (
        ray.remote(ControlActor)
        .options(name=f"rex_ray-control-{run_id}", max_restarts=-1, max_concurrency=100, **_here())
        .remote(config, _queue_name(store), str(journal_dir), learnt, elsewhere, memory)
    )
    try:
        try:
            ray.get(control.status.remote(), timeout=_START_LIMIT_S)
        except GetTimeoutError:
            raise LinkError(f"the control actor did not start within {_START_LIMIT_S:g} s") from None
        yield control
    finally:
        _kill(control)


def _queue_unless_taken(name: str) -> Queue | None:
    # It may be lost with what it holds, and comes back empty.
    options = {"name": name, "namespace": NAMESPACE, "max_restarts": -1, **_here()}
    try:
        return Queue(_MOST_QUEUED_BATCHES, actor_options=options)
    except ActorAlreadyExistsError:
        return None


def _queue_name(store: ArrowStore) -> str:
    """Return the same name to whichever driver asks; a path on a part of a file system is another on another part."""
    place = f"{store.filesystem.type_name}:{getattr(store.filesystem, 'base_path', '')}:{store.path_of('')}"
    return f"rex_ray-queue-{hashlib.sha256(place.encode()).hexdigest()[:16]}"


def _here() -> dict[str, Any]:
    return {"num_cpus": 0, "label_selector": {"ray.io/node-id": ray.get_runtime_context().get_node_id()}}


def _kill(actor: Any) -> None:
    with contextlib.suppress(RayError):  # it, or the whole cluster, may be gone already
        ray.kill(actor, no_restart=True)
