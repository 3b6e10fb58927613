"""Recorded workers of production jobs, replayed: mini-batch times of the Alibaba Cluster Trace Program (CC-BY-4.0).

A job's ten workers were logged about every tenth step; each logged time stands for one step here. Times are taken
relative to the worker's own median, since how fast a device is says the cluster. Whole stretches above 1.2 become
episodes, which an oracle may know of; what is left of the series is noise, which it may not.
"""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from rex_ray.core.errors import ConfigError
from rex_ray.core.types import FloatArray, frozen
from rex_ray.scenario import Episode, RecordedNoise

__all__ = ["DATA_DIR", "JOBS", "Replayed", "read_job", "replay_job"]

DATA_DIR = Path(__file__).resolve().parents[3] / "shared" / "data"
"""Where the traces lie: ``shared/data/traces`` beside the repository."""

JOBS = ("1", "2", "3", "4")

_SLOW = 1.2
# Stretches that a single sample parts are one: so 439 of 443 episodes are those of the list made of these traces.
_LONGEST_GAP = 1
_START_STREAM = 4


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """A recorded worker as a timeline takes it: their product is the recorded series."""

    noise: RecordedNoise
    episodes: tuple[Episode, ...]


def replay_job(job: str, *, num_workers: int, num_steps: int, seed: int, data_dir: Path = DATA_DIR) -> list[Replayed]:
    """Return a worker per rank, from a step of the recording that the seed chooses, over and over.

    Ranks beyond the recorded workers replay those again, half a recording apart.

    Raises:
        ConfigError: there is no such job, or the file is not there; says where it should lie.
    """
    recorded = read_job(job, data_dir)
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, _START_STREAM))))
    start = int(generator.integers(min(series.size for series in recorded)))
    workers = []
    for rank in range(num_workers):
        turn, which = divmod(rank, len(recorded))
        series = recorded[which]
        offset = (start + turn * series.size // 2) % series.size
        workers.append(_replayed(series, rank=rank, offset=offset, num_steps=num_steps))
    return workers


def read_job(job: str, data_dir: Path = DATA_DIR) -> tuple[FloatArray, ...]:
    """Return each recorded worker's times over its own median, in order of time, shape ``[samples]`` each.

    Raises:
        ConfigError: there is no such job, or the file is not there; says where it should lie.
    """
    if job not in JOBS:
        raise ConfigError(f"a replayed job is one of {', '.join(JOBS)}, e.g. alibaba:3, got {job!r}")
    path = data_dir / "traces" / f"alibaba_pai_minibatch_job{job}.csv.gz"
    if not path.is_file():
        raise ConfigError(f"{path} is not there: put the Alibaba mini-batch series of job {job} in that place")
    return _read(path)


@cache
def _read(path: Path) -> tuple[FloatArray, ...]:
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
        rows = sorted((int(line["worker"]), int(line["time"]), float(line["batch_time_norm"])) for line in lines)
    except (OSError, EOFError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} is no series of mini-batch times ({error!r}): fetch it again") from error
    series = []
    for worker in sorted({row[0] for row in rows}):
        times = np.array([time for who, _, time in rows if who == worker])
        series.append(frozen(times / np.median(times)))
    return tuple(series)


def _replayed(series: FloatArray, *, rank: int, offset: int, num_steps: int) -> Replayed:
    noise, episodes = series.copy(), []
    for first, length in _stretches(series):
        level = float(np.median(series[first : first + length]))
        noise[first : first + length] /= level
        # The stretch that the recording is in at the first step has begun before it.
        begin = (first - offset) % series.size - series.size
        while begin < num_steps:
            start, stop = max(begin, 0), begin + length
            if stop > start:
                episodes.append(Episode(rank=rank, start_step=start, num_steps=stop - start, factor=level))
            begin += series.size
    return Replayed(RecordedNoise(frozen(noise), offset), tuple(sorted(episodes, key=lambda e: e.start_step)))


def _stretches(series: FloatArray) -> list[tuple[int, int]]:
    """Return first sample and length of each slow stretch, gaps of a sample included."""
    found: list[tuple[int, int]] = []
    for index in np.flatnonzero(series >= _SLOW).tolist():
        if found and index - sum(found[-1]) <= _LONGEST_GAP:
            found[-1] = (found[-1][0], index + 1 - found[-1][0])
        else:
            found.append((index, 1))
    return found
