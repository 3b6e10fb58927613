"""How often the audit believes noise, and how often slowdowns: ``python -m experiments.audit_level --json FILE``.

Runs of nothing but noise (a first-order autoregression of log times, as on shared clusters) are audited, and the part
of them is counted in which ``p`` is at most a level: an honest ``p`` keeps it there. The same with slowdowns among them
says what the audit can see. Times are drawn as such, without a controller: the trigger is that of ``rex``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from scipy.signal import lfilter

from experiments._harness import Findings, Row, Settings, main
from rex_ray.core.types import FloatArray
from rex_ray.policies.seams import Trigger
from rex_ray.policies.trigger.two_level import TwoLevelTrigger
from rex_ray.sim.audit import OwnTimes, audit, count_alarms

__all__ = ["level_row", "measure", "noisy_times"]

DEVICES = ("T4", "T4", "V100", "V100")
NUM_STEPS, NUM_COPIES, BLOCK_STEPS = 640, 19, 32
SLOW_STEPS = 60

NULLS = tuple((rho, sd) for rho in (0.0, 0.6, 0.9) for sd in (0.01, 0.04, 0.08, 0.12))
SLOWED = ((0.6, 0.01), (0.6, 0.04), (0.9, 0.04), (0.9, 0.08))
_FORGETTING = 256


def noisy_times(rho: float, sd: float, num_slow: int, seed: int) -> OwnTimes:
    """Return own times of one run: noise, and ``num_slow`` times in a row one worker 1.5 times as slow for a while."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, 11))))
    news = rng.standard_normal((NUM_STEPS + _FORGETTING, len(DEVICES))) * np.sqrt(1 - rho**2)
    logs: FloatArray = sd * lfilter([1.0], [1.0, -rho], news, axis=0)[_FORGETTING:]
    borders = np.linspace(100, NUM_STEPS, num_slow + 1).astype(int)
    for start, stop in pairwise(borders):
        first = int(rng.integers(start, max(stop - SLOW_STEPS, start + 1)))
        logs[first : first + SLOW_STEPS, rng.integers(len(DEVICES))] += np.log(1.5)
    logs -= np.median(logs, axis=0)
    return OwnTimes(
        devices=DEVICES,
        factors=np.exp(logs),
        usual_us=np.array([200_000.0, 200_000.0, 150_000.0, 150_000.0]),
        num_rows=np.array([64, 64, 128, 128]),
    )


def level_row(rho: float, sd: float, num_slow: int, seeds: range) -> Row:
    """Return one row: how often ``p`` is at most .05 and .1, in per cent of the runs, and what was raised."""
    trigger: Trigger[Any] = TwoLevelTrigger()
    p_values, alarms = [], []
    for seed in seeds:
        times = noisy_times(rho, sd, num_slow, seed)
        alarms.append(count_alarms(trigger, times).num_alarms)
        # Without an alarm no copy can have fewer: p is 1.
        found = (
            audit(trigger, [times], block_steps=BLOCK_STEPS, num_copies=NUM_COPIES, seed=seed) if alarms[-1] else None
        )
        p_values.append(1.0 if found is None else found.p_value)
    believed = np.array(p_values)
    return {
        "correlation": rho,
        "sd_pct": round(100 * sd),
        "slowdowns": num_slow,
        "runs": len(seeds),
        "alarms_per_run": round(float(np.mean(alarms)), 2),
        "p_05_pct": round(100 * float((believed <= 0.05 + 1e-9).mean()), 1),
        "p_10_pct": round(100 * float((believed <= 0.1 + 1e-9).mean()), 1),
    }


def measure(settings: Settings) -> Findings:
    """Measure how often the audit is wrong about noise, and right about slowdowns."""
    first = settings.seed * 10_000
    nulls, slowed = (20, 2) if settings.quick else (200, 20)
    rows = [level_row(rho, sd, 0, range(first, first + nulls)) for rho, sd in NULLS]
    rows += [level_row(rho, sd, 3, range(first, first + slowed)) for rho, sd in SLOWED]
    alone = [row for row in rows if not row["slowdowns"]]
    figures = {
        f"audit_highest_p_{level}_pct": max(float(row[f"p_{level}_pct"] or 0) for row in alone)
        for level in ("05", "10")
    }
    return Findings(figures=figures, tables={"audit": rows})


if __name__ == "__main__":
    main("audit_level", measure)
