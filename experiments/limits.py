"""What is attainable at all, before anything is tuned: the oracle's time on many clusters, and what being late costs.

    python -m experiments.limits --json FILE [--page docs/limits.md]

With ``--page``, the tables of a Markdown page are rewritten, each between the comments that name it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments._harness import Findings, Row, Scalar, Settings
from experiments._late import late_rows
from experiments._page import main
from experiments._rules import rule_rows
from rex_ray.scenario import learning_names, load_learning, parse_cluster
from rex_ray.sim.limits import ClusterLimits, cluster_limits

__all__ = ["attainable_row", "efficiency_rows", "measure"]

# Reference batches: 256 for the two image networks, as in published baselines; for the others a few doublings of the
# source's own, so that sixteen workers have some rows each.
_REFERENCE = {"resnet50": 256, "resnet18": 256, "bert": 48, "deepspeech2": 80, "yolov3": 32, "ncf": 1024}
_HALVES = (2, 4, 6, 8)
_MIXES = (
    *((workload, f"{half}xT4,{half}x{other}")
      for workload in ("resnet50", "resnet18")
      for other in ("V100", "V100-gavel")
      for half in _HALVES),
    *((workload, f"{half}xT4,{half}xV100")
      for workload in ("bert", "deepspeech2", "yolov3", "ncf")
      for half in _HALVES),
    *((workload, mix)
      for workload in ("resnet50", "resnet18")
      for mix in ("6xT4,2xV100", "2xT4,6xV100", "4xT4,4xA100", "4xT4,2xV100,2xA100", "4x2080Ti,4xRTX6000",
                  "2xK80,2xP100,2xV100-gavel", "8xT4", "8xV100")),
    ("resnet18", "2xGTX1070,1xM40,1xGTX750"),
)  # fmt: skip
_MULTIPLES = (1, 2, 4, 8)


def attainable_row(workload: str, cluster: str) -> Row:
    """Return one row of the table ``attainable``: the oracle's saving of time against simpler choices, in per cent."""
    found = cluster_limits(
        parse_cluster(cluster),
        workload,
        reference_batch_size=_REFERENCE[workload],
        bsp_batches=[multiple * _REFERENCE[workload] for multiple in _MULTIPLES],
    )
    row: dict[str, Scalar] = {
        "workload": workload,
        "cluster": cluster,
        "M0": found.reference_batch_size,
        "largest": found.largest_batch,
        "oracle_h": round(found.oracle_s / 3600, 3),
        "oracle_B": "{}-{}".format(*found.oracle_batches),
    }
    for multiple in _MULTIPLES:
        row[f"bsp_{multiple}M0_pct"] = _saving(found, found.bsp_s[multiple * found.reference_batch_size])
    equal, filled, balanced = found.best_fixed_equal, found.best_fixed_filled, found.best_fixed_balanced
    return row | {
        "best_fixed_equal_pct": _saving(found, equal and equal.time_s),
        "equal_B": equal and equal.global_batch_size,
        "best_fixed_filled_pct": _saving(found, filled.time_s),
        "filled_B": filled.global_batch_size,
        "best_fixed_balanced_pct": _saving(found, balanced.time_s),
        "balanced_B": balanced.global_batch_size,
        "by_doubling_pct": _saving(found, found.oracle_by_doubling_s),
    }


def _saving(found: ClusterLimits, other_s: float | None) -> float | None:
    return None if other_s is None else round(-100 * found.saving(other_s), 1) + 0.0


def efficiency_rows() -> list[Row]:
    """Return the table ``epochs``: epochs to the target, measured and predicted by efficiency alone."""
    rows: list[Row] = []
    for workload in learning_names():
        curve = load_learning(workload)
        for batch, measured in zip(curve.measured_batch_sizes, curve.measured_epochs, strict=True):
            predicted = curve.epochs_to_target(batch)
            rows.append(
                {
                    "workload": workload,
                    "B": batch,
                    "measured_epochs": measured,
                    "predicted_epochs": round(predicted, 2),
                    "error_pct": round(100 * (predicted / measured - 1), 1) + 0.0,
                }
            )
    return rows


def measure(settings: Settings) -> Findings:
    """Compute the limits of many clusters, and what being late costs."""
    attainable = [attainable_row(workload, cluster) for workload, cluster in _MIXES]
    epochs = efficiency_rows()
    figures = {
        f"oracle_vs_{name}_{workload}_{half * 2}_pct": value
        for workload in ("resnet50", "resnet18")
        for half in _HALVES
        for name, column in (("bsp256", "bsp_1M0_pct"), ("best_fixed_equal", "best_fixed_equal_pct"))
        if (value := _of(attainable, workload, f"{half}xT4,{half}xV100")[column]) is not None
    }
    return Findings(
        figures={name: float(value) for name, value in figures.items()},
        tables={"attainable": attainable, "epochs": epochs, "rules": rule_rows(), "late": late_rows(settings)},
        settings={"network": "T4", "growth_cap": 8, "min_steps_per_epoch": 16},
    )


def _of(rows: Sequence[Row], workload: str, cluster: str) -> Row:
    return next(row for row in rows if (row["workload"], row["cluster"]) == (workload, cluster))


if __name__ == "__main__":
    main("limits", measure, sys.argv[1:])
