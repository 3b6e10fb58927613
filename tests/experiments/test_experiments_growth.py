"""The calibration of growth drives what the policy drives: on the same norms, the same p at every look."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.calibration._bounds import Budget
from experiments.calibration.gns import measure as measure_gns
from experiments.calibration.growth import ALPHA, TESTS, blocks_of, fires, window_p_values
from rex_ray.core.noise_scale import read_moments
from rex_ray.core.observations import AllocationApplied, StepObserved
from rex_ray.core.types import Allocation, Problem, WorkerSpec
from rex_ray.policies.growth.by_noise_scale import NoiseScaleGrowth
from rex_ray.policies.growth.egmd import Egmd
from rex_ray.sim.gradients import NoisyGradients

SHARES = (16, 16, 112, 112)


def looks_of_policy(rule: Egmd, weighted: np.ndarray, reduced: np.ndarray) -> list[float]:
    """Feed one run's norms to growth; return the p that it states at each look from the first full window on."""
    problem = Problem(
        workers=tuple(WorkerSpec(rank=rank, device="T4") for rank in range(4)),
        global_batch_size=256,
        max_global_batch_size=2048,
        dataset_size=10**6,
    )
    growth = NoiseScaleGrowth(rule=rule)
    _, state = growth.init(problem, None, None)
    allocation = Allocation(version=1, local_batch_sizes=SHARES)
    state = growth.applied(state, AllocationApplied(allocation=allocation, step=0))
    zeros, found = np.zeros(4, dtype=np.int64), []
    blank = StepObserved(
        generation="g",
        epoch=0,
        step=0,
        allocation_version=1,
        num_rows=np.array(SHARES),
        data_us=zeros,
        compute_us=zeros + 10_000,
        sync_us=zeros,
        step_us=zeros + 10_000,
        num_groups=np.ones(4, dtype=np.int64),
    )
    for step, (norms, total) in enumerate(zip(weighted, reduced, strict=True)):
        seen = replace(blank, step=step, weighted_sq_norm=norms, global_sq_norm=float(total))
        answer, state = growth.observe(state, seen, None)
        if step % 4 == 3 and step >= 4 * rule.window - 1:
            found.append(answer.evidence["p_value"])
    return found


@pytest.mark.parametrize("test", ["wilcoxon linear", "wilcoxon log", "eprocess"])
@pytest.mark.parametrize("ratio", [1.0, 3.0])
def test_many_runs_at_once_are_each_run_by_itself(test, ratio):
    weighted, reduced = NoisyGradients(seed=4, num_dims=16).draw_runs(6, 80, ratio * 256, SHARES)
    trace, signal = blocks_of(weighted, reduced, 256)
    rule = Egmd(
        jump=False,
        statistic="log" if test == "wilcoxon log" else "linear",
        test="eprocess" if test == "eprocess" else "wilcoxon",
    )
    together = fires(test, trace, signal, 512.0)
    for run in range(6):
        alone = looks_of_policy(rule, weighted[run], reduced[run])
        assert (np.array(alone) < ALPHA).tolist() == together[run].tolist()
        if test != "eprocess":
            assert alone == pytest.approx(window_p_values(rule, trace, signal, 512.0)[run].tolist())


def test_blocks_are_sums_of_what_steps_say():
    weighted, reduced = NoisyGradients(seed=1, num_dims=8).draw_runs(1, 4, 300.0, SHARES)
    trace, signal = blocks_of(weighted, reduced, 256)
    zeros = np.zeros(4, dtype=np.int64)
    moments = [
        read_moments(
            StepObserved(
                generation="g",
                epoch=0,
                step=0,
                allocation_version=1,
                num_rows=np.array(SHARES),
                data_us=zeros,
                compute_us=zeros,
                sync_us=zeros,
                step_us=zeros,
                weighted_sq_norm=norms,
                num_groups=np.ones(4, dtype=np.int64),
                global_sq_norm=float(total),
            )
        )
        for norms, total in zip(weighted[0], reduced[0], strict=True)
    ]
    assert trace[0, 0] == pytest.approx(sum(m.noise_trace for m in moments))
    assert signal[0, 0] == pytest.approx(sum(m.sq_norm for m in moments))


def test_every_test_of_the_calibration_rests_at_a_clear_gradient_and_fires_at_a_hidden_one():
    for ratio, share in ((0.5, 0.0), (8.0, 1.0)):
        norms = NoisyGradients(seed=2, num_dims=256).draw_runs(4, 160, ratio * 256, SHARES)
        for test in TESTS:
            if test != "wilcoxon both":
                fired = fires(test, *blocks_of(*norms, 256), 512.0)[:, 12:]
                assert fired.mean() == pytest.approx(share, abs=0.1)


@pytest.mark.slow
def test_the_noise_scale_is_unbiased_for_skewed_shares_where_the_equal_share_formula_is_far_off():
    result = measure_gns(Budget(quick=True))
    assert result.figures["gns_bias_max_pct"] < 1.0
    skewed = [row for row in result.tables["bias"] if row["shares"] == "4/4/124/124"]
    assert all(row["equal_share_trace_bias_pct"] > 500 for row in skewed)
