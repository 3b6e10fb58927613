"""What each part of rex gives: alone, added to bsp, and removed, from rex. Time to the target, progress by the trace.

    python -m experiments.ablation --json FILE [--record DIR] [--page docs/results.md] [--quick]

A trigger and a search need a split to act on, so that "alone" is what they add to bsp with a split. Where the table
has rows for Ax, searches are answered by the real helper process, also where curves are smooth and there is nothing
that it could find; elsewhere nobody answers, and ``rex`` is ``rex`` without Ax. Control is charged as measured: what a
part gives is what is left when its own cost has been paid.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments._harness import Findings, Row, Scalar, Settings
from experiments._matrix import Played, paired_effect_pct, play_all, ratio, seeded
from experiments.lab.cells import Cell
from experiments.lab.command import Runner, main
from experiments.lab.study import Study

__all__ = ["VARIANTS", "WORLDS", "Variant", "study", "variant_rows"]

_REX: dict[str, Scalar] = {}
_BARE: dict[str, Scalar] = {"growth": "off", "split": "off", "trigger": "off", "search": "off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A method with some parts.

    Attributes:
        name: as in the table.
        part: the part that it is about.
        options: of ``rex``.
        against: name of the variant that differs by that part alone.
    """

    name: str
    part: str
    options: dict[str, Scalar]
    against: str


def _only(*parts: str, **options: Scalar) -> dict[str, Scalar]:
    return {name: value for name, value in _BARE.items() if name not in parts} | options


VARIANTS = (
    Variant(name="bsp", part="", options=_BARE, against="bsp"),
    Variant(name="bsp + growth", part="growth", options=_only("growth"), against="bsp"),
    Variant(name="bsp + growth, no gate", part="gate", options=_only("growth", growth_gate=False), against="bsp"),
    Variant(name="bsp + split", part="split", options=_only("split"), against="bsp"),
    Variant(name="bsp + split + trigger", part="trigger", options=_only("split", "trigger"), against="bsp + split"),
    Variant(name="bsp + split + Ax", part="search", options=_only("split", "search"), against="bsp + split"),
    Variant(name="rex", part="", options=_REX, against="rex"),
    Variant(name="rex - growth", part="growth", options={"growth": "off"}, against="rex"),
    Variant(name="rex - gate", part="gate", options={"growth_gate": False}, against="rex"),
    Variant(name="rex - split", part="split", options={"split": "off"}, against="rex"),
    Variant(name="rex - trigger", part="trigger", options={"trigger": "off"}, against="rex"),
    Variant(name="rex - Ax", part="search", options={"search": "off"}, against="rex"),
)
"""Alone: the part is added to ``against``. Removed: it is taken from ``rex``. The gate is asked by growth; its "alone"
is what growth is without it."""

_CELL = Cell(method="rex", workload="resnet18", cluster="4xT4,4xV100", charges="host")
WORLDS = {
    "static": replace(_CELL, search="helper"),
    "static, V100-gavel": replace(_CELL, cluster="4xT4,4xV100-gavel"),
    "transient": replace(_CELL, disturbance="random:1"),
    "tiles of 32": replace(_CELL, shape="tiles:32", search="helper"),
    "contention": replace(_CELL, shape="contention:0.6", search="helper"),
}
"""In the last two the curves of single workers are wrong, which is where a search can find what a split cannot."""

_CONTROLS = ("oracle", "oracle_delayed")


def _variants(world: Cell) -> list[Variant]:
    return [variant for variant in VARIANTS if world.search != "none" or variant.part != "search"]


def _cell(world: Cell, variant: Variant) -> Cell:
    # A search that is off has nobody to ask: the cell says so, and shares its result with the other experiments.
    search = "none" if variant.options.get("search") == "off" or variant.options.get("split") == "off" else world.search
    # Without any part nothing is measured, and nothing is charged.
    charges = "none" if variant.options == _BARE else world.charges
    return replace(world, options=variant.options, search=search, charges=charges)


