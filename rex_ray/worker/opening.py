"""How a session begins and ends, and what is made of an error that ends it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rex_ray.core.errors import LinkError, first_line
from rex_ray.worker import current
from rex_ray.worker.group.presence import Presence
from rex_ray.worker.link import ControlLink
from rex_ray.worker.meeting import Surroundings
from rex_ray.worker.model.out_of_memory import is_out_of_memory
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.parts import Parts, put_together
from rex_ray.worker.saving.reporter import Reporter
from rex_ray.worker.saving.snapshots import SnapshotPlace
from rex_ray.worker.session import Session

__all__ = ["open_session"]

_log = logging.getLogger("rex_ray")

# Once training is over nobody should wait long for politeness.
_CLOSE_LIMIT_S = 5.0


@contextmanager
def open_session(
    *,
    options: WorkerOptions,
    device: str,
    node: str,
    link: ControlLink,
    reporter: Reporter,
    torch_device: torch.device | None = None,
    snapshots: SnapshotPlace | None = None,
) -> Iterator[Session]:
    """Open this rank's session; inside, ``get_session()`` returns it.

    Uses ``torch.distributed`` if it is initialised, else the session is a group of one.

    Args:
        options: the worker's intervals and limits.
        device: kind of this worker's device, e.g. ``"T4"``.
        node: the machine's name.
        link: this rank's connection to the controller; closed at the end.
        reporter: where saves go to and come from.
        torch_device: where the model is moved to; default: it stays where the user put it.
        snapshots: where local snapshots of this run are kept between saves; default: there are none.

    Raises:
        ConfigError: a session is open already.
        LinkError: the ranks did not find together within the limit; or a collective of the loop's own broke, and this
            says for whom it waited.
    """
    current.refuse_second()
    presence = Presence.of_process_group(options.collective_timeout_s)
    around = Surroundings(
        options=options,
        device_kind=device,
        node=node,
        link=link,
        reporter=reporter,
        torch_device=torch_device,
        presence=presence,
        snapshots=snapshots,
    )
    try:
        parts = put_together(around)
        session = Session(parts)
    except BaseException as error:
        presence.leave(error)
        link.close(_CLOSE_LIMIT_S)
        raise
    failed = True
    try:
        with current.standing(session):
            yield session
            session.finish()
        failed = False
    except BaseException as error:
        _tell_failure(parts, error)
        told = presence.explained(error)
        presence.leave(told)
        if told is error:
            raise
        raise told from error
    finally:
        _close(parts, failed=failed)
        presence.leave()


def _tell_failure(parts: Parts, error: BaseException) -> None:
    """Have later groups keep off the share at which memory ran out, if that is what ended this one."""
    if parts.around.options.on_out_of_memory == "retry" and is_out_of_memory(error):
        parts.notices.ended_by_memory(parts.tracker.in_hand, parts.around.device_kind, first_line(error))


def _close(parts: Parts, *, failed: bool) -> None:
    """Send what is measured and leave; waits a few seconds at most.

    Args:
        parts: of the session that ends.
        failed: an error ended training, so that other ranks may no longer answer.
    """
    parts.tracker.close()
    parts.tracker.flush()
    limit_s = min(_CLOSE_LIMIT_S, parts.around.options.collective_timeout_s)
    try:
        parts.feed.close(limit_s, failed=failed)
        parts.saves.close(limit_s, failed=failed)
        if not failed:
            parts.met.control.close()
            parts.met.values.close()
    except LinkError as error:
        _log.warning("training is over, but the last control message never arrived: %s", error)
    finally:
        gc.unfreeze()
        parts.around.link.close(limit_s)
