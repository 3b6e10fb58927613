"""How much the main constants of rex matter: each halved and doubled, time to the target against the default's.

    python -m experiments.sensitivity --json FILE [--record DIR] [--page docs/results.md] [--quick]

A constant is doubled as what it means: a factor of 1.15 is a change of .15, so its double is 1.3. One that would leave
what its part allows is cut to the nearest that is allowed; the table says which values were run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments._harness import Findings, Row, Scalar, Settings
from experiments._matrix import Played, paired_effect_pct, play_all, seeded
from experiments.lab.cells import Cell
from experiments.lab.command import Runner, main
from experiments.lab.study import Study
from rex_ray.policies.registry import policy_options

__all__ = ["CONSTANTS", "WORLDS", "Constant", "effect_rows", "study"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One option of ``rex``, and what is run in place of its default.

    Attributes:
        option: its name.
        is_factor: a factor, of which what is above 1 counts.
        fewest: the least that its part allows.
        most: the most.
        needs_search: it acts only where somebody answers searches.
    """

    option: str
    is_factor: bool = False
    fewest: int | None = None
    most: float | None = None
    needs_search: bool = False

    @property
    def default(self) -> float:
        """What ``rex`` takes."""
        value = policy_options("rex")[self.option]
        assert isinstance(value, int | float)
        return value

    @property
    def halved(self) -> Scalar:
        """Half of it."""
        return self._times(0.5)

    @property
    def doubled(self) -> Scalar:
        """Twice of it."""
        return self._times(2.0)

    def _times(self, factor: float) -> Scalar:
        least, default = 1.0 if self.is_factor else 0.0, self.default
        value = least + factor * (default - least)
        value = max(value, 0.0 if self.fewest is None else self.fewest)
        value = min(value, math.inf if self.most is None else self.most)
        return math.ceil(value) if isinstance(default, int) else round(value, 6)


CONSTANTS = (
    Constant(option="growth_alpha"),
    # Five blocks are the fewest that can show anything at a level of .05.
    Constant(option="growth_window", fewest=5),
    Constant(option="growth_min_gain"),
    Constant(option="growth_optimism", most=1.0),
    Constant(option="lr_tolerance"),
    Constant(option="min_gain"),
    Constant(option="min_steps"),
    Constant(option="max_review_steps"),
    Constant(option="num_sigmas"),
    Constant(option="trigger_min_factor", is_factor=True),
    Constant(option="trigger_num_sds"),
    Constant(option="trigger_hits", fewest=1),
    Constant(option="trigger_fast_factor", is_factor=True),
    Constant(option="trigger_cooldown_steps", fewest=1),
    Constant(option="trigger_max_hold_steps"),
    Constant(option="trigger_switch_cost_steps"),
    Constant(option="search_min_gain", needs_search=True),
    Constant(option="search_min_mismatch", needs_search=True),
    Constant(option="search_budget", needs_search=True),
)
"""The main constants of growth, split, trigger and search."""

_CELL = Cell(method="rex", workload="resnet18", cluster="4xT4,4xV100", charges="host")
WORLDS = {
    "static": _CELL,
    "transient": replace(_CELL, disturbance="random:1"),
    "tiles": replace(_CELL, shape="tiles:32", search="helper"),
}
"""Where they are tried; with tiles the curves are wrong, so that searches have something to find."""


def _variants(constant: Constant, world: Cell) -> list[Cell]:
    return [replace(world, options={constant.option: value}) for value in (constant.halved, constant.doubled)]


def _is_tried(constant: Constant, world: str) -> bool:
    return constant.needs_search == (world == "tiles")


def effect_rows(
    played: Played, worlds: Sequence[str], seeds: Sequence[int], constants: Sequence[Constant]
) -> list[Row]:
    """Return one row per constant and world, the largest effect first."""
    rows: list[Row] = []
    for world in worlds:
        default = seeded(WORLDS[world], seeds)
        for constant in constants:
            if not _is_tried(constant, world):
                continue
            row: dict[str, Scalar] = {
                "constant": constant.option,
                "world": world,
                "default": constant.default,
                "seeds": len(seeds),
            }
            for name, variant in zip(("halved", "doubled"), _variants(constant, WORLDS[world]), strict=True):
                effect = paired_effect_pct(played, seeded(variant, seeds), default, seed=0)
                row[name] = variant.options[constant.option]
                row[f"{name}_pct"], row[f"{name}_low"], row[f"{name}_high"] = (round(value, 2) for value in effect)
            rows.append(row)
    return sorted(rows, key=_largest, reverse=True)


def _largest(row: Row) -> float:
    return max(abs(float(row[column] or 0.0)) for column in ("halved_pct", "doubled_pct"))


def study(settings: Settings, run: Runner) -> Study:
    """Run rex with every main constant halved and doubled."""
    worlds = ["transient"] if settings.quick else list(WORLDS)
    seeds = range(settings.seed, settings.seed + (1 if settings.quick else 5))
    constants = CONSTANTS[:3] if settings.quick else CONSTANTS
    tried = [
        variant
        for world in worlds
        for constant in constants
        if _is_tried(constant, world)
        for variant in (WORLDS[world], *_variants(constant, WORLDS[world]))
    ]
    cells = [cell for variant in tried for cell in seeded(variant, seeds)]
    played = play_all(cells, run)
    rows = effect_rows(played, worlds, seeds, constants)
    figures = {f"largest_effect_pct_{world}": _largest_of(rows, world) for world in worlds}
    compared = played.comparison((_named(cell), cell) for cell in {cell.key: cell for cell in cells}.values())
    return Study(
        findings=Findings(
            figures=figures,
            tables={"sensitivity": rows},
            settings={"B": 256, "cluster": _CELL.cluster, "charges": _CELL.charges},
        ),
        comparison=compared,
        headline=compared.worlds()[0],
    )


def _named(cell: Cell) -> str:
    return ",".join(f"{name}={value}" for name, value in cell.options.items()) or "rex"


def _largest_of(rows: Sequence[Row], world: str) -> float:
    return max(_largest(row) for row in rows if row["world"] == world)


if __name__ == "__main__":
    main("sensitivity", study, sys.argv[1:])
