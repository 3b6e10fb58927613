"""All that is computed of a run, from its journal alone."""

from __future__ import annotations

import numpy as np

from rex_ray.report.computing.ledger import RunLedger, ledger_of
from rex_ray.report.computing.run_curves import KindEvidence, RunCurves, fit_run
from rex_ray.report.computing.saving import saving_of
from rex_ray.report.computing.usage import usage_of
from rex_ray.report.facts import CurveFit, RunFacts
from rex_ray.report.reading.schema import RunData

__all__ = ["run_facts"]

_DRAWN = 80


def run_facts(run: RunData) -> RunFacts:
    """Return what is computed of a run; nothing where some kind of device has no clean step.

    What the run would have been under other policies is not among it: that takes the simulator, see
    ``rex_ray.cli.counterfactual``.
    """
    curves = fit_run(run)
    if curves is None:
        return RunFacts()
    usage, ledger = usage_of(curves), ledger_of(curves, run.decisions)
    return RunFacts(
        saving=saving_of(curves),
        fits=tuple(_curve_fit(kind, _farthest(curves, at)) for at, kind in enumerate(curves.kinds)),
        rii=usage.rii,
        rii_start=usage.start,
        rii_end=usage.end,
        rii_steps=usage.steps,
        rii_values=usage.values,
        waiting_fraction=usage.waiting,
        ledger=ledger.lost,
        unavoidable=ledger.base,
        oracle_s=ledger.oracle_s,
        overhead_fraction=(ledger.trials_s + ledger.switching_s) / curves.run_s,
        overhead_method=_overhead_method(ledger),
    )


def _overhead_method(ledger: RunLedger) -> str:
    return (
        f"Trials and probes: {ledger.trials_s:.1f} s beyond what the shares before them would have taken in the same "
        f"steps, by the fitted curves; first steps after a change: {ledger.switching_s:.1f} s beyond their rows and "
        "speeds. Not in it, since no step of the journal is without it: what measuring itself costs every step (about "
        "1 % of short steps, python -m experiments.overhead), and a search helper's processor time."
    )


def _farthest(curves: RunCurves, kind: int) -> float:
    sizes = curves.kinds[kind].sizes.keys
    return float(min(1.25 * sizes[-1], curves.kinds[kind].fit.shape.max_trusted_rows))


def _curve_fit(kind: KindEvidence, farthest: float) -> CurveFit:
    rows = kind.sizes.keys.astype(np.float64)
    drawn = np.unique(np.concatenate([np.linspace(0.0, farthest, _DRAWN), rows]))
    return CurveFit(
        device=kind.device,
        rows=rows,
        own_s=kind.sizes.middle,
        low_s=kind.sizes.low,
        high_s=kind.sizes.high,
        num_steps=kind.sizes.counts.astype(np.float64),
        fitted_rows=drawn,
        fitted_s=kind.fit.shape.predict_s(drawn),
    )
