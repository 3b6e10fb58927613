"""How good the report's estimates are where the truth is known: ``python -m experiments.report_estimates --json FILE``.

Runs are simulated in worlds with and without slowdowns and read back as a report reads a journal, which knows nothing
of the world. What the report says was saved against equal shares is compared with what equal shares would have taken
in that very world; its ledger with the simulator's; and what it says of other policies with their own simulated runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments._harness import Findings, Row, Settings, main
from experiments._known_runs import DEVICES, as_run, play, true_equal_s, world
from experiments.calibration._bounds import binomial_interval
from rex_ray.cli.counterfactual import OTHERS, counterfactuals
from rex_ray.control.journal import Header
from rex_ray.report.computing.run_facts import run_facts
from rex_ray.scenario import NoiseModel, random_episodes
from rex_ray.sim import Scenario
from rex_ray.sim.regret import ledger

__all__ = ["foretold_rows", "measure", "saving_row"]

NUM_STEPS = 600
RATES = (0.0, 1.2, 2.4)
NOISES = {"dedicated": NoiseModel.dedicated, "shared": NoiseModel.shared}
PARTS = ("sensing", "lag", "spline", "exploration")


def known_world(noise: str, rate: float, seed: int) -> Scenario:
    """Return a world: a name of ``NOISES``, and slowdowns per 1,000 steps of a worker, as measured on clusters."""
    episodes = random_episodes(num_workers=len(DEVICES), num_steps=NUM_STEPS, per_1000_worker_steps=rate, seed=seed)
    return world(*episodes, noise=NOISES[noise](), seed=seed)


def saving_row(noise: str, rate: float, seeds: Sequence[int]) -> Row:
    """Return one row: how often the interval covers the true saving of a ``rex`` run, and how far the estimate is."""
    covered, errors, widths, misplaced = [], [], [], []
    for seed in seeds:
        scenario = known_world(noise, rate, seed)
        played = play("rex", scenario, NUM_STEPS)
        run = as_run("rex", played)
        facts = run_facts(run)
        saving = facts.saving
        assert saving is not None, "every kind has clean steps"
        true = 1.0 - float(played.step_s.sum()) / true_equal_s(run, scenario)
        covered.append(saving.low <= true <= saving.high)
        errors.append(saving.fraction - true)
        widths.append(saving.high - saving.low)
        parts, said = ledger(played, scenario, oracle_s=0.0).parts(), {row.name: row.seconds for row in facts.ledger}
        misplaced.append(max(abs(said.get(name, 0.0) - parts[name]) for name in PARTS) / played.total_s)
    low, high = binomial_interval(sum(covered), len(covered))
    return {
        "noise": noise,
        "slowdowns_per_1000": rate,
        "runs": len(covered),
        "covered_pct": round(100 * float(np.mean(covered)), 1),
        "covered_low_pct": round(100 * low, 1),
        "covered_high_pct": round(100 * high, 1),
        "mean_error_points": round(100 * float(np.mean(errors)), 2),
        "abs_error_points": round(100 * float(np.median(np.abs(errors))), 2),
        "worst_error_points": round(100 * float(np.abs(errors).max()), 2),
        "width_points": round(100 * float(np.median(widths)), 2),
        "ledger_worst_part_pct": round(100 * float(np.median(misplaced)), 2),
    }


def foretold_rows(rate: float, seeds: Sequence[int]) -> list[Row]:
    """Return a row per policy: how far its estimate from a run of another policy is from its own simulated run."""
    errors: dict[tuple[str, str], list[float]] = {}
    for seed in seeds:
        scenario = known_world("dedicated", rate, seed)
        played = {policy: play(policy, scenario, NUM_STEPS) for policy in OTHERS}
        for source in ("rex", "bsp"):
            found = counterfactuals(as_run(source, played[source]), Header(seed=0, mode="auto", policy=source))
            for one in found:
                errors.setdefault((source, one.policy), []).append(one.seconds / played[one.policy].total_s - 1.0)
    return [
        {
            "from": source,
            "policy": policy,
            "slowdowns_per_1000": rate,
            "runs": len(found),
            "median_error_pct": round(100 * float(np.median(found)), 2),
            "worst_error_pct": round(100 * float(np.abs(found).max()), 2),
        }
        for (source, policy), found in errors.items()
    ]


def measure(settings: Settings) -> Findings:
    """Compare estimates with the truth."""
    num_seeds, num_foretold = (3, 1) if settings.quick else (20, 4)
    seeds = range(settings.seed, settings.seed + num_seeds)
    savings = [saving_row(noise, rate, seeds) for noise in NOISES for rate in RATES]
    foretold = [row for rate in (0.0, 1.2) for row in foretold_rows(rate, seeds[:num_foretold])]
    return Findings(
        figures={
            "saving_covered_pct": float(np.mean([row["covered_pct"] for row in savings])),
            "saving_worst_error_points": max(row["worst_error_points"] for row in savings),
            "foretold_from_rex_worst_pct": max(row["worst_error_pct"] for row in foretold if row["from"] == "rex"),
            "foretold_from_bsp_worst_pct": max(row["worst_error_pct"] for row in foretold if row["from"] == "bsp"),
        },
        tables={"saving": savings, "foretold": foretold},
        settings={"num_steps": NUM_STEPS, "devices": ",".join(DEVICES)},
    )


if __name__ == "__main__":
    main("report_estimates", measure)
