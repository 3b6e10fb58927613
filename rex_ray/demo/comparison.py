"""``rex-ray demo``: the same training on the same emulated cluster, once per policy, and what each made of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.train import RunConfig, ScalingConfig
from rich.console import Console

from rex_ray.control.events import GroupStarted
from rex_ray.core.errors import ConfigError
from rex_ray.demo.loop import demo_loop
from rex_ray.demo.progress import follow
from rex_ray.demo.scenarios import DEFAULT_POLICIES
from rex_ray.demo.settings import Contestant, DemoSettings
from rex_ray.demo.summary import RunSummary, summarise
from rex_ray.demo.table import print_summary
from rex_ray.demo.truth import Truth
from rex_ray.report.reading.load import load_journal
from rex_ray.train.local_cluster import LocalCluster, local_cluster
from rex_ray.train.trainer import RexTrainer
from rex_ray.worker.emulation import EmulationSpec, emulated

__all__ = ["run_demo", "truth_of"]


def run_demo(
    settings: DemoSettings,
    policies: Sequence[str] | None = None,
    output_dir: str | Path = "rex-ray-demo",
    console: Console | None = None,
    *,
    progress: Console | None = None,
) -> dict[str, Any]:
    """Train once per policy on one local cluster; print a table and write ``summary.json``.

    Args:
        settings: the scenario, see ``make_settings``.
        policies: in this order; default: those that the scenario compares.
        output_dir: gets ``summary.json`` and a folder per run with its journal; earlier runs stay.
        console: where the table goes; default standard output.
        progress: where it says what it does meanwhile; default ``console``.

    Returns:
        What ``summary.json`` holds: ``runs`` (one ``RunSummary`` with ``run_dir`` per policy) and ``settings``.

    Raises:
        ConfigError: something that cannot work; nothing was started.
    """
    console = console or Console()
    progress = progress or console
    chosen = DEFAULT_POLICIES[settings.scenario] if policies is None else policies
    contestants = settings.check(chosen)
    output = Path(output_dir).resolve()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {output}: {error.strerror}; choose another --output") from error
    progress.print(settings.sentence(), highlight=False)
    runs: list[tuple[RunSummary, Path]] = []
    with local_cluster(settings.workers) as cluster:
        for who in contestants:
            runs.append(_run(who, output, settings, cluster, progress))
    document = {
        "runs": [{**dataclasses.asdict(summary), "run_dir": str(run_dir)} for summary, run_dir in runs],
        "settings": {**dataclasses.asdict(settings), "policies": list(chosen), "emulated": settings.sentence()},
    }
    (output / "summary.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print_summary([summary for summary, _ in runs], settings, console)
    console.print(f"{output / 'summary.json'}", highlight=False, soft_wrap=True)
    return document


def truth_of(emulation: EmulationSpec, devices: Sequence[str], global_batch_size: int) -> Truth:
    """Return what the emulated cluster can do, in real seconds."""
    return Truth(
        timelines=tuple(emulation.timeline(device, rank) for rank, device in enumerate(devices)),
        all_reduce_s=emulation.all_reduce_s(len(devices)),
        global_batch_size=global_batch_size,
    )


def _run(
    who: Contestant, output: Path, settings: DemoSettings, cluster: LocalCluster, console: Console
) -> tuple[RunSummary, Path]:
    run_dir = _fresh_run_dir(output, who.label)
    emulation = settings.emulation()
    trainer = RexTrainer(
        emulated(demo_loop, emulation),
        train_loop_config=settings.loop_config(),
        rex_config=settings.rex_config(who),
        scaling_config=ScalingConfig(num_workers=cluster.num_workers, label_selector=cluster.label_selectors),
        run_config=RunConfig(name=run_dir.name, storage_path=str(output)),
        verbose=False,  # it has a progress of its own
    )
    with follow(run_dir / "rex_ray" / "journal", console, policy=who.label, num_epochs=settings.num_epochs):
        trainer.fit()
    journal = load_journal(run_dir)
    # The ranks' devices as the workers found them, not as they were asked for.
    group = next(event for event in reversed(journal.events) if isinstance(event, GroupStarted))
    devices = [worker.device for worker in group.problem.workers]
    truth = truth_of(emulation, devices, settings.global_batch_size)
    summary = summarise(
        who.label, journal.entries, truth, target_accuracy=settings.target_accuracy, script=settings.script
    )
    return summary, run_dir


def _fresh_run_dir(output: Path, policy: str) -> Path:
    """A folder that does not exist: Ray Train would go on with the run that it finds in one that does."""
    number = 1
    while (output / (name := policy if number == 1 else f"{policy}-{number}")).exists():
        number += 1
    return output / name
