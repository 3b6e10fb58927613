"""Whose step times a plan stands on: public profiles, or curves that a run of the user's own has learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rex_ray.cli.learnt import learnt_book
from rex_ray.control.events import GroupStarted
from rex_ray.core.errors import ConfigError
from rex_ray.core.observations import StepObserved
from rex_ray.core.step_time import StepTimeBook
from rex_ray.core.types import StepFlag
from rex_ray.report.reading.load import find_journal, load_journal, run_name
from rex_ray.scenario import DeviceProfile, NetworkModel, Source, device_names, load_profile, parse_cluster
from rex_ray.sim.audit import OwnTimes, own_times
from rex_ray.sim.limits import network_model

__all__ = ["Fleet", "Measured", "fleet_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run measured of one kind of device: fewest and most rows run, and the most that are planned."""

    fewest_rows: int
    most_rows: int
    reach_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Devices to plan with.

    Attributes:
        devices: kind per rank of the whole cluster.
        profiles: step times by kind.
        network: the reduction's time.
        network_text: where that comes from, for people.
        run: name of the run behind the measured kinds, or None.
        measured: what that run measured, by kind; other kinds are public profiles.
    """

    devices: tuple[str, ...]
    profiles: Mapping[str, DeviceProfile]
    network: NetworkModel
    network_text: str
    run: str | None = None
    measured: Mapping[str, Measured] = field(default_factory=dict)

    def ranks(self, devices: Sequence[str]) -> list[DeviceProfile]:
        """Return the profile of every rank."""
        return [self.profiles[device] for device in devices]

    def is_measured(self, device: str, num_rows: int) -> bool:
        """Whether the run ran so many rows on this kind, or some within a tenth of it."""
        found = self.measured.get(device)
        return found is not None and 0.9 * found.fewest_rows <= num_rows <= 1.1 * found.most_rows


def fleet_of(cluster: str, workload: str, network: str, network_text: str, run: Path | None) -> Fleet:
    """Return the devices of a cluster.

    Args:
        cluster: see ``parse_cluster``; with a run, its own kinds may be named as well.
        workload: whose public profiles stand in for kinds that the run did not have.
        network: see ``network_model``; ``""``: that of the run, or of T4 nodes without one.
        network_text: what to say of a public network.
        run: a run whose journal holds measured times, or None.

    Raises:
        ConfigError: a name that there is not, or a run that has learnt nothing.
    """
    if run is None:
        devices = parse_cluster(cluster)
        profiles = {device: load_profile(device, workload) for device in dict.fromkeys(devices)}
        public = network_model(workload, network or "T4")
        return Fleet(devices=devices, profiles=profiles, network=public, network_text=network_text)
    name, own, sync_s = _measured_profiles(run, workload)
    devices = parse_cluster(cluster, known=tuple(dict.fromkeys((*device_names(), *own))))
    if not set(devices) & set(own):
        raise ConfigError(
            f"{name} measured {', '.join(own)}, none of which is in the cluster {cluster}: leave out --profile, or "
            "plan with one of these"
        )
    profiles = {
        device: own[device][0] if device in own else load_profile(device, workload) for device in dict.fromkeys(devices)
    }
    if network:
        reduction = network_model(workload, network)
    else:
        reduction = NetworkModel(base_s=sync_s)
        network_text = f"network: the reduction as {name} measured it, {1000 * sync_s:.1f} ms, whatever the workers"
    return Fleet(
        devices=devices,
        profiles=profiles,
        network=reduction,
        network_text=network_text,
        run=name,
        measured={device: measured for device, (_, measured) in own.items() if device in profiles},
    )


def _measured_profiles(run: Path, workload: str) -> tuple[str, dict[str, tuple[DeviceProfile, Measured]], float]:
    """Return a run's name, its kinds with their curves, and the median time of its reduction in seconds."""
    journal, name = load_journal(run), run_name(find_journal(run))
    _check_workload(journal.header.environment.get("world", ""), name, workload)
    book = learnt_book(journal)
    groups = own_times(journal.events, book)
    if not groups:
        raise ConfigError(f"{name} has no clean step: there is no time to plan with; let it run longer")
    caps = {
        worker.device: worker.max_local_batch_size
        for event in journal.events
        if isinstance(event, GroupStarted)
        for worker in event.problem.workers
    }
    found: dict[str, tuple[DeviceProfile, Measured]] = {}
    rows = _rows_by_kind(journal.events)
    for group in groups:  # the newest of a kind counts
        for device in dict.fromkeys(group.devices):
            found[device] = _profile(device, workload, name, group, book, rows[device], caps.get(device))
    steps = [step for step in journal.events if isinstance(step, StepObserved) and step.flags == StepFlag.NONE]
    sync_s = float(np.median([int(step.sync_us.min()) for step in steps])) * 1e-6
    return name, found, sync_s if len(steps[-1].num_rows) > 1 else 0.0


def _check_workload(world: str, name: str, workload: str) -> None:
    """Refuse the times of another workload, where a simulated run says what it trained; a live run cannot say."""
    trained = world.removeprefix("simulated: ").partition(" on ")[0]
    if world.startswith("simulated: ") and trained != workload:
        raise ConfigError(f"{name} measured {trained}, not {workload}: leave out --profile, or give -w {trained}")


def _rows_by_kind(events: Sequence[object]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    devices: tuple[str, ...] = ()
    for event in events:
        if isinstance(event, GroupStarted):
            devices = tuple(worker.device for worker in event.problem.workers)
        elif isinstance(event, StepObserved) and event.flags == StepFlag.NONE and len(event.num_rows) == len(devices):
            for device, count in zip(devices, event.num_rows.tolist(), strict=True):
                if count > 0:
                    low, high = found.get(device, (count, count))
                    found[device] = (min(low, count), max(high, count))
    return found


def _profile(
    device: str,
    workload: str,
    name: str,
    group: OwnTimes,
    book: StepTimeBook | None,
    rows: tuple[int, int],
    cap: int | None,
) -> tuple[DeviceProfile, Measured]:
    """Return a kind's curve, at the level of its workers' usual times: a slowdown at the end is none of the kind's."""
    members = [rank for rank, kind in enumerate(group.devices) if kind == device]
    shapes = None if book is None else book.carry_over((device,))
    if shapes is None or not shapes.is_complete:
        shapes = StepTimeBook.empty((device,))
        for rank in members:
            shapes = shapes.observe([int(group.num_rows[rank])], [float(group.usual_us[rank]) * 1e-6])
    shape = shapes.curve(0)
    expected = shape.predict_s(group.num_rows[members])
    level = float(np.median(group.usual_us[members] * 1e-6 / expected))
    reach = shape.max_trusted_rows if cap is None else min(shape.max_trusted_rows, cap)
    curve = replace(shape.scaled(level), max_trusted_rows=reach)
    low, high = rows
    profile = DeviceProfile(
        device=device,
        workload=workload,
        local_batch_sizes=tuple(dict.fromkeys((low, high))),
        step_time_s=tuple(float(curve.predict_s(count)) for count in dict.fromkeys((low, high))),
        max_local_batch_size=max(reach, high),
        source=Source(repo=name, path="rex_ray/journal", commit="its last snapshot"),
        curve=curve,
    )
    return profile, Measured(fewest_rows=low, most_rows=high, reach_rows=max(reach, high))
