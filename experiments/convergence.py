"""What theory promises of steps whose batch, shares and rate change: shown on problems whose constants are known.

``python -m experiments.convergence --json FILE [--quick] [--page docs/convergence.md]``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import linregress
from scipy.stats import t as student

from experiments._convergence_problems import (
    Paths,
    Problem,
    Quadratic,
    Regression,
    Schedule,
    Seen,
    random_shares,
    train,
)
from experiments._harness import Findings, Settings
from experiments._page import main
from rex_ray.core.lr_scaling import lr_factor
from rex_ray.core.types import FloatArray, IntArray

__all__ = ["measure"]

M0 = 16
_RULES = ("none", "sqrt", "adascale", "linear")
_GROWN = 8
_WORKERS = 5
_BEYOND = "2.5"
"""Of ``eta_0 r_max L``: past the condition, and past 2, from which on the quadratic itself diverges."""


def measure(settings: Settings) -> Findings:
    """Measure floors, what splits change, what growth removes, and whether the bound holds."""
    floors, slopes = _floors(settings)
    splits = _splits(settings)
    growth = _growth(settings)
    bounds = _bounds(settings)
    peeking = _peeking(settings)
    figures = {f"floor_slope_{name}{end}": value for name, ends in slopes.items() for end, value in ends.items()}
    figures["floor_exact_error_pct"] = max(abs(row["off_pct"]) for row in floors if row["off_pct"] is not None)
    for row in splits:
        name = f"{row['weights'].split()[0]}_{_short(str(row['problem']))}"
        figures[f"variance_ratio_{name}"] = row["variance_ratio"]
        figures[f"variance_ratio_{name}_worst"] = row["worst"]
    for row in growth[: len(_RULES)]:
        figures[f"growth_floor_ratio_{row['lr_rule']}"] = row["floor_ratio"]
    figures["growth_floor_ratio_adascale_decayed"] = growth[-1]["floor_ratio"]
    within = [row for row in bounds if row["eta_r_max_L"] != _BEYOND]
    figures["bound_runs"] = float(sum(row["runs"] for row in within))
    figures["bound_violated_pct"] = max(row["violated_pct"] for row in within)
    figures["bound_used_pct_max"] = max(row["used_pct"] for row in within)
    beyond = [row["violated_pct"] for row in bounds if row["eta_r_max_L"] == _BEYOND]
    figures["bound_violated_beyond_pct"] = max(beyond)
    figures |= {f"bias_sds_{row['batch'].split()[0]}": row["bias_sds"] for row in peeking}
    return Findings(
        figures=figures,
        tables={"floors": floors, "splits": splits, "growth": growth, "bounds": bounds, "peeking": peeking},
        settings={"reference_batch_size": M0, "num_workers": _WORKERS},
    )


def _rng(settings: Settings, *stream: int) -> np.random.Generator:
    return np.random.default_rng((settings.seed, *stream))


def _short(name: str) -> str:
    return name.rsplit(maxsplit=1)[-1]


def _constant(batch: int) -> Schedule:
    def schedule(seen: Seen, _: np.random.Generator) -> tuple[IntArray, FloatArray]:
        return np.full(len(seen.batches), batch), np.ones(len(seen.batches))

    return schedule


def _floors(settings: Settings) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    """Where training at a constant rate and batch ends up, and the slope of its logarithm in log(eta / B)."""
    steps, runs = (600, 40) if settings.quick else (1500, 100)
    rows: list[dict[str, Any]] = []
    slopes = {}
    for index, (problem, rates) in enumerate(((Quadratic(), (0.05, 0.1, 0.2)), (Regression(), (0.05, 0.1, 0.2)))):
        least = float(problem.value(problem.minimum[None])[0])
        x, y = [], []
        for rate in rates:
            for batch in (M0, 4 * M0, 16 * M0) if settings.quick else (M0, 2 * M0, 4 * M0, 8 * M0, 16 * M0):
                rng = _rng(settings, 0, index, round(1000 * rate), batch)
                paths = train(
                    problem, _constant(batch), rate=rate, num_steps=steps, num_runs=runs, rng=rng, start=problem.minimum
                )
                found = float(paths.values[steps // 3 :].mean()) - least
                exact = problem.floor(rate, batch) if isinstance(problem, Quadratic) else None
                x.append(np.log(rate / batch))
                y.append(np.log(found))
                rows.append(
                    {
                        "problem": problem.name,
                        "eta": rate,
                        "B": batch,
                        "floor": float(f"{found:.4g}"),
                        "exact": None if exact is None else float(f"{exact:.4g}"),
                        "off_pct": None if exact is None else round(100 * (found / exact - 1), 2) + 0.0,
                    }
                )
        slopes[_short(problem.name)] = _slope(np.array(x), np.array(y))
    return rows, slopes


def _slope(x: FloatArray, y: FloatArray) -> dict[str, float]:
    """Return a least-squares slope with its 95 % interval."""
    fit = linregress(x, y)
    half = float(student.ppf(0.975, x.size - 2)) * float(fit.stderr)
    slope = float(fit.slope)
    return {"": slope, "_low": slope - half, "_high": slope + half}


def _splits(settings: Settings) -> list[dict[str, Any]]:
    """Mean and variance of the reduced gradient over random splits, relative to those of the whole batch."""
    draws, num_splits = (4000, 10) if settings.quick else (20_000, 30)
    batch = 4 * M0
    rows: list[dict[str, Any]] = []
    for index, problem in enumerate((Quadratic(), Regression())):
        point = (problem.start + problem.minimum) / 2
        truth, trace = problem.gradient(point[None])[0], _row_trace(problem, point)
        rng = _rng(settings, 2, index)
        ratios: dict[str, list[float]] = {"weighted b/B": [], "equal 1/n": []}
        offsets: dict[str, list[float]] = {name: [] for name in ratios}
        for _ in range(num_splits):
            shares = random_shares(np.array([batch]), _WORKERS, rng)[0]
            shares = shares[shares > 0]
            groups = problem.group_gradients(np.tile(point, (draws, 1)), np.tile(shares, (draws, 1)), rng)
            for name, weights in (
                ("weighted b/B", shares / batch),
                ("equal 1/n", np.full(shares.size, 1 / shares.size)),
            ):
                gradients = np.einsum("n,rnd->rd", weights, groups)
                variance = float(((gradients - truth) ** 2).sum(axis=1).mean())
                ratios[name].append(variance / (trace / batch))
                offsets[name].append(float(np.linalg.norm(gradients.mean(axis=0) - truth) / np.sqrt(variance / draws)))
        for name, found in ratios.items():
            half = 1.96 * float(np.std(found, ddof=1)) / np.sqrt(num_splits)
            rows.append(
                {
                    "problem": problem.name,
                    "weights": name,
                    "splits": num_splits,
                    "variance_ratio": round(float(np.mean(found)), 3),
                    "low": round(float(np.mean(found)) - half, 3),
                    "high": round(float(np.mean(found)) + half, 3),
                    "worst": round(max(found), 3),
                    # About 1 where the mean is right: the error of a mean over so many draws.
                    "mean_off_errors": round(float(np.median(offsets[name])), 2),
                }
            )
    return rows


def _row_trace(problem: Problem, point: FloatArray) -> float:
    """Return ``tr(S)`` at a point: known for the quadratic, over all rows for the regression."""
    if isinstance(problem, Regression):
        residual = problem.targets - problem.inputs @ point
        each = -(2 * residual / (1 + residual**2) ** 2)[:, None] * problem.inputs
        return float(((each - each.mean(axis=0)) ** 2).sum(axis=1).mean())
    return problem.row_variance


def _growth(settings: Settings) -> list[dict[str, Any]]:
    """The floor before and after the batch has grown eightfold, by the rule that the rate follows."""
    steps, runs = (900, 100) if settings.quick else (2400, 400)
    problem, rate, grown = Quadratic(), 0.05, _GROWN * M0
    rows: list[dict[str, Any]] = []
    cases = [(rule, 1.0) for rule in _RULES] + [("adascale", 1 / _GROWN)]
    for index, (rule, decay) in enumerate(cases):

        def schedule(
            seen: Seen, _: np.random.Generator, rule: str = rule, decay: float = decay
        ) -> tuple[IntArray, FloatArray]:
            runs = len(seen.batches)
            if seen.step < steps // 2:
                return np.full(runs, M0), np.ones(runs)
            batches = np.full(runs, grown)
            return batches, decay * _factors(rule, batches, seen.noise_scale)

        paths = train(problem, schedule, rate=rate, num_steps=steps, num_runs=runs, rng=_rng(settings, 3, index))
        before, after = paths.values[steps * 3 // 8 : steps // 2].mean(), paths.values[steps * 7 // 8 :].mean()
        ratio = paths.rates[steps * 7 // 8 :] / paths.batches[steps * 7 // 8 :] / (rate / M0)
        rows.append(
            {
                "lr_rule": rule if decay == 1 else f"{rule}, the user's rate an {_GROWN}th",
                "B": f"{M0} to {grown}",
                "floor_before": float(f"{before:.4g}"),
                "floor_after": float(f"{after:.4g}"),
                "floor_ratio": round(float(after / before), 3),
                "eta_over_B_ratio": round(float(ratio.mean()), 3),
            }
        )
    return rows


def _factors(rule: str, batches: IntArray, noise_scale: FloatArray) -> FloatArray:
    pairs = zip(batches.tolist(), noise_scale.tolist(), strict=True)
    return np.array([lr_factor(rule, batch, M0, phi) for batch, phi in pairs])


def _bounds(settings: Settings) -> list[dict[str, Any]]:
    """Whether ``sum eta |grad F|^2 <= 2 (F0 - F*) + L sigma^2 sum eta^2 / B`` holds in single runs."""
    steps, runs, configs = (60, 40, 4) if settings.quick else (150, 100, 12)
    rows: list[dict[str, Any]] = []
    for index, problem in enumerate((Quadratic(), Regression())):
        for place, start in (("far away", problem.start), ("a minimum", problem.minimum)):
            for limit in ("0.3 to 1", _BEYOND) if isinstance(problem, Quadratic) else ("0.3 to 1",):
                used, single = [], []
                for config in range(configs):
                    rng = _rng(settings, 4, index, int(place == "far away"), len(limit), config)
                    product = float(_BEYOND) if limit == _BEYOND else float(rng.uniform(0.3, 1.0))
                    rate = product / problem.smoothness / _GROWN
                    schedule = _wandering(_RULES[config % len(_RULES)], reaches=limit == _BEYOND)
                    paths = train(problem, schedule, rate=rate, num_steps=steps, num_runs=runs, rng=rng, start=start)
                    part = _used(problem, paths)
                    used.append(float(part.mean()))
                    single.append(part)
                parts = np.concatenate(single)
                rows.append(
                    {
                        "problem": problem.name,
                        "start": place,
                        "eta_r_max_L": limit,
                        "runs": int(parts.size),
                        "violated_pct": round(100 * float((parts > 1).mean()), 2),
                        "used_pct": None if limit == _BEYOND else round(100 * max(used), 1),
                    }
                )
    return rows


def _wandering(rule: str, *, reaches: bool) -> Schedule:
    """A random batch that listens to the past: it grows by chance, and where the last gradient was short.

    Args:
        rule: of the rate.
        reaches: whether it stays at the largest batch and factor instead, where too high a rate does its harm.
    """

    def schedule(seen: Seen, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
        runs = len(seen.batches)
        if reaches:
            return np.full(runs, _GROWN * M0), np.full(runs, float(_GROWN))
        before = np.maximum(seen.batches, M0)
        is_short = seen.sq_norms < np.median(seen.sq_norms)
        up, down = rng.random(runs) < np.where(is_short, 0.2, 0.05), rng.random(runs) < 0.08
        batches = np.clip(np.where(up, 2 * before, np.where(down, before // 2, before)), M0, _GROWN * M0)
        return batches, _factors(rule, batches, seen.noise_scale)

    return schedule


def _used(problem: Problem, paths: Paths) -> FloatArray:
    """Return the part of the bound that each run used, shape ``[runs]``; more than 1 violates it."""
    with np.errstate(over="ignore", invalid="ignore"):
        told = (paths.rates * paths.sq_slopes).sum(axis=0)
        noise = problem.smoothness * problem.row_variance * (paths.rates**2 / paths.batches).sum(axis=0)
        result: FloatArray = np.nan_to_num(told / (2 * (paths.values[0] - problem.least_value) + noise), nan=np.inf)
    return result


def _peeking(settings: Settings) -> list[dict[str, Any]]:
    """The mean of the gradient along its truth, when the batch is decided before its rows, and when by them."""
    draws = 40_000 if settings.quick else 400_000
    problem = Quadratic()
    point = problem.start[None]
    truth = problem.gradient(point)[0]
    along = truth / np.linalg.norm(truth)
    rng = _rng(settings, 5)
    # Halves of M0 rows, seen along the gradient; one row's sd there.
    row_sd = float(np.sqrt((problem.noise_sd**2 * along**2).sum()))
    first, second, earlier = (rng.standard_normal(draws) * row_sd / np.sqrt(M0) for _ in range(3))
    cases = {
        "predictable (doubled where an earlier step fell short)": np.where(earlier < 0, (first + second) / 2, first),
        "peeking (doubled where its own rows fall short)": np.where(first < 0, (first + second) / 2, first),
    }
    return [
        {
            "batch": name,
            "bias_sds": round(float(noise.mean() / (row_sd / np.sqrt(M0))), 4) + 0.0,
            "error": round(1.96 * float(noise.std() / (row_sd / np.sqrt(M0)) / np.sqrt(draws)), 4),
        }
        for name, noise in cases.items()
    ]


def run(argv: Sequence[str]) -> None:
    """Run the experiment as a command."""
    main("convergence", measure, argv)


if __name__ == "__main__":
    run(sys.argv[1:])
