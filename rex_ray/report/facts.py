"""What a page says beyond the journal's own rows: fits, losses, estimates. Plain values, whoever computed them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rex_ray.core.types import FloatArray, IntArray, read_only

__all__ = ["CurveFit", "Estimate", "LedgerRow", "RunFacts", "Saving"]

_NO_STEPS: IntArray = read_only([], np.int64)
_NO_VALUES: FloatArray = read_only([], np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CurveFit:
    """The step-time curve of a kind of device, and what it was fitted to.

    Attributes:
        device: kind of device.
        rows: distinct local batch sizes that were measured, rising, shape ``[m]``.
        own_s: median own time at each in seconds, slowdowns that last divided out, shape ``[m]``.
        low_s: lower quartile, shape ``[m]``.
        high_s: upper quartile, shape ``[m]``.
        num_steps: worker-steps behind each, shape ``[m]``.
        fitted_rows: where the curve is drawn, rising, shape ``[p]``.
        fitted_s: the curve there, shape ``[p]``.
    """

    device: str
    rows: FloatArray
    own_s: FloatArray
    low_s: FloatArray
    high_s: FloatArray
    num_steps: FloatArray
    fitted_rows: FloatArray
    fitted_s: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The headline: what the run saved against equal shares of the same global batches.

    Attributes:
        fraction: of the time that equal shares would have taken, saved; negative: lost.
        low: lower end of its 95 % interval.
        high: upper end.
        equal_s: estimated time of the same steps in equal shares.
        run_s: time of the run's steps.
        method: how it was estimated, in a sentence or two.
    """

    fraction: float
    low: float
    high: float
    equal_s: float
    run_s: float
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One part of the time that the run took beyond an oracle's on its own curves; the parts sum exactly.

    Attributes:
        name: what it was lost to.
        seconds: lost; negative: gained.
        fraction: of the run's own time.
        meaning: one sentence for a reader who does not know the method.
    """

    name: str
    seconds: float
    fraction: float
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the run would have been under another policy: a replay on its fitted curves, never a measurement.

    Attributes:
        policy: name of the policy.
        seconds: median estimated time to the run's own amount of progress.
        low_s: fastest of the replays.
        high_s: slowest.
        to_run: ``seconds`` to the time of this run's own policy, replayed alike.
        num_replays: seeds behind it.
        remark: what to know of it, or ``""``.
    """

    policy: str
    seconds: float
    low_s: float
    high_s: float
    to_run: float
    num_replays: int
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunFacts:
    """What is computed of a run; an empty part means that the run does not hold what it needs.

    Attributes:
        saving: the headline, or None.
        fits: a curve per kind of device.
        ledger: where the run lost its time.
        estimates: other policies, the run's own first.
        rii: the paper's resource imbalance index (METHODS of the docs), or None.
        overhead_fraction: share of the run's time spent on control: what probes, trials and switches cost, or None.
        overhead_method: how that was taken, in a sentence.
        oracle_s: seconds of the same steps under the best split for every moment's speeds, known at once, by the fitted
            curves: the run's time less the sum of ``ledger``; None where that is empty.
        unavoidable: what ``oracle_s`` consists of: the parts sum to it exactly, so together with ``ledger`` to the run.
        rii_start: ``rii`` over the first tenth of the steps, or None.
        rii_end: ``rii`` over the last tenth, or None.
        rii_steps: first steps of even stretches of the run, rising, shape ``[p]``; empty where unknown.
        rii_values: ``rii`` over each stretch, shape ``[p]``.
        waiting_fraction: part of the workers' time that they waited for the slowest and for the reduction, or None.
    """

    saving: Saving | None = None
    fits: tuple[CurveFit, ...] = ()
    ledger: tuple[LedgerRow, ...] = ()
    estimates: tuple[Estimate, ...] = ()
    rii: float | None = None
    overhead_fraction: float | None = None
    overhead_method: str = ""
    oracle_s: float | None = None
    unavoidable: tuple[LedgerRow, ...] = ()
    rii_start: float | None = None
    rii_end: float | None = None
    rii_steps: IntArray = field(default_factory=lambda: _NO_STEPS)
    rii_values: FloatArray = field(default_factory=lambda: _NO_VALUES)
    waiting_fraction: float | None = None