def _control(world: Cell, method: str) -> Cell:
    return replace(world, method=method, search="none")


def variant_rows(played: Played, worlds: Sequence[str], seeds: Sequence[int]) -> list[Row]:
    """Return one row per world and variant.

    ``effect_pct`` is how much longer the variant takes than the one that differs by the part alone, in pairs of equal
    seeds, with a 95 % interval: negative where adding it helps, positive where removing it hurts.
    """
    rows: list[Row] = []
    by_name = {variant.name: variant for variant in VARIANTS}
    for world in worlds:
        oracle = seeded(_control(WORLDS[world], "oracle"), seeds)
        bsp = seeded(_cell(WORLDS[world], by_name["bsp"]), seeds)
        for variant in _variants(WORLDS[world]):
            mine = seeded(_cell(WORLDS[world], variant), seeds)
            other = seeded(_cell(WORLDS[world], by_name[variant.against]), seeds)
            effect, low, high = paired_effect_pct(played, mine, other, seed=0)
            rows.append(
                {
                    "world": world,
                    "variant": variant.name,
                    "seeds": len(seeds),
                    "tta_s": round(played.median_s(mine), 1),
                    "spread_pct": round(played.spread_pct(mine), 1),
                    "to_bsp": round(ratio(played, mine, bsp), 3),
                    "to_oracle": round(ratio(played, mine, oracle), 3),
                    "against": variant.against,
                    "effect_pct": round(effect, 2) + 0.0,
                    "low": round(low, 2) + 0.0,
                    "high": round(high, 2) + 0.0,
                }
            )
        late = seeded(_control(WORLDS[world], "oracle_delayed"), seeds)
        rows += [_control_row(played, world, cells, bsp, oracle) for cells in (late, oracle)]
    return rows


def _control_row(played: Played, world: str, cells: Sequence[Cell], bsp: Sequence[Cell], oracle: Sequence[Cell]) -> Row:
    return {
        "world": world,
        "variant": cells[0].method,
        "seeds": len(cells),
        "tta_s": round(played.median_s(cells), 1),
        "spread_pct": round(played.spread_pct(cells), 1),
        "to_bsp": round(ratio(played, cells, bsp), 3),
        "to_oracle": round(ratio(played, cells, oracle), 3),
        "against": None,
        "effect_pct": None,
        "low": None,
        "high": None,
    }


def study(settings: Settings, run: Runner) -> Study:
    """Run rex with parts added and removed."""
    worlds = ["transient"] if settings.quick else list(WORLDS)
    seeds = range(settings.seed, settings.seed + (1 if settings.quick else 5))
    named = [
        (name, cell)
        for world in worlds
        for name, tried in (
            *((variant.name, _cell(WORLDS[world], variant)) for variant in _variants(WORLDS[world])),
            *((method, _control(WORLDS[world], method)) for method in _CONTROLS),
        )
        for cell in seeded(tried, seeds)
    ]
    played = play_all((cell for _, cell in named), run)
    rows = variant_rows(played, worlds, seeds)
    figures = {
        f"{'removed' if row['against'] == 'rex' else 'alone'}_{part}_pct_{_short(str(row['world']))}": row["effect_pct"]
        for row in rows
        if (part := _part_of(str(row["variant"])))
    }
    compared = played.comparison(named)
    return Study(
        findings=Findings(
            figures={name: float(value) for name, value in figures.items() if value is not None},
            tables={"ablation": rows},
            settings={"B": 256, "workload": _CELL.workload, "charges": _CELL.charges},
        ),
        comparison=compared,
        headline=compared.worlds()[0],
    )


def _part_of(name: str) -> str:
    return next((variant.part for variant in VARIANTS if variant.name == name), "")


def _short(world: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in world).replace("__", "_")


if __name__ == "__main__":
    main("ablation", study, sys.argv[1:])
