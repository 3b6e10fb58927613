"""ResNet-50 on ImageNet on 4, 8, 12 and 16 GPUs, half T4, half V100: time to 75 % by measured times and noise scales.

    python -m experiments.imagenet --json FILE [--record DIR] [--page docs/results.md] [--quick]

Nothing is trained. Step times, memory limits and all-reduce times are those of published profiles, progress follows
published gradient noise scales (``docs/limits.md`` says from where, and how far both can be trusted). Two V100 are
compared: the one that was measured by the same study as the T4, in a host that holds it back at small batches, and
another study's, whose memory was used up to 128 rows only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from experiments._harness import Findings, Row, Scalar, Settings
from experiments._matrix import Played, paired_effect_pct, play_all, ratio, seeded
from experiments.lab.cells import Cell
from experiments.lab.command import Runner, main
from experiments.lab.fixed import BATCH_OPTION
from experiments.lab.study import Study
from rex_ray.scenario import load_learning, load_profile, parse_cluster
from rex_ray.sim import Limits, StepTimes
from rex_ray.sim.limits import network_model

__all__ = ["HALVES", "PROFILES", "cell_of", "method_rows", "study"]

HALVES = (2, 4, 6, 8)
PROFILES = {"V100": "same source", "V100-gavel": "another source"}
REFERENCE = 256

# The main comparison has every seed; the other profile and the other methods, whose runs differ by less than a per cent
# from seed to seed and take minutes each, have a few.
_ALL_SEEDS, _OTHER_SEEDS, _FEW_SEEDS, _QUICK_SEEDS = 20, 5, 1, 1
_MANY = ("bsp", "rex", "oracle", "oracle_delayed", "best_fixed_equal", "best_fixed_balanced")
_FEW = ("dlb", "pollux", "cannikin", "rex, charged in proportion")
# What a quick run has time for; the fixed batches need no controller and take no time.
_QUICK = ("bsp", "rex", "oracle", "best_fixed_equal", "best_fixed_balanced")


def cell_of(method: str, half: int, profile: str) -> Cell:
    """Return the run of a method, seed 0.

    ``bsp`` never changes its shares, so it is played without its controller, as the fixed controls are; their batch is
    found by formula on quiet step times (``sim.Limits``), which is what a sweep would find, and costs them nothing.
    Methods are charged the .75 ms per step that measuring was seen to take of the host; charged 1.3 per cent of a step
    instead, as at steps of 58 ms, ``rex`` is a row of its own.

    Args:
        method: as in the table.
        half: GPUs of each kind.
        profile: which V100.
    """
    cell = Cell(method=method, workload="resnet50", cluster=f"{half}xT4,{half}x{profile}", global_batch_size=REFERENCE)
    match method:
        case "bsp":
            return replace(cell, method="best_fixed_equal", options={BATCH_OPTION: REFERENCE})
        case "best_fixed_equal" | "best_fixed_balanced":
            return replace(cell, options={BATCH_OPTION: _best_batch(cell)})
        case "oracle" | "oracle_delayed":
            return cell
        case "rex, charged in proportion":
            return replace(cell, method="rex", charges="measured")
        case _:
            return replace(cell, charges="host")


def _best_batch(cell: Cell) -> int:
    profiles = [load_profile(device, cell.workload) for device in parse_cluster(cell.cluster)]
    times = StepTimes(profiles, network_model(cell.workload, cell.network))
    limits = Limits(load_learning(cell.workload), times, cell.global_batch_size)
    best = limits.best_fixed_equal if cell.method == "best_fixed_equal" else limits.best_fixed_balanced
    return best.global_batch_size


def method_rows(played: Played, half: int, profile: str, seeds_of: Mapping[str, Sequence[int]]) -> list[Row]:
    """Return one row per method on one cluster.

    ``to_bsp``, ``to_oracle`` and ``to_late`` are ratios of median times to the target over the seeds that both have;
    ``over_oracle_pct`` is the median over pairs of equal seeds, with a 95 % interval.
    """
    rows: list[Row] = []
    for method, seeds in seeds_of.items():
        mine = seeded(cell_of(method, half, profile), seeds)
        others = {
            name: seeded(cell_of(name, half, profile), seeds)
            for name in ("bsp", "oracle", "oracle_delayed")
            if name in seeds_of
        }
        over, low, high = paired_effect_pct(played, mine, others["oracle"], seed=0)
        row: dict[str, Scalar] = {
            "gpus": 2 * half,
            "V100": profile,
            "method": method,
            "seeds": len(seeds),
            "tta_h": round(played.median_s(mine) / 3600, 3),
            "spread_pct": round(played.spread_pct(mine), 2),
            "B": _batches(played, mine),
            "to_bsp": round(ratio(played, mine, others["bsp"]), 4),
            "to_oracle": round(ratio(played, mine, others["oracle"]), 4),
            "over_oracle_pct": round(over, 2) + 0.0,
            "low": round(low, 2) + 0.0,
            "high": round(high, 2) + 0.0,
            "switches": played[mine[0]].num_switches,
        }
        rows.append(row)
    return rows


def _batches(played: Played, cells: Sequence[Cell]) -> str:
    results = [played[cell] for cell in cells]
    return f"{min(result.smallest_batch for result in results)}-{max(result.largest_batch for result in results)}"


def study(settings: Settings, run: Runner) -> Study:
    """Train ResNet-50 to its target on ever more GPUs, by every method."""
    worlds = [(half, profile) for profile in PROFILES for half in HALVES]
    if settings.quick:
        worlds = [(2, "V100")]
    named = [
        (method, cell)
        for half, profile in worlds
        for method, seeds in _seeds_of(settings, profile).items()
        for cell in seeded(cell_of(method, half, profile), seeds)
    ]
    played = play_all((cell for _, cell in named), run)
    rows = [row for half, profile in worlds for row in method_rows(played, half, profile, _seeds_of(settings, profile))]
    compared = played.comparison(named)
    return Study(
        findings=Findings(
            figures=_figures(rows),
            tables={"imagenet": rows},
            settings={
                "bsp_B": REFERENCE,
                "target": load_learning("resnet50").target,
                "dlb_period": "epoch",
                "cannikin_period": "epoch",
                "oracle_delay_steps": 10,
                "network": "T4",
                "charges": "host",
            },
        ),
        comparison=compared,
        headline=compared.worlds()[0],
    )


def _figures(rows: Sequence[Row]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for row in rows:
        if row["method"] == "rex":
            ending = str(row["gpus"]) if row["V100"] == "V100" else f"{row['gpus']}_other_profile"
            figures[f"time_ratio_rex_bsp_{ending}"] = float(row["to_bsp"] or 0)
            figures[f"ratio_rex_oracle_{ending}"] = float(row["to_oracle"] or 0)
            figures[f"ratio_rex_best_fixed_balanced_{ending}"] = round(
                float(row["tta_h"] or 0) / float(_of(rows, row, "best_fixed_balanced")["tta_h"] or 0), 4
            )
            figures[f"ratio_rex_best_fixed_equal_{ending}"] = round(
                float(row["tta_h"] or 0) / float(_of(rows, row, "best_fixed_equal")["tta_h"] or 0), 4
            )
    return figures


def _seeds_of(settings: Settings, profile: str) -> Mapping[str, Sequence[int]]:
    if settings.quick:
        return {method: range(settings.seed, settings.seed + _QUICK_SEEDS) for method in _QUICK}
    counts = dict.fromkeys(_MANY, _ALL_SEEDS if profile == "V100" else _OTHER_SEEDS) | dict.fromkeys(_FEW, _FEW_SEEDS)
    return {method: range(settings.seed, settings.seed + count) for method, count in counts.items()}


def _of(rows: Sequence[Row], like: Row, method: str) -> Row:
    return next(
        row for row in rows if (row["gpus"], row["V100"], row["method"]) == (like["gpus"], like["V100"], method)
    )


if __name__ == "__main__":
    main("imagenet", study, sys.argv[1:])
