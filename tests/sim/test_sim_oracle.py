"""The limits: in closed form where there is one, in their order everywhere, and the same as the solvers' in use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rex_ray.core.errors import ConfigError, InfeasibleError
from rex_ray.core.split import exact_split
from rex_ray.core.types import Problem, WorkerSpec, read_only
from rex_ray.policies.limits import equal_shares
from rex_ray.scenario import NetworkModel, load_network, load_profile
from rex_ray.scenario.cluster import parse_cluster
from rex_ray.scenario.learning import learning_names, load_learning
from rex_ray.sim.limits import cluster_limits
from rex_ray.sim.oracle import GROWTH_CAP, Limits
from rex_ray.sim.step_times import StepTimes

QUIET = NetworkModel()
MEASURED_EVERYWHERE = ("T4", "V100", "V100-gavel", "K80", "P100", "2080Ti", "A100")

clusters = st.lists(st.sampled_from(MEASURED_EVERYWHERE), min_size=1, max_size=8)


def profiles(devices, workload="resnet18"):
    return [load_profile(device, workload) for device in devices]


@settings(deadline=None, max_examples=60)
@given(clusters, st.floats(0, 1), st.sampled_from([1, 8, 24]))
def test_balanced_times_are_those_of_the_exact_split(devices, part, multiple):
    chosen = profiles(devices)
    times = StepTimes(chosen, QUIET, multiple=multiple)
    batch = multiple * round(len(devices) + part * (times.most_rows // multiple - len(devices)))
    caps = [profile.max_local_batch_size for profile in chosen]
    plan = exact_split([profile.curve for profile in chosen], batch, upper=caps, multiple=multiple)
    assert times.balanced_s(np.array([batch]))[0] == pytest.approx(plan.step_time_s, rel=1e-6)


@settings(deadline=None, max_examples=60)
@given(clusters, st.floats(0, 1), st.sampled_from([1, 8]))
def test_filled_times_are_those_of_the_shares_of_bsp(devices, part, multiple):
    chosen = profiles(devices)
    times = StepTimes(chosen, QUIET, multiple=multiple)
    batch = multiple * round(len(devices) + part * (times.most_rows // multiple - len(devices)))
    workers = tuple(
        WorkerSpec(rank=rank, device=profile.device, max_local_batch_size=profile.max_local_batch_size)
        for rank, profile in enumerate(chosen)
    )
    problem = Problem(
        workers=workers,
        global_batch_size=batch,
        max_global_batch_size=batch,
        dataset_size=10**6,
        local_batch_multiple=multiple,
    )
    shares = equal_shares(problem, batch)
    slowest = max(float(profile.own_time_s(rows)) for profile, rows in zip(chosen, shares, strict=True))
    assert times.filled_s(np.array([batch]))[0] == pytest.approx(slowest, rel=1e-12)
    if batch <= times.most_equal_rows:
        assert max(shares) - min(shares) <= multiple
        assert times.equal_s(np.array([batch]))[0] == pytest.approx(slowest, rel=1e-12)


def test_the_reduction_is_added_to_every_step():
    network = load_network("resnet50")
    chosen = profiles(["T4", "T4", "V100"], "resnet50")
    batch = np.array([100, 300])
    added = StepTimes(chosen, network).balanced_s(batch) - StepTimes(chosen, QUIET).balanced_s(batch)
    assert added == pytest.approx(network.base_s + network.per_worker_s)


@pytest.mark.parametrize("batch", [3, 801])
def test_a_batch_that_does_not_fit_is_refused(batch):
    times = StepTimes(profiles(["T4"] * 4, "resnet50"), QUIET)
    with pytest.raises(InfeasibleError, match=f"{batch} rows does not fit"):
        times.balanced_s(np.array([batch]))


@settings(deadline=None, max_examples=40)
@given(clusters, st.sampled_from([64, 128, 300]), st.sampled_from(["resnet18", "resnet50"]))
def test_every_freedom_more_can_only_help(devices, reference, workload):
    times = StepTimes(profiles(devices, workload), QUIET)
    if reference > times.most_equal_rows:
        return
    limits = Limits(load_learning(workload), times, reference)
    oracle, balanced = limits.oracle_s, limits.best_fixed_balanced
    equal, filled = limits.best_fixed_equal, limits.best_fixed_filled
    within = 1 + 1e-12
    assert oracle <= limits.oracle_by_doubling_s * within
    assert oracle <= balanced.time_s * within
    assert balanced.time_s <= filled.time_s * within <= equal.time_s * within**2
    assert limits.balanced_s(balanced.global_batch_size) == pytest.approx(balanced.time_s)
    for batch in range(reference, min(limits.largest_batch, times.most_equal_rows) + 1, 37):
        assert equal.time_s <= limits.bsp_s(batch) * within
        assert limits.balanced_s(batch) <= limits.bsp_s(batch) * within


def test_one_kind_and_a_constant_noise_scale_have_a_closed_form():
    learning = load_learning("resnet50")
    phi, m0 = 5_000.0, learning.reference_batch_size
    constant = replace(learning, noise_scale=read_only(np.full(learning.noise_scale.size, phi), np.float64))
    network, device = load_network("resnet50"), load_profile("T4", "resnet50")
    limits = Limits(constant, StepTimes([device] * 4, network), 256)
    batch = 512
    step_s = float(device.own_time_s(batch // 4)) + network.base_s + 2 * network.per_worker_s
    expected = learning.target_rows * step_s / batch * (phi + batch) / (phi + m0)
    assert limits.bsp_s(batch) == pytest.approx(expected, rel=1e-12)
    assert limits.balanced_s(batch) == pytest.approx(expected, rel=1e-12)
    # One noise scale, one best batch: the oracle has nothing to follow.
    assert limits.oracle_s == pytest.approx(limits.best_fixed_balanced.time_s, rel=1e-12)
    assert limits.oracle_batches == (limits.best_fixed_balanced.global_batch_size,) * 2


def test_growth_stays_below_all_of_its_caps():
    wide = cluster_limits(parse_cluster("16xA100"), "resnet18", reference_batch_size=128, network="none")
    assert wide.largest_batch == GROWTH_CAP * 128
    by_data = cluster_limits(parse_cluster("16xA100"), "deepspeech2", reference_batch_size=80, network="none")
    assert by_data.largest_batch == 7140 // 16
    by_memory = cluster_limits(parse_cluster("2xT4"), "resnet50", reference_batch_size=256)
    assert by_memory.largest_batch == by_memory.most_rows == 400


def test_what_does_not_fit_in_equal_shares_is_left_open():
    mixed = cluster_limits(parse_cluster("T4,V100"), "resnet50", reference_batch_size=512, bsp_batches=[512])
    assert mixed.bsp_s == {512: None}
    assert mixed.best_fixed_equal is None
    assert mixed.best_fixed_filled.time_s > mixed.best_fixed_balanced.time_s >= mixed.oracle_s


@pytest.mark.parametrize(
    ("cluster", "workload", "options", "said"),
    [
        ("T4,P100", "bert", {}, "no public source measured 'bert' on 'P100'"),
        ("2xT4", "lstm", {}, "no public source measured the noise scale of 'lstm'"),
        ("2xT4", "resnet", {}, "did you mean 'resnet"),
        (
            "2xT4",
            "resnet50",
            {"network": "V100"},
            "no measured all-reduce times of 'resnet50' on 'V100' .*did you mean",
        ),
        ("2xT4", "resnet50", {"network": "zzz"}, r"on 'zzz' \(known: 2080Ti, A100, T4, none\)"),
        ("2xT4", "resnet50", {"reference_batch_size": 500}, "hold 400 together"),
    ],
)
def test_what_cannot_be_computed_is_named(cluster, workload, options, said):
    with pytest.raises(ConfigError, match=said):
        cluster_limits(parse_cluster(cluster), workload, **options)


@pytest.mark.parametrize("workload", learning_names())
def test_the_defaults_work_for_every_workload(workload):
    found = cluster_limits(parse_cluster("2xT4,2xV100"), workload)
    assert 0 < found.oracle_s < np.inf
    assert found.reference_batch_size == load_learning(workload).reference_batch_size
