"""The emulated world: shipped figures with a source each, sane curves, and the public facts that they imply."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from rex_ray.core.errors import ConfigError, InfeasibleError
from rex_ray.scenario import (
    NetworkModel,
    device_names,
    load_network,
    load_profile,
    optimal_split,
    profile_names,
    workload_names,
)

PUBLIC = Path(__file__).parents[2].parent / "shared" / "data" / "device_profiles.csv"
ALL = [pytest.param(*name, id="-".join(name)) for name in profile_names()]


@pytest.mark.parametrize(("device", "workload"), ALL)
def test_every_profile_is_positive_non_decreasing_and_names_its_source(device, workload):
    profile = load_profile(device, workload)
    largest = profile.max_local_batch_size
    rows = np.unique(np.concatenate([np.arange(0, 200), np.linspace(1, 3 * largest, 400).astype(int)]))
    times = profile.own_time_s(rows)
    assert (times > 0).all()
    assert np.isfinite(times).all()
    assert (np.diff(times) >= 0).all()
    assert profile.source.repo
    assert len(profile.source.commit) == 40
    assert profile.source.path
    assert len(profile.local_batch_sizes) == len(profile.step_time_s) <= 12
    assert max(profile.local_batch_sizes) == largest


@pytest.mark.parametrize(("device", "workload"), ALL)
def test_measured_points_are_hit_wherever_they_increase(device, workload):
    profile = load_profile(device, workload)
    published = np.array(profile.step_time_s)
    if (np.diff(published) >= 0).all():
        assert profile.own_time_s(profile.local_batch_sizes) == pytest.approx(published)
    else:
        # Isotonic regression moves points towards one another, never out of their range.
        times = profile.own_time_s(profile.local_batch_sizes)
        assert published.min() <= times.min()
        assert times.max() <= published.max()
        assert times.mean() == pytest.approx(published.mean())


def test_beyond_the_largest_point_time_grows_with_the_rows():
    profile = load_profile("2080Ti", "resnet50")  # the published last point is below the one before
    assert profile.own_time_s(400) >= 1.25 * profile.own_time_s(200)


@pytest.mark.skipif(not PUBLIC.exists(), reason="the public step-time table is not on this machine")
def test_the_shipped_figures_are_those_of_the_public_table():
    with PUBLIC.open(encoding="utf-8") as file:
        published = {
            (row["source_path"], row["commit"], int(row["local_batch_size"]), round(float(row["step_time_s"]), 6))
            for row in csv.DictReader(file)
            if row["step_time_s"] and row["local_batch_size"]
        }
    for name in profile_names():
        profile = load_profile(*name)
        for size, seconds in zip(profile.local_batch_sizes, profile.step_time_s, strict=True):
            assert (profile.source.path, profile.source.commit, size, seconds) in published, name


@pytest.mark.parametrize(
    ("workload", "total", "saved"),
    [
        ("resnet50", 256, 0.35),
        ("resnet50", 800, 0.46),
        ("resnet18", 512, 0.01),
        ("resnet18", 1024, 0.37),
        ("resnet18", 2048, 0.49),
    ],
)
def test_two_t4_and_two_v100_gain_what_the_public_curves_promise(workload, total, saved):
    profiles = [load_profile(device, workload) for device in ("T4", "T4", "V100", "V100")]
    equal = max(float(profile.own_time_s(total // 4)) for profile in profiles)
    plan = optimal_split(profiles, total)
    assert 1 - plan.step_time_s / equal == pytest.approx(saved, abs=0.006)
    assert sum(plan.local_batch_sizes) == total


def test_the_v100_in_its_host_is_slower_than_a_t4_at_small_batches_only():
    v100, t4 = load_profile("V100", "resnet18"), load_profile("T4", "resnet18")
    assert v100.own_time_s(100) > t4.own_time_s(100)
    assert v100.own_time_s(150) < t4.own_time_s(150)
    gpu_bound = load_profile("V100-gavel", "resnet18")
    assert (gpu_bound.own_time_s(np.arange(1, 256)) < t4.own_time_s(np.arange(1, 256))).all()


def test_memory_caps_are_those_of_the_sources_and_bound_the_optimum():
    caps = {
        (d, w): load_profile(d, w).max_local_batch_size
        for d in ("T4", "V100")
        for w in ("resnet18", "resnet50", "bert")
    }
    assert [caps["T4", w] for w in ("resnet18", "resnet50", "bert")] == [1024, 200, 12]
    assert [caps["V100", w] for w in ("resnet18", "resnet50", "bert")] == [3072, 600, 36]
    pair = [load_profile("T4", "bert"), load_profile("V100", "bert")]
    assert optimal_split(pair, 48).local_batch_sizes == (12, 36)
    with pytest.raises(InfeasibleError, match="49"):
        optimal_split(pair, 49)


def test_a_present_slowdown_moves_the_optimum():
    profiles = [load_profile("T4", "resnet50")] * 2
    assert optimal_split(profiles, 128).local_batch_sizes == (64, 64)
    slow = optimal_split(profiles, 128, scales=(2.0, 1.0)).local_batch_sizes
    assert slow[0] < 45


@pytest.mark.parametrize(
    ("device", "workload", "message"),
    [
        ("T5", "resnet50", "unknown device 'T5'"),
        ("V100-gave", "resnet50", r"unknown device 'V100-gave' \(did you mean 'V100-gavel'\?\)"),
        ("T4", "resnet51", r"unknown workload 'resnet51' \(did you mean 'resnet5"),
        ("K80", "bert", r"no public source measured 'bert' on 'K80' \(measured there: lstm, resnet18, resnet50\)"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(device, workload, message):
    with pytest.raises(ConfigError, match=message):
        load_profile(device, workload)


def test_the_devices_and_workloads_of_the_issue_are_there():
    assert {"T4", "V100", "V100-gavel", "2080Ti", "RTX6000", "A100", "K80", "P100"} <= set(device_names())
    assert {"resnet50", "resnet18", "bert", "deepspeech2", "yolov3", "ncf", "lstm"} <= set(workload_names())
    assert {device for device, _ in profile_names()} == set(device_names())


def test_all_reduce_time_grows_with_the_workers_and_is_nothing_alone():
    network = load_network("resnet50")
    assert network.all_reduce_s(1) == 0.0
    assert network.all_reduce_s(2) == pytest.approx(0.088, abs=0.001)
    assert network.all_reduce_s(8) - network.all_reduce_s(2) == pytest.approx(6 * 0.0045, abs=0.001)
    assert load_network("resnet18").all_reduce_s(2) == pytest.approx(0.045, abs=0.001)
    assert NetworkModel().all_reduce_s(64) == 0.0
    with pytest.raises(ConfigError, match="did you mean 'resnet50 on T4'"):
        load_network("resnet5", "T4")
