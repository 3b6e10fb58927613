"""Do live runs show what the demo shows, over seeds? A sweep of real ``RexTrainer`` runs by Ray Tune.

    python -m experiments.live_sweep --json FILE [--page docs/results.md] [--quick] [--runs DIR]

Real Ray workers train scikit-learn's digits on an emulated cluster of 2 T4 and 2 V100 (``rex-ray demo`` says what is
real and what is emulated), each policy with the same seeds. The command may be killed at any time; given again, it
runs the trials that are missing and reads the others from below ``--runs`` (default ``out/live_sweep``). Another plan
or another code begins a folder of its own.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from experiments._harness import Findings, Row, Settings, parsed_apart
from experiments._live_trials import LivePlan, run_sweep
from experiments._page import main
from workloads.arguments import Parser, output_folder

__all__ = ["findings_of", "plan_of", "sweep_folder"]

_CODE = Path(__file__).parents[1] / "rex_ray"
_NUM_SEEDS = 5


def plan_of(settings: Settings) -> LivePlan:
    """Return what is swept."""
    if settings.quick:
        return LivePlan(
            policies=("bsp", "rex"),
            seeds=(settings.seed,),
            workers={"T4": 1, "V100": 1},
            num_epochs=6,
            global_batch_size=128,
            target_accuracy=0.85,
        )
    return LivePlan(policies=("bsp", "dlb", "rex"), seeds=tuple(settings.seed + k for k in range(_NUM_SEEDS)))


def findings_of(plan: LivePlan, rows: Sequence[Row]) -> Findings:
    """Return tables of policies and of trials, and each policy's times against those of ``bsp``.

    Ratios are of medians over seeds. A time to accuracy that some run never reached gives no figure.
    """
    by_policy = {policy: [row for row in rows if row["policy"] == policy] for policy in plan.policies}
    figures = {
        "num_trials": float(len(rows)),
        "rows_once": float(all(row["rows_once"] for row in rows)),
        "emulation_error_pct": max(abs(_number(row["emulation_error_pct"])) for row in rows),
    }
    for policy in plan.policies[1:]:
        for column, name in (("tta_s", "tta"), ("time_s", "time"), ("step_ms", "step")):
            own, other = (_median(by_policy[who], column) for who in (policy, plan.policies[0]))
            if own is not None and other is not None:
                figures[f"{name}_ratio_{policy}_{plan.policies[0]}"] = own / other
        own, other = (_median(by_policy[who], "accuracy") for who in (policy, plan.policies[0]))
        if own is not None and other is not None:
            figures[f"accuracy_delta_points_{policy}_{plan.policies[0]}"] = 100 * (own - other)
    return Findings(
        figures=figures,
        tables={
            "live_sweep": [_policy_row(policy, runs) for policy, runs in by_policy.items()],
            "trials": [_columns(row, "tta_s", "time_s", "step_ms", "accuracy") for row in rows],
            "checks": [_columns(row, "changes", "shares_gap_pct", "emulation_error_pct", "rows_once") for row in rows],
        },
        settings={
            "cluster": ",".join(f"{count}x{device}" for device, count in plan.workers.items()),
            "num_seeds": len(plan.seeds),
            "num_epochs": plan.num_epochs,
            "global_batch_size": plan.global_batch_size,
            "target_accuracy": plan.target_accuracy,
        },
    )


def _columns(row: Row, *names: str) -> Row:
    return {name: row[name] for name in ("policy", "seed", *names)}


def _policy_row(policy: str, runs: Sequence[Row]) -> Row:
    times = [_number(run["time_s"]) for run in runs]
    return {
        "policy": policy,
        "tta_s": _rounded(_median(runs, "tta_s"), 2),
        "time_s": _rounded(statistics.median(times), 2),
        "fastest_s": _rounded(min(times), 2),
        "slowest_s": _rounded(max(times), 2),
        "step_ms": _rounded(_median(runs, "step_ms"), 1),
        "accuracy": _rounded(_median(runs, "accuracy"), 4),
        "shares_gap_pct": _rounded(_median(runs, "shares_gap_pct"), 1),
    }


def _rounded(value: float | None, digits: int) -> float | None:
    """Round for a reader; figures keep every digit."""
    return None if value is None else round(value, digits)


def _median(runs: Sequence[Row], column: str) -> float | None:
    """Return the median, None where a run has no value."""
    values = [run[column] for run in runs]
    return None if None in values else statistics.median(map(_number, values))


def _number(value: object) -> float:
    assert isinstance(value, int | float), f"{value!r} is no figure of a run"
    return float(value)


def sweep_folder(plan: LivePlan, runs: Path) -> Path:
    """Return the folder of a plan, run by this code: the same command finds it again."""
    digest = hashlib.sha256(json.dumps(asdict(plan), sort_keys=True).encode())
    for file in sorted(path for path in _CODE.rglob("*") if path.suffix in {".py", ".toml"}):
        digest.update(str(file.relative_to(_CODE)).encode() + b"\0" + file.read_bytes())
    return runs / f"live_sweep-{digest.hexdigest()[:12]}"


def _main(arguments: Sequence[str]) -> None:
    parser = Parser(add_help=False)
    parser.add_argument(
        "--runs",
        type=output_folder,
        default="out/live_sweep",
        metavar="DIR",
        help="where runs are kept (default: %(default)s)",
    )
    known, others = parsed_apart(parser, arguments)

    def measure(settings: Settings) -> Findings:
        """Run live trials of each policy with each seed by Ray Tune, and compare them."""
        plan = plan_of(settings)
        folder = sweep_folder(plan, known.runs)
        print(f"runs are kept in {folder}", file=sys.stderr)
        return findings_of(plan, run_sweep(plan, folder))

    main("live_sweep", measure, others, apart=[parser])


if __name__ == "__main__":
    _main(sys.argv[1:])
