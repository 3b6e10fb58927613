"""How much of what short slowdowns cost is won back: whole runs in virtual time, against knowing everything late.

The most that a method with the same lag of a switch could do knows at once when an event begins or ends, and how slow
the worker is. The gap between that and shares that never move is what there is to win.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rex_ray.control.controller import Controller
from rex_ray.policies.registry import make_policy
from rex_ray.scenario import Episode, NoiseModel, load_profile, optimal_split, random_episodes
from rex_ray.sim import Scenario, mixed_cluster, simulate

__all__ = ["CASES", "EventCase", "play"]

DEVICES = ("T4", "T4", "V100", "V100")
WORKLOAD, ROWS = "resnet50", 256

_QUIET_STEPS = 300
"""Steps before the first event, left out of the account: learning the curves is another matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventCase:
    """Events of one worker at a time, drawn uniformly.

    Attributes:
        name: as it stands in the table.
        shortest: fewest steps of an event.
        longest: most steps.
        least_factor: least slowdown.
        largest_factor: largest slowdown.
        mean_pause: mean number of steps between events, of which 20 at least; exactly that many where it is 20.
        rank: whom it hits; None: anybody.
        per_1000_worker_steps: draw independent events as they were measured on production clusters instead.
    """

    name: str
    shortest: int = 0
    longest: int = 0
    least_factor: float = 1.0
    largest_factor: float = 1.0
    mean_pause: float = 110.0
    rank: int | None = None
    per_1000_worker_steps: float = 0.0


CASES = (
    EventCase(name="15-60 steps, 2x", shortest=15, longest=60, least_factor=1.8, largest_factor=2.2),
    EventCase(name="15-60 steps, 1.2-3x", shortest=15, longest=60, least_factor=1.2, largest_factor=3.0),
    EventCase(name="15-60 steps, 1.2-1.5x", shortest=15, longest=60, least_factor=1.2, largest_factor=1.5),
    EventCase(name="8-15 steps, 2x", shortest=8, longest=15, least_factor=1.8, largest_factor=2.2),
    EventCase(
        name="20 slow, 20 healthy, 2x",
        shortest=20,
        longest=20,
        least_factor=2.0,
        largest_factor=2.0,
        mean_pause=20.0,
        rank=1,
    ),
    EventCase(name="as measured, 1 per 1,000", per_1000_worker_steps=1.0),
    EventCase(name="as measured, 2.4 per 1,000", per_1000_worker_steps=2.4),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Seconds that the steps after the quiet ones took, and re-splits among them."""

    seconds: float
    num_moves: int = 0


def scenario(case: EventCase, num_steps: int, seed: int) -> tuple[Scenario, int]:
    """Return a mixed cluster on which such events happen, and how many."""
    if case.per_1000_worker_steps:
        drawn = random_episodes(
            num_workers=len(DEVICES),
            num_steps=num_steps,
            per_1000_worker_steps=case.per_1000_worker_steps,
            seed=seed,
        )
        episodes = [episode for episode in drawn if episode.start_step >= _QUIET_STEPS]
    else:
        episodes = _one_at_a_time(case, num_steps, seed)
    world = mixed_cluster(
        DEVICES,
        WORKLOAD,
        global_batch_size=ROWS,
        noise=NoiseModel.shared(),
        episodes=tuple(episodes),
        seed=seed,
    )
    return world, len(episodes)


def _one_at_a_time(case: EventCase, num_steps: int, seed: int) -> list[Episode]:
    rng = np.random.default_rng((seed, 7))
    episodes: list[Episode] = []
    step = _QUIET_STEPS
    while True:
        step += 20 + int(rng.exponential(case.mean_pause - 20))
        length = int(rng.integers(case.shortest, case.longest + 1))
        if step + length + 60 > num_steps:
            return episodes
        factor = float(rng.uniform(case.least_factor, case.largest_factor))
        rank = int(rng.integers(len(DEVICES))) if case.rank is None else case.rank
        episodes.append(Episode(rank=rank, start_step=step, num_steps=length, factor=factor))
        step += length


def play(world: Scenario, num_steps: int, **options: object) -> Played:
    """Run rex with these options."""
    policy = make_policy("rex", {"growth": "off", "search": "off", **options})
    run = simulate(Controller(policy), world, num_steps=num_steps)
    moves = sum(step >= _QUIET_STEPS for step, _ in run.allocations)
    return Played(seconds=float(run.step_s[_QUIET_STEPS:].sum()), num_moves=moves)


def play_known(world: Scenario, num_steps: int, lag_steps: int | None, *, back_at_once: bool = False) -> Played:
    """Run the best shares for what was true ``lag_steps`` ago; None: those of healthy workers for ever.

    ``back_at_once`` foresees the end of each event, so that the way back costs no lag.
    """
    profiles = [load_profile(device, WORKLOAD) for device in DEVICES]
    known: dict[tuple[float, ...], tuple[int, ...]] = {}
    total, moves, newest = 0.0, -1, None
    for step in range(_QUIET_STEPS, num_steps):
        factors = tuple(
            1.0 if lag_steps is None else line.slowdown(max(step - lag_steps, 0)) for line in world.timelines
        )
        if back_at_once and all(line.slowdown(step) == 1.0 for line in world.timelines):
            factors = (1.0,) * len(DEVICES)
        if factors not in known:
            known[factors] = optimal_split(profiles, ROWS, list(factors)).local_batch_sizes
        shares = known[factors]
        moves, newest = moves + (shares != newest), shares
        total += max(line.own_time_s(step, rows) for line, rows in zip(world.timelines, shares, strict=True))
    return Played(seconds=total, num_moves=moves)
