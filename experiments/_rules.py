"""What a growth rule loses to the oracle even if it knows the noise scale and every step time."""

from __future__ import annotations

import numpy as np

from experiments._harness import Row, Scalar
from rex_ray.scenario import LearningCurve, load_learning, load_network, load_profile, parse_cluster
from rex_ray.sim import Limits, StepTimes

__all__ = ["rule_rows"]

_REFERENCE = 256
_CLUSTERS = (
    *(("resnet18", f"{half}xT4,{half}x{other}") for other in ("V100", "V100-gavel") for half in (2, 4, 8)),
    *(("resnet50", f"{half}xT4,{half}xV100") for half in (2, 4, 8)),
)
# A batch is doubled only if the noise scale is above so many times the present batch; 0: goodput alone decides.
_MULTIPLES = (2.0, 1.0, 0.5, 0.0)
_MIN_GAIN = 1.05


def rule_rows() -> list[Row]:
    """Return the table ``rules``: time lost to the oracle in per cent by each condition on the noise scale."""
    rows: list[Row] = []
    for workload, cluster in _CLUSTERS:
        learning = load_learning(workload)
        profiles = [load_profile(device, workload) for device in parse_cluster(cluster)]
        times = StepTimes(profiles, load_network(workload))
        limits = Limits(learning, times, _REFERENCE)
        row: dict[str, Scalar] = {"workload": workload, "cluster": cluster}
        for multiple in _MULTIPLES:
            lost = _doubling_s(learning, times, limits.largest_batch, multiple) / limits.oracle_s - 1
            row[f"phi>{multiple:g}B_pct"] = round(100 * lost, 1)
        rows.append(row)
    return rows


def _doubling_s(learning: LearningCurve, times: StepTimes, largest: int, multiple: float) -> float:
    """Seconds to the target of a rule that doubles iff ``phi > multiple B`` and goodput grows by 5 %."""
    batches = [_REFERENCE]
    while batches[-1] < largest:
        batches.append(min(2 * batches[-1], largest))
    step_s = times.balanced_s(np.array(batches))
    parts, noise_scale = learning.intervals()
    level, total = 0, 0.0
    for rows, phi in zip(parts, noise_scale, strict=True):
        goodput = np.array(batches) * learning.efficiency(batches, phi) / step_s
        while (
            level + 1 < len(batches)
            and phi > multiple * batches[level]
            and goodput[level + 1] > _MIN_GAIN * goodput[level]
        ):
            level += 1
        total += rows / goodput[level]
    return float(total)
