"""Who disturbs whom: each world's slowdowns are those of its source, and a recording is replayed as it was."""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from experiments.lab.alibaba import DATA_DIR, JOBS, read_job, replay_job
from experiments.lab.cells import Cell
from experiments.lab.worlds import scenario_of
from rex_ray.core.errors import ConfigError
from rex_ray.scenario import slowdown_factor
from rex_ray.sim import FREE

CELL = Cell(method="rex", workload="resnet18", cluster="2xT4,2xV100")
needs_traces = pytest.mark.skipif(not (DATA_DIR / "traces").is_dir(), reason="the recorded traces are not here")


def write_job(folder: Path, series: dict[int, list[float]]) -> None:
    (folder / "traces").mkdir(parents=True)
    with gzip.open(folder / "traces" / "alibaba_pai_minibatch_job1.csv.gz", "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", "worker", "gpu", "time", "batch_time_norm"])
        for worker, times in series.items():
            writer.writerows([0, worker, 25, 10 * k, time] for k, time in enumerate(times))


def test_a_recording_is_replayed_sample_by_sample_from_any_step_on(tmp_path):
    first = [100.0] * 6 + [150.0, 160.0, 101.0, 140.0] + [100.0] * 6 + [300.0]
    write_job(tmp_path, {0: first, 3: [50.0] * 17})
    for seed in range(20):
        workers = replay_job("1", num_workers=4, num_steps=200, seed=seed, data_dir=tmp_path)
        for rank, worker in enumerate(workers):
            recorded = np.array(first if rank % 2 == 0 else [50.0] * 17)
            recorded = recorded / np.median(recorded)
            replayed = [
                worker.noise.factor(seed, rank, step) * slowdown_factor(worker.episodes, rank, step)
                for step in range(200)
            ]
            assert replayed == pytest.approx([recorded[(step + worker.noise.offset) % 17] for step in range(200)])
            assert {episode.factor for episode in worker.episodes} == ({1.45, 3.0} if rank % 2 == 0 else set())
            assert all(episode.rank == rank for episode in worker.episodes)
        assert workers[0].noise.offset != workers[2].noise.offset, "a worker's second use runs half a recording apart"


def test_a_recording_that_is_missing_or_broken_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="put the Alibaba mini-batch series of job 2 in that place"):
        read_job("2", tmp_path)
    with pytest.raises(ConfigError, match="one of 1, 2, 3, 4"):
        read_job("9", tmp_path)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "alibaba_pai_minibatch_job3.csv.gz").write_bytes(b"worker,time\n")
    with pytest.raises(ConfigError, match="fetch it again"):
        read_job("3", tmp_path)


@needs_traces
@pytest.mark.parametrize("job", JOBS)
def test_the_recorded_jobs_have_ten_workers_and_the_episodes_that_were_counted_in_them(job):
    recorded = read_job(job)
    assert len(recorded) == 10
    assert all(np.median(series) == pytest.approx(1.0) for series in recorded)
    listed: Counter[str] = Counter()
    with (DATA_DIR / "traces" / "alibaba_episodes.csv").open(newline="") as file:
        listed.update(row["job"] for row in csv.DictReader(file))
    num_steps = min(series.size for series in recorded)
    found = sum(len(worker.episodes) for worker in replay_job(job, num_workers=10, num_steps=num_steps, seed=0))
    assert found == pytest.approx(listed[job], abs=0.03 * listed[job] + 2)


@needs_traces
def test_a_replayed_world_has_the_recordings_noise_and_no_other():
    cell = replace(CELL, disturbance="alibaba:3", noise="quiet")
    recorded = read_job("3")
    for line, series in zip(scenario_of(cell, 50_000, 1000).timelines, recorded[:4], strict=True):
        relative = line.own_times(0, series.size, 32)[1] / float(line.profile.own_time_s(32))
        assert sorted(relative) == pytest.approx(sorted(series))
    with pytest.raises(ConfigError, match="set noise to 'quiet'"):
        scenario_of(replace(cell, noise="shared"), 50_000, 1000)


@pytest.mark.parametrize("seed", range(3))
def test_dlb_disturbs_one_worker_at_a_time_by_seconds_per_epoch(seed):
    cell = replace(CELL, disturbance="dlb", seed=seed, noise="quiet")
    scenario = scenario_of(cell, 256 * 40, 40 * 200)
    steps_per_epoch, factors = 40, np.stack([line.slowdowns(0, 40 * 200) for line in scenario.timelines])
    assert ((factors > 1).sum(axis=0) <= 1).all()
    episodes = sorted((e for line in scenario.timelines for e in line.episodes), key=lambda e: e.start_step)
    assert len(episodes) >= 4
    for episode in episodes:
        own_s = scenario.timelines[episode.rank].quiet_time_s(64)
        assert 5 <= (episode.factor - 1) * own_s * steps_per_epoch <= 10
        assert 4 * steps_per_epoch <= episode.num_steps <= 20 * steps_per_epoch
    gaps = [late.start_step - early.start_step - early.num_steps for early, late in pairwise(episodes)]
    assert all(4 * steps_per_epoch <= gap <= 20 * steps_per_epoch for gap in gaps)


def test_a_method_that_measures_nothing_pays_for_no_measuring():
    assert scenario_of(CELL, 1000, 100).charges == FREE
    charged = replace(CELL, charges="measured")
    assert scenario_of(charged, 1000, 100).charges.measuring_factor > 1
    assert scenario_of(replace(charged, method="bsp"), 1000, 100).charges.measuring_factor == 1
    with pytest.raises(ConfigError, match="charges must be one of"):
        scenario_of(replace(CELL, charges="some"), 1000, 100)


def test_unknown_disturbances_are_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match="none of none, random:RATE, lbb, dlb, alibaba:JOB"):
        scenario_of(replace(CELL, disturbance="gremlins"), 1000, 100)


def test_shapes_by_name_and_no_others():
    cell = Cell(method="rex", workload="resnet50", cluster="2xT4,2xV100")
    shapes = {
        name: scenario_of(replace(cell, shape=name), 1000, 10).timelines[0].shape
        for name in ("plain", "tiles:32", "contention:0.6")
    }
    assert shapes["plain"].tile_rows == 1
    assert shapes["tiles:32"].tile_rows == 32
    assert shapes["contention:0.6"].hosts == (0, 0, 1, 1)
    with pytest.raises(ConfigError, match="plain, tiles:ROWS"):
        scenario_of(replace(cell, shape="bumps"), 1000, 10)
