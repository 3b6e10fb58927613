"""How ranks begin: they meet, look at one another, and agree on the state that all of them go on from."""

from __future__ import annotations

import uuid
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from rex_ray.worker.group.presence import Presence
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.link import ControlLink
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.preflight.look import Look, look
from rex_ray.worker.saving.reporter import Reporter
from rex_ray.worker.saving.restoring import Restored, newest_state
from rex_ray.worker.saving.snapshots import SnapshotPlace

__all__ = ["Meeting", "Surroundings", "meet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What one rank's session finds around it, and is opened with.

    Attributes:
        options: the worker's intervals and limits.
        device_kind: kind of this worker's device.
        node: the machine's name.
        link: this rank's connection to the controller.
        reporter: where saves go to and come from.
        torch_device: where the model is moved to; None: it stays where the user put it.
        presence: this rank's word to the others, and theirs to it.
        snapshots: where local snapshots of this run are kept; None: there are none.
    """

    options: WorkerOptions
    device_kind: str
    node: str
    link: ControlLink
    reporter: Reporter
    torch_device: torch.device | None
    presence: Presence
    snapshots: SnapshotPlace | None

    @property
    def first_device(self) -> torch.device:
        """Where the model computes, until there is one."""
        return self.torch_device or torch.device("cpu")

    @property
    def snapshot_place(self) -> SnapshotPlace | None:
        """Where snapshots are kept, if any are to be made."""
        return self.snapshots if self.options.snapshot_interval_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What the ranks have found together, alike on all of them.

    Attributes:
        values: ranks to agree on values with.
        control: the same ranks, to agree about switches and nothing else.
        generation: identity of the worker group.
        looked: what they saw of one another; None: they did not look.
        resumed: what training resumes from; None at a fresh start.
    """

    values: SideGroup
    control: SideGroup
    generation: str
    looked: Look | None
    resumed: Restored | None

    @property
    def restored(self) -> MutableMapping[str, Any] | None:
        """The state that training resumes from; what is loaded of it is taken out."""
        return None if self.resumed is None else self.resumed.state


def meet(around: Surroundings) -> Meeting:
    """Wait for every rank, and agree with them. Collective.

    Raises:
        LinkError: the ranks did not find together within the limit.
        ConfigError: they cannot train together, or their storage cannot be used.
        StorageError: there are saves, and none is whole.
    """
    options, presence = around.options, around.presence
    presence.meet(options.collective_timeout_s)
    values = SideGroup(options.collective_timeout_s, presence)
    control = SideGroup(options.collective_timeout_s, presence)
    generation: str = values.broadcast_object(uuid.uuid4().hex, "the group's identity")
    around.link.started(generation)
    looked: Look | None = None
    if options.preflight_timeout_s is not None:
        looked = look(values, around.device_kind, around.first_device, options.preflight_timeout_s)
    resumed = newest_state(values, around.reporter, around.snapshot_place, options.storage_retry_s)
    return Meeting(values=values, control=control, generation=generation, looked=looked, resumed=resumed)
