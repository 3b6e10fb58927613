"""Simulated runs as a report reads them: the real controller and journal entries, in a world whose truth is known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rex_ray.control.controller import Controller
from rex_ray.control.journal import Entry
from rex_ray.policies.registry import make_policy
from rex_ray.report.computing.equal import equal_rows
from rex_ray.report.reading.build import build_run
from rex_ray.report.reading.schema import RunData
from rex_ray.scenario import Episode, NoiseModel
from rex_ray.scenario.timeline import own_times
from rex_ray.sim import Scenario, SimulatedRun, mixed_cluster, simulate

__all__ = ["DEVICES", "as_run", "play", "true_equal_s", "world"]

DEVICES = ("T4", "T4", "V100", "V100")


def world(*episodes: Episode, seed: int = 0, noise: NoiseModel | None = None, global_batch_size: int = 256) -> Scenario:
    """Return two T4 and two V100 at their published step times of ResNet-50."""
    return mixed_cluster(
        DEVICES, "resnet50", global_batch_size=global_batch_size, noise=noise, episodes=episodes, seed=seed
    )


def play(policy: str, scenario: Scenario, num_steps: int) -> SimulatedRun:
    """Run a policy with its default options."""
    return simulate(Controller(make_policy(policy), seed=0), scenario, num_steps=num_steps)


def as_run(policy: str, played: SimulatedRun) -> RunData:
    """Return what a report would read of a simulated run: a fresh controller says of its events what the first did."""
    controller = Controller(make_policy(policy), seed=0)
    entries = []
    for number, event in enumerate(played.events):
        commands = controller.handle(event)
        entries.append(Entry(number=number, event=event, commands=commands, notes=controller.take_notes()))
    return build_run("simulated", policy, {}, entries)


def true_equal_s(run: RunData, scenario: Scenario) -> float:
    """Return the seconds that the run's own steps would have taken in equal shares: same noise, same episodes."""
    (group,) = run.groups
    rows = equal_rows(group)
    borders = [0, *(np.flatnonzero((np.diff(rows, axis=0) != 0).any(axis=1)) + 1).tolist(), len(rows)]
    return sum(_seconds(scenario, start, stop, rows[start].tolist()) for start, stop in pairwise(borders))


def _seconds(scenario: Scenario, start: int, stop: int, rows: Sequence[int]) -> float:
    return float(scenario.network.step_s(*own_times(scenario.timelines, start, stop, rows)).sum())
