"""How far methods are from the oracle, on whole training runs in the simulator, and what loses how much.

    python -m experiments.oracle_gap --json FILE [--page docs/limits.md] [--quick]

Progress is made by measured noise scales (``TraceLearner``), norms are taken when a live run takes them, step times are
the public profiles' with the noise of dedicated machines, and the controller is the production one; searches are
answered by nobody. The parts are those of ``sim.regret``, in per cent of the oracle's time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from experiments._harness import Findings, Row, Scalar, Settings
from experiments._page import main
from experiments.lab.cells import Cell
from experiments.lab.play import play
from rex_ray.scenario import parse_cluster

__all__ = ["gap_row", "measure"]

_METHODS = ("bsp", "dlb", "rex", "rex-goodput", "rex-growth10")
_TRIGGERED = ("rex", "rex-no-trigger")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A cluster, what it trains from which reference batch, how often a worker slows down, and who trains there."""

    workload: str
    cluster: str
    reference: int = 256
    per_1000: float = 0.0
    methods: tuple[str, ...] = _METHODS
    num_seeds: int = 3

    def cell(self, method: str, seed: int) -> Cell:
        """Return one run."""
        return Cell(
            method=method,
            workload=self.workload,
            cluster=self.cluster,
            seed=seed,
            global_batch_size=self.reference,
            disturbance=f"random:{self.per_1000:g}" if self.per_1000 else "none",
        )


_REX = ("rex",)
_WORLDS = (
    World(workload="resnet18", cluster="2xT4,2xV100"),
    World(workload="resnet18", cluster="4xT4,4xV100"),
    World(workload="resnet18", cluster="4xT4,4xV100-gavel"),
    World(workload="resnet18", cluster="4xT4,4xV100", per_1000=0.3, methods=_TRIGGERED),
    World(workload="resnet18", cluster="4xT4,4xV100", per_1000=1.0, methods=_TRIGGERED),
    World(workload="resnet18", cluster="4xT4,4xV100", per_1000=2.4, methods=_TRIGGERED),
    World(workload="deepspeech2", cluster="4xT4,4xV100", reference=64, methods=_REX),
    World(workload="bert", cluster="4xT4,4xV100", reference=96, methods=_REX),
    World(workload="resnet50", cluster="2xT4,2xV100", methods=_REX, num_seeds=1),
    World(workload="resnet50", cluster="4xT4,4xV100", methods=_REX, num_seeds=1),
)


def gap_row(world: World, method: str, num_seeds: int) -> Row:
    """Return one row: medians over seeds, in per cent of the oracle's time on the very same steps.

    ``delayed_pct`` is the gap to an oracle that hears of each episode ten steps late; the parts are the ledger's.
    """
    gaps, delayed, parts = [], [], []
    for seed in range(num_seeds):
        found, oracle, late = (play(world.cell(name, seed)) for name in (method, "oracle", "oracle_delayed"))
        gaps.append(100 * (found.total_s / oracle.total_s - 1))
        delayed.append(100 * (found.total_s / late.total_s - 1))
        parts.append({name: 100 * lost_s / oracle.total_s for name, lost_s in found.lost_s.items()})
    row: dict[str, Scalar] = {
        "workload": world.workload,
        "cluster": world.cluster,
        "M0": world.reference,
        "per_1000": world.per_1000,
        "method": method,
        "seeds": num_seeds,
        "gap_pct": round(median(gaps), 1),
        "lowest": round(min(gaps), 1),
        "highest": round(max(gaps), 1),
        "delayed_pct": round(median(delayed), 1),
    }
    names = [name for name in parts[0] if name != "charged"]
    return row | {f"{name}_pct": round(median(lost[name] for lost in parts), 1) for name in names}


def measure(settings: Settings) -> Findings:
    """Measure how far whole simulated runs are from the oracle."""
    worlds: Sequence[World] = _WORLDS
    if settings.quick:
        worlds = [replace(world, methods=_REX, num_seeds=1) for world in _WORLDS[:2]]
    rows = [gap_row(world, method, world.num_seeds) for world in worlds for method in world.methods]
    figures = {
        f"gap_to_oracle_{row['workload']}_{len(parse_cluster(str(row['cluster'])))}_pct": row["gap_pct"]
        for row in rows
        if row["method"] == "rex" and not row["per_1000"] and "gavel" not in str(row["cluster"])
    }
    return Findings(
        figures={name: float(value) for name, value in figures.items() if value is not None}, tables={"gap": rows}
    )


if __name__ == "__main__":
    main("oracle_gap", measure, sys.argv[1:])
