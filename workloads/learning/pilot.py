"""How a recipe was chosen: fixed batches at AdaScale's rates, what they reach and when, and the noise scale meanwhile.

    python -m workloads.learning.pilot cifar10 --batches 256,1024 --seeds 0,1,2 --cache out/learning
    python -m workloads.learning.pilot cifar10 --learning-rates 0.01,0.02,0.05

A row per run: the metric at the end, the part of all rows after which the target was reached, and ``phi`` in rows at
each eighth of training. The target of a recipe is a metric that the reference batch reaches after 80 to 90 % of its
rows with every seed, and that the larger batches reach too.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from workloads.arguments import Parser, number, output_file, output_folder, refusing, several, whole
from workloads.learning.learner import SgdLearner, learner_of
from workloads.learning.rates import AdaScaleRate
from workloads.learning.tasks import load_task, task_names

__all__ = ["PilotRun", "main", "pilot_run"]

_PARTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotRun:
    """One fixed batch from start to end.

    Attributes:
        task: see ``task_names``.
        learning_rate: at the reference batch.
        global_batch_size: rows per step.
        seed: of the learner.
        final_metric: at the end.
        to_target: part of all rows after which the target was reached; None: it was not.
        noise_scales: ``phi`` in rows at each eighth of the rows; None while unknown.
        metrics: every evaluation.
        cpu_s: seconds of processor time, all of it; next to none where the path was known.
    """

    task: str
    learning_rate: float
    global_batch_size: int
    seed: int
    final_metric: float
    to_target: float | None
    noise_scales: tuple[float | None, ...]
    metrics: tuple[float, ...]
    cpu_s: float


def pilot_run(learner: SgdLearner, global_batch_size: int) -> tuple[float | None, ...]:
    """Train to the end at one batch; return ``phi`` at each eighth of the rows.

    Args:
        learner: a fresh one, for whose reference batch a factor of 1 is right.
        global_batch_size: rows per step.
    """
    rate = AdaScaleRate(learner.reference_batch_size)
    noise_scales: list[float | None] = []
    all_rows, num_rows, step = learner.num_epochs * learner.dataset_size, 0, 0
    while not learner.is_done:
        taken = min(global_batch_size, learner.num_rows_left)
        learner.advance(taken, rate.factor(global_batch_size, learner.noise_scale, step))
        num_rows, step = num_rows + taken, step + 1
        while num_rows * _PARTS >= all_rows * (len(noise_scales) + 1):
            noise_scales.append(learner.noise_scale)
    return tuple(noise_scales)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for, a line per run."""
    parser = Parser(prog="python -m workloads.learning.pilot", description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=task_names())
    parser.add_argument("--batches", type=several(whole(1)), help="default: the reference batch and three doublings")
    parser.add_argument("--seeds", type=several(whole(0)), default=[0])
    parser.add_argument("--learning-rates", type=several(number(above=0.0)), help="default: the recipe's")
    parser.add_argument("--num-epochs", type=whole(1), help="default: the recipe's")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--cache", type=output_folder, help="where paths are kept (default: nowhere)")
    parser.add_argument("--json", type=output_file, help="write the runs to this file too")
    options = parser.parse_args(arguments)
    task = load_task(options.task, options.data_dir)
    recipe = replace(task.recipe, num_epochs=options.num_epochs or task.recipe.num_epochs)
    batches = options.batches or [recipe.reference_batch_size * 2**power for power in range(4)]
    runs = []
    for rate in options.learning_rates or [recipe.learning_rate]:
        tried = task.with_recipe(replace(recipe, learning_rate=rate))
        for batch in batches:
            for seed in options.seeds:
                started = time.process_time()
                learner = learner_of(tried, seed=seed, cache_dir=options.cache)
                noise_scales = pilot_run(learner, batch)
                reached = next((e.num_rows for e in learner.evaluations if learner.is_good(e.metric)), None)
                run = PilotRun(
                    task=options.task,
                    learning_rate=rate,
                    global_batch_size=batch,
                    seed=seed,
                    final_metric=learner.evaluations[-1].metric,
                    to_target=None if reached is None else reached / (recipe.num_epochs * task.dataset_size),
                    noise_scales=noise_scales,
                    metrics=tuple(found.metric for found in learner.evaluations),
                    cpu_s=time.process_time() - started,
                )
                print(_told(run), flush=True)
                runs.append(asdict(run))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")


def _told(run: PilotRun) -> str:
    reached = "never" if run.to_target is None else f"{run.to_target:.0%}"
    phis = " ".join("?" if phi is None else "inf" if math.isinf(phi) else f"{phi:.0f}" for phi in run.noise_scales)
    return (
        f"{run.task} rate {run.learning_rate:g} batch {run.global_batch_size} seed {run.seed}: "
        f"{run.final_metric:.4f}, target after {reached} of the rows; phi {phis}; {run.cpu_s:.0f} s"
    )


if __name__ == "__main__":
    with refusing():
        main()
