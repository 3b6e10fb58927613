"""Runs with everything on them, made by hand, of any length and width: what a report's page is measured with."""

from __future__ import annotations

import numpy as np

from rex_ray.report.facts import CurveFit, Estimate, LedgerRow, RunFacts, Saving
from rex_ray.report.reading.schema import (
    DecisionRow,
    EventRow,
    FindingRow,
    GroupData,
    MetricPoint,
    NoiseSeries,
    RunData,
    SearchRow,
    TrialRow,
)

__all__ = ["make_facts", "make_run"]


def make_run(
    num_workers: int = 4, num_steps: int = 200, *, name: str = "run", policy: str = "rex", num_metrics: int = 8
) -> RunData:
    """A run with every kind of section; half T4, half V100, shares moved halfway."""
    rng = np.random.Generator(np.random.PCG64(num_workers))
    steps = np.arange(num_steps)
    later = steps >= num_steps // 2
    half = num_workers // 2
    devices = ("T4",) * half + ("V100",) * (num_workers - half)
    moved = (16,) * half + (48,) * (num_workers - half)
    num_rows = np.where(later[:, None], [moved], [(32,) * num_workers])
    per_row = np.array([0.004] * half + [0.0013] * (num_workers - half))
    own_s = (num_rows * per_row + 0.005) * rng.lognormal(0.0, 0.03, num_rows.shape)
    group = GroupData(
        generation="g",
        devices=devices,
        nodes=tuple(f"node-{rank}" for rank in range(num_workers)),
        steps=steps,
        versions=later.astype(np.int64),
        num_rows=num_rows,
        own_s=own_s,
        step_s=own_s.max(axis=1) + 0.01,
        partial=steps % 50 == 49,
        steady=steps >= 4,
    )
    blocks = np.arange(32, num_steps, 16) if num_steps <= 2000 else np.linspace(32, num_steps - 1, 6000).astype(int)
    return RunData(
        name=name,
        policy=policy,
        outcome="finished",
        settings={"policy": policy, "seed": "0"},
        groups=(group,),
        metrics=tuple(
            MetricPoint(
                elapsed_s=2.0 * k, epoch=k, step=k, metrics={"accuracy": 1 - 0.5 / (k + 1), "loss": 2 / (k + 1)}
            )
            for k in range(num_metrics)
        ),
        decisions=(
            DecisionRow(
                number=1,
                kind="first",
                decided_at_step=-1,
                reason="first allocation of the group",
                after=(32,) * num_workers,
                version=0,
                applied_at_step=0,
            ),
            DecisionRow(
                number=2,
                kind="reallocate",
                decided_at_step=num_steps // 2 - 4,
                reason="the exact split on the measured curves saves <31%> of 0.133 s",
                before=(32,) * num_workers,
                after=moved,
                version=1,
                applied_at_step=num_steps // 2,
                predicted_gain=0.31,
                measured_gain=0.33,
                lr_factor=1.2,
            ),
        ),
        findings=(FindingRow(part="trigger", step=9, verdict="keep", count=4, reason="no rank's speed has changed"),),
        searches=(
            SearchRow(
                search_id="s",
                kind="measured",
                started_at_step=12,
                plan=moved,
                trials=(TrialRow(trial=0, asked_at_step=13, local_batch_sizes=moved, objective=-2.5, slowest_s=0.08),),
                outcome="finished",
                result=moved,
            ),
        ),
        events=(
            EventRow(step=num_steps // 4, kind="slow", rank=1, text="rank 1 takes 2 times as long"),
            EventRow(step=num_steps // 3, kind="lost", rank=0, text="its machine went away"),
        ),
        noise=NoiseSeries(
            steps=blocks,
            batch=np.full(len(blocks), 32 * num_workers),
            noise_scale=200.0 * (1 + blocks / num_steps),
            p_value=np.linspace(0.5, 0.001, len(blocks)),
            window=8,
            block_steps=4,
        ),
        notices=("left out, stale: 3 or more",),
    )


def make_facts() -> RunFacts:
    """Facts with every part."""
    rows = np.array([8.0, 16.0, 32.0, 48.0])
    fits = tuple(
        CurveFit(
            device=device,
            rows=rows,
            own_s=rows * scale,
            low_s=rows * scale * 0.95,
            high_s=rows * scale * 1.1,
            num_steps=np.full(4, 30.0),
            fitted_rows=np.linspace(1.0, 60.0, 80),
            fitted_s=np.linspace(1.0, 60.0, 80) * scale,
        )
        for device, scale in (("T4", 0.004), ("V100", 0.0013))
    )
    return RunFacts(
        saving=Saving(fraction=0.33, low=0.3, high=0.35, equal_s=91.0, run_s=61.0, method="By refits of its curves."),
        fits=fits,
        ledger=(
            LedgerRow(name="before the first split", seconds=4.0, fraction=0.066, meaning="equal shares at first"),
            LedgerRow(name="reaction", seconds=1.5, fraction=0.025, meaning="from onset to the move"),
            LedgerRow(name="noise", seconds=-0.4, fraction=-0.007, meaning="won by chance"),
        ),
        estimates=(
            Estimate(policy="rex", seconds=60.0, low_s=58.0, high_s=63.0, to_run=1.0, num_replays=5),
            Estimate(policy="bsp", seconds=92.0, low_s=90.0, high_s=95.0, to_run=1.53, num_replays=5, remark="equal"),
        ),
        rii=0.47,
        overhead_fraction=0.012,
        overhead_method="Probes, trials and switches.",
    )
