"""Live trials under Ray Tune: one ``RexTrainer`` run per policy and seed, on an emulated mixed cluster, resumable.

A sweep has a folder. ``results/KEY.json`` is the row of a finished trial and the only thing that is read back;
``runs/KEY-ID`` is a run's storage folder with its journal; ``tune/`` is Tune's own record. A run that was cut off is
begun anew under another ID: a time that a kill is in is no time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Read when Tune is imported: no copy of every result as CSV and TensorBoard events.
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
# What a kill leaves unknown to Tune's record; by default ten seconds and more.
os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "1")

from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.tune.integration.ray_train import TuneReportCallback

from experiments._harness import Row
from experiments.lab.sweep import write_whole
from experiments.lab.tune import is_whole
from rex_ray import RexTrainer, local_cluster
from rex_ray.control.events import GroupStarted
from rex_ray.demo.comparison import truth_of
from rex_ray.demo.loop import demo_loop
from rex_ray.demo.settings import DemoSettings, contestant
from rex_ray.demo.summary import RunSummary, summarise
from rex_ray.report.reading.load import load_journal
from rex_ray.train.placement import label_selectors
from rex_ray.worker.emulation import emulated

__all__ = ["LivePlan", "run_sweep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlan:
    """What is swept: every policy with every seed.

    Attributes:
        policies: names as ``rex-ray demo --policy`` takes them.
        seeds: of the data's order, the weights, the noise and the controller.
        workers: workers per kind of device.
        num_epochs: per run, six steps each at 256 rows.
        global_batch_size: rows per step over all workers.
        target_accuracy: what the time to accuracy is measured to.
    """

    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    workers: Mapping[str, int] = field(default_factory=lambda: {"T4": 2, "V100": 2})
    num_epochs: int = 40
    global_batch_size: int = 256
    target_accuracy: float = 0.95

    def settings(self, seed: int) -> DemoSettings:
        """Return the settings of a run: the demo's static scenario."""
        return DemoSettings(
            workers=dict(self.workers),
            num_epochs=self.num_epochs,
            global_batch_size=self.global_batch_size,
            target_accuracy=self.target_accuracy,
            seed=seed,
        )

    def trials(self) -> list[tuple[str, int]]:
        """Return policy and seed of each trial, seed by seed: what is cut off still compares its policies in pairs."""
        return [(policy, seed) for seed in self.seeds for policy in self.policies]


def run_sweep(plan: LivePlan, folder: Path) -> list[Row]:
    """Run the trials that have no result in the folder; return the rows of all, in the plan's order.

    Raises:
        ConfigError: something that cannot work, before anything starts.
        RuntimeError: trials failed, each with its own words, or the sweep was interrupted.
    """
    for policy, seed in plan.trials():
        plan.settings(seed).check([policy])
    missing = [trial for trial in plan.trials() if not _result_file(folder, *trial).exists()]
    if missing:
        (folder / "results").mkdir(parents=True, exist_ok=True)
        with local_cluster(plan.workers):
            errors = _tune(plan, folder.resolve())
        if errors:
            raise RuntimeError("\n".join([f"{len(errors)} live trials failed:", *errors]))
        missing = [trial for trial in plan.trials() if not _result_file(folder, *trial).exists()]
    if missing:
        raise RuntimeError(f"interrupted: {len(missing)} live trials are missing; the same command goes on")
    return [json.loads(_result_file(folder, *trial).read_text(encoding="utf-8")) for trial in plan.trials()]


def _result_file(folder: Path, policy: str, seed: int) -> Path:
    return folder / "results" / f"{policy}-seed{seed}.json"


def _tune(plan: LivePlan, folder: Path) -> list[str]:
    """Have Tune run what its record does not call finished; return what failed."""
    record = folder / "tune"
    # Trials need nothing of the cluster's CPUs, which are the workers'; but an empty request is refused.
    trainable = tune.with_resources(_live_trial, {"CPU": 0, "node:__internal_head__": 0.001})
    if is_whole(record):
        tuner = tune.Tuner.restore(str(record), trainable, resume_unfinished=True, restart_errored=True)
    else:
        shutil.rmtree(record, ignore_errors=True)  # torn as it was written: results lie beside it and are read again
        trials = [{"policy": policy, "seed": seed} for policy, seed in plan.trials()]
        tuner = tune.Tuner(
            trainable,
            param_space={
                "plan": asdict(plan),
                "folder": str(folder),
                "trial": tune.grid_search(trials),
            },
            # One at a time: they have the same workers, and times are measured.
            tune_config=tune.TuneConfig(
                max_concurrent_trials=1, trial_name_creator=_trial_name, trial_dirname_creator=_trial_name
            ),
            run_config=tune.RunConfig(name=record.name, storage_path=str(folder), verbose=0),
        )
    # Tune prints where to look at TensorBoard's files, of which there are none here.
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        results = tuner.fit()
    return [
        f"  {result.config['trial']}: {str(result.error).strip().splitlines()[-1]}"
        for result in results
        if result.error is not None and result.config is not None
    ]


def _trial_name(trial: Any) -> str:
    return "{policy}-seed{seed}".format(**trial.config["trial"])


def _live_trial(config: dict[str, Any]) -> None:
    """Train once; Tune hears of every epoch, and at the end what the run's journal says of it."""
    plan, folder = LivePlan(**config["plan"]), Path(config["folder"])
    policy, seed = config["trial"]["policy"], config["trial"]["seed"]
    file = _result_file(folder, policy, seed)
    if not file.exists():  # it may have been written just before a kill that Tune's record missed
        summary = _trained(plan, policy, seed, folder / "runs" / f"{file.stem}-{uuid.uuid4().hex[:8]}")
        write_whole(file, json.dumps({"policy": policy, "seed": seed, **_row(summary)}))
    tune.report(json.loads(file.read_text(encoding="utf-8")))


def _trained(plan: LivePlan, policy: str, seed: int, run_dir: Path) -> RunSummary:
    settings, who = plan.settings(seed), contestant(policy)
    emulation = settings.emulation()
    trainer = RexTrainer(
        emulated(demo_loop, emulation),
        train_loop_config=settings.loop_config(),
        rex_config=settings.rex_config(who),
        scaling_config=ScalingConfig(
            num_workers=sum(plan.workers.values()), label_selector=label_selectors(plan.workers)
        ),
        run_config=RunConfig(name=run_dir.name, storage_path=str(run_dir.parent), callbacks=[TuneReportCallback()]),
    )
    trainer.fit()
    journal = load_journal(run_dir)
    group = next(event for event in reversed(journal.events) if isinstance(event, GroupStarted))
    truth = truth_of(emulation, [worker.device for worker in group.problem.workers], plan.global_batch_size)
    return summarise(policy, journal.entries, truth, target_accuracy=plan.target_accuracy)


def _row(summary: RunSummary) -> Row:
    return {
        "tta_s": summary.time_to_target_s,
        "time_s": summary.full_time_s,
        "step_ms": 1000 * summary.median_step_s,
        "accuracy": summary.final_accuracy,
        "changes": summary.reallocations,
        "shares_gap_pct": summary.shares_gap_pct,
        "emulation_error_pct": 100 * summary.emulation_error,
        "rows_once": summary.rows_seen_exactly_once,
    }
