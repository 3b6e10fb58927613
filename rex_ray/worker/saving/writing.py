"""A save on its way into a storage that fails now and then: tried again, given up softly, never waited for for ever."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rex_ray.core.errors import RexError
from rex_ray.worker.group.errand import done_by
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.measuring.timing import now_s
from rex_ray.worker.saving.patience import StallWatch, patiently
from rex_ray.worker.saving.reporter import Reporter
from rex_ray.worker.saving.store import cause_of

__all__ = ["Attempts", "SaveWriter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """What came of a save.

    Attributes:
        written: the storage holds it whole.
        failures: what was wrong with the attempts before it, or with all.
        lasted_s: from the first attempt to the end of the last.
    """

    written: bool
    failures: tuple[str, ...] = ()
    lasted_s: float = 0.0


class SaveWriter:
    """Writes saves on rank 0 and has all ranks know what came of each.

    Args:
        reporter: what writes.
        group: the ranks that want to know.
        retry_s: how long a save is tried again.
    """

    def __init__(self, reporter: Reporter, group: SideGroup, retry_s: float) -> None:
        self._reporter = reporter
        self._group = group
        self._retry_s = retry_s
        self._stuck: threading.Event | None = None

    def write(self, state: Mapping[str, Any]) -> Attempts:
        """Write a state; called on every rank, and answered alike on every rank.

        Raises:
            RexError: the state itself cannot be saved.
            LinkError: rank 0 died meanwhile.
        """
        watch, ended = StallWatch(self._retry_s), threading.Event()
        return done_by(
            self._group,
            0,
            lambda: self._attempts(state, watch, ended),
            "rank 0's save",
            give_up=lambda: self._given_up(watch, ended),
        )

    def _attempts(self, state: Mapping[str, Any], watch: StallWatch, ended: threading.Event) -> Attempts:
        try:
            if self._stuck is not None and not self._stuck.is_set():
                return Attempts(written=False, failures=("the storage has still not answered to an earlier save",))
            return self._patient_attempts(state, watch)
        finally:
            ended.set()

    def _patient_attempts(self, state: Mapping[str, Any], watch: StallWatch) -> Attempts:
        began_s = now_s()
        failures: list[str] = []
        try:
            patiently(
                lambda: self._reporter.write(state, watch.moved),
                self._retry_s,
                lambda error: failures.append(cause_of(error)),
            )
        except RexError:
            raise  # not the storage's
        except Exception:  # noqa: BLE001 - a storage's client raises what it likes, and it is in ``failures``
            return Attempts(written=False, failures=tuple(failures), lasted_s=now_s() - began_s)
        return Attempts(written=True, failures=tuple(failures), lasted_s=now_s() - began_s)

    def _given_up(self, watch: StallWatch, ended: threading.Event) -> Attempts | None:
        """Leave an attempt to itself that is stuck in the storage's client, where nothing can reach it."""
        stalled_s = watch.stalled_s()
        if stalled_s is None:
            return None
        self._stuck = ended
        return Attempts(
            written=False, failures=(f"the storage took nothing for {stalled_s:.0f} s",), lasted_s=stalled_s
        )
