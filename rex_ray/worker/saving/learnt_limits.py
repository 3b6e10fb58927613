"""What a run has learnt of its devices' memories, in a form that outlives it: rows per kind of device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.link import ControlLink
from rex_ray.worker.model.pass_limit import PassLimit

__all__ = ["LearntLimits"]

_NAME = "memory"


class LearntLimits:
    """One rank's limits, begun with those of the save that training resumes from.

    A save holds the fewest rows that any worker of a kind found: the group may be another one tomorrow.

    Args:
        device_kind: kind of this worker's device.
        restored: the save.
        link: knows what the controller learnt of earlier groups.

    Attributes:
        passes: rows that one forward and backward pass may have here.
    """

    def __init__(self, *, device_kind: str, restored: Mapping[str, Any] | None, link: ControlLink) -> None:
        saved: Mapping[str, Mapping[str, int]] = {} if restored is None else restored.get(_NAME, {})
        self._device_kind = device_kind
        self._link = link
        self._share_rows = dict(saved.get("share_rows", {}))
        self.passes = PassLimit(
            most=saved.get("pass_rows", {}).get(device_kind), fails_at=saved.get("pass_fails_at", {}).get(device_kind)
        )

    @property
    def share_rows(self) -> int | None:
        """Most rows that this worker may be given, or None while unknown."""
        return self._share_rows.get(self._device_kind)

    def save(self, group: SideGroup) -> dict[str, dict[str, dict[str, int]]]:
        """Return what the group knows, to be part of a save; every rank must call this."""
        kind = self._device_kind
        own = (
            _known(kind, self.passes.most),
            _known(kind, self.passes.fails_at),
            _fewest([self._share_rows, self._link.row_limits()]),
        )
        told = group.gather_objects(own, "the save's memory limits")
        pass_rows, pass_fails_at, share_rows = (_fewest(column) for column in zip(*told, strict=True))
        return {_NAME: {"pass_rows": pass_rows, "pass_fails_at": pass_fails_at, "share_rows": share_rows}}


def _known(kind: str, rows: int | None) -> dict[str, int]:
    return {} if rows is None else {kind: rows}


def _fewest(tables: Iterable[Mapping[str, int]]) -> dict[str, int]:
    fewest: dict[str, int] = {}
    for table in tables:
        for kind, rows in table.items():
            fewest[kind] = min(rows, fewest.get(kind, rows))
    return fewest
