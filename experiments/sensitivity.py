"""How much the main constants of rex matter: each halved and doubled, time to the target against the default's.

    python -m experiments.sensitivity --json FILE [--page docs/results.md]

A constant is doubled as what it means: a factor of 1.15 is a change of .15, so its double is 1.3; a count that would
leave what its part allows is cut to the nearest that is allowed, and the table says which value was run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments._harness import Findings, Row, Scalar, Settings
from experiments._matrix import Played, paired_effect_pct, play_all, seeded
from experiments._page import main
from experiments.lab.cells import Cell
from rex_ray.policies.registry import policy_options

__all__ = ["CONSTANTS", "WORLDS", "Constant", "effect_rows", "measure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One option of ``rex``, and what is run in place of its default.

    Attributes:
        option: its name.
        halved: half of what it means.
        doubled: twice that.
        needs_search: it acts only where somebody answers searches.
    """

    option: str
    halved: Scalar
    doubled: Scalar
    needs_search: bool = False


CONSTANTS = (
    Constant(option="growth_alpha", halved=0.025, doubled=0.1),
    # Five blocks are the fewest that can show anything at a level of .05.
    Constant(option="growth_window", halved=5, doubled=16),
    Constant(option="growth_min_gain", halved=0.025, doubled=0.1),
    Constant(option="growth_optimism", halved=0.25, doubled=1.0),
    Constant(option="lr_tolerance", halved=0.05, doubled=0.2),
    Constant(option="min_gain", halved=0.015, doubled=0.06),
    Constant(option="min_steps", halved=3, doubled=12),
    Constant(option="max_review_steps", halved=48, doubled=192),
    Constant(option="num_sigmas", halved=1.0, doubled=4.0),
    Constant(option="trigger_min_factor", halved=1.075, doubled=1.3),
    Constant(option="trigger_num_sds", halved=2.5, doubled=10.0),
    Constant(option="trigger_hits", halved=1, doubled=4),
    Constant(option="trigger_fast_factor", halved=1.075, doubled=1.3),
    Constant(option="trigger_cooldown_steps", halved=3, doubled=10),
    Constant(option="trigger_max_hold_steps", halved=80, doubled=320),
    Constant(option="trigger_switch_cost_steps", halved=0.25, doubled=1.0),
    Constant(option="search_min_gain", halved=0.015, doubled=0.06, needs_search=True),
    Constant(option="search_min_mismatch", halved=0.025, doubled=0.1, needs_search=True),
    Constant(option="search_budget", halved=0.01, doubled=0.04, needs_search=True),
)
"""The main constants; which of them the policy does not offer as an option is not run."""

_CELL = Cell(method="rex", workload="resnet18", cluster="4xT4,4xV100")
WORLDS = {
    "static": _CELL,
    "transient": replace(_CELL, disturbance="random:1"),
    "tiles": replace(_CELL, shape="tiles:32", search="helper"),
}
"""Where they are tried; with tiles the curves are wrong, so that searches have something to find."""


def _offered() -> list[Constant]:
    return [constant for constant in CONSTANTS if constant.option in policy_options("rex")]


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
                "default": policy_options("rex")[constant.option],
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


def measure(settings: Settings) -> Findings:
    """Run rex with every main constant halved and doubled."""
    worlds = ["transient"] if settings.quick else list(WORLDS)
    seeds = range(settings.seed, settings.seed + (1 if settings.quick else 5))
    constants = _offered()[:3] if settings.quick else _offered()
    tried = [
        variant
        for world in worlds
        for constant in constants
        if _is_tried(constant, world)
        for variant in (WORLDS[world], *_variants(constant, WORLDS[world]))
    ]
    played = play_all("sensitivity", [cell for variant in tried for cell in seeded(variant, seeds)], settings)
    rows = effect_rows(played, worlds, seeds, constants)
    figures = {f"largest_effect_pct_{world}": _largest_of(rows, world) for world in worlds}
    return Findings(figures=figures, tables={"sensitivity": rows}, settings={"B": 256, "cluster": _CELL.cluster})


def _largest_of(rows: Sequence[Row], world: str) -> float:
    return max(_largest(row) for row in rows if row["world"] == world)


if __name__ == "__main__":
    main("sensitivity", measure, sys.argv[1:])
