"""What it costs to learn of slowdowns late, on the oracle's own split: the room that a faster trigger has."""

from __future__ import annotations

import numpy as np

from experiments._harness import Row, Scalar, Settings
from rex_ray.core.types import FloatArray
from rex_ray.scenario import (
    WorkerTimeline,
    load_learning,
    load_network,
    load_profile,
    parse_cluster,
    random_episodes,
)
from rex_ray.sim.oracle import Limits
from rex_ray.sim.scripted_oracle import ScriptedOracle
from rex_ray.sim.step_times import StepTimes

__all__ = ["late_row", "late_rows"]

# Episodes per 1,000 steps of one worker: a quiet, a middling and the worst of four production jobs.
_RATES = (0.3, 1.0, 2.4)
_CLUSTERS = tuple(f"{half}xT4,{half}xV100" for half in (2, 4, 6, 8))
_WORKLOAD, _REFERENCE = "resnet50", 256
_DELAYS = (5, 10, 12, 20)
_EPISODES, _EPISODES_QUICK = 400, 50
# Blocks of steps that the interval is bootstrapped over: long against an episode.
_BLOCKS, _RESAMPLES = 40, 2000


def late_rows(settings: Settings) -> list[Row]:
    """Return the table ``late``, at a middling batch and at the oracle's own half of the way to the target."""
    rows = []
    learning = load_learning(_WORKLOAD)
    for cluster in _CLUSTERS:
        profiles = [load_profile(device, _WORKLOAD) for device in parse_cluster(cluster)]
        limits = Limits(learning, StepTimes(profiles, load_network(_WORKLOAD)), _REFERENCE)
        best = limits.best_batch(float(learning.noise_scale_at(learning.target_rows / 2)))
        rows += [late_row(cluster, 4 * _REFERENCE, rate, settings) for rate in _RATES]
        rows += [late_row(cluster, best, rate, settings, may_change_batch=True) for rate in _RATES]
    return rows


def late_row(cluster: str, batch: int, per_1000: float, settings: Settings, *, may_change_batch: bool = False) -> Row:
    """Return one row: time lost against knowing every episode at once, in per cent.

    The oracle's steps are played at one batch until about 400 episodes have been met. ``late_10_low`` and ``_high``
    are a 95 % interval, bootstrapped over 40 blocks of steps; ``free_batch_pct``, at the oracle's own batch only, is
    the difference that it makes to the time per reference row if the batch may change with every episode as well.
    """
    devices = parse_cluster(cluster)
    num_steps = int((_EPISODES_QUICK if settings.quick else _EPISODES) * 1000 / (per_1000 * len(devices)))
    episodes = random_episodes(
        num_workers=len(devices), num_steps=num_steps, per_1000_worker_steps=per_1000, seed=settings.seed
    )
    lines = [
        WorkerTimeline(profile=load_profile(device, _WORKLOAD), rank=rank, seed=settings.seed, episodes=episodes)
        for rank, device in enumerate(devices)
    ]
    network = load_network(_WORKLOAD)

    def played(delay: int | None) -> ScriptedOracle:
        return ScriptedOracle(timelines=lines, network=network, num_steps=num_steps, delay_steps=delay)

    early_s = played(0).step_s(batch)
    row: dict[str, Scalar] = {"cluster": cluster, "B": batch, "per_1000": per_1000, "episodes": len(episodes)}
    for delay in _DELAYS:
        row[f"late_{delay}_pct"] = _lost_pct(played(delay).step_s(batch), early_s)
    low, high = _interval(played(10).step_s(batch), early_s, settings.seed)
    never_s = played(None).step_s(batch)
    return row | {
        "late_10_low": low,
        "late_10_high": high,
        "never_pct": _lost_pct(never_s, early_s),
        "free_batch_pct": _free_batch_pct(played(0), batch, early_s) if may_change_batch else None,
    }


def _lost_pct(late_s: FloatArray, early_s: FloatArray) -> float:
    return round(100 * float(late_s.sum() / early_s.sum() - 1), 2) + 0.0


def _interval(late_s: FloatArray, early_s: FloatArray, seed: int) -> tuple[float, float]:
    late, early = (np.array([block.sum() for block in np.array_split(times, _BLOCKS)]) for times in (late_s, early_s))
    drawn = np.random.default_rng(seed).integers(_BLOCKS, size=(_RESAMPLES, _BLOCKS))
    ratios = 100 * (late[drawn].sum(axis=1) / early[drawn].sum(axis=1) - 1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return round(float(low), 2), round(float(high), 2)


def _free_batch_pct(oracle: ScriptedOracle, batch: int, early_s: FloatArray) -> float:
    """Time per reference row of an oracle that picks batch and split in every piece, against one that keeps it."""
    learning = load_learning(_WORKLOAD)
    phi = float(learning.noise_scale_at(learning.target_rows / 2))
    profiles = [line.profile for line in oracle.timelines]
    batches = np.arange(_REFERENCE, min(8 * _REFERENCE, sum(p.max_local_batch_size for p in profiles)) + 1, 4)
    worth = batches * learning.efficiency(batches, phi)
    seconds = rows = 0.0
    for num_steps, factors in oracle.pieces():
        step_s = StepTimes(profiles, oracle.network, factors).balanced_s(batches)
        best = int((step_s / worth).argmin())
        seconds, rows = seconds + num_steps * step_s[best], rows + num_steps * worth[best]
    kept = float(early_s.sum()) / (early_s.size * batch * float(learning.efficiency(batch, phi)))
    return round(100 * (seconds / rows / kept - 1), 2) + 0.0
