"""``rex-ray demo``: the same training on the same mixed cluster, once per policy, and what each of them made of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ray.train import RunConfig, ScalingConfig
from rich.console import Console

from rex_ray.config import RexConfig
from rex_ray.control.events import GroupStarted
from rex_ray.core.errors import ConfigError, nearest_name_hint
from rex_ray.core.types import FloatArray
from rex_ray.demo.digits import NUM_TRAIN_ROWS, digits_loop
from rex_ray.demo.progress import follow
from rex_ray.demo.summary import RunSummary, RunTrace, Truth, summarise
from rex_ray.demo.table import print_summary
from rex_ray.policies.registry import policy_names
from rex_ray.report.load import load_journal
from rex_ray.scenario import NoiseModel, load_network
from rex_ray.train.local_cluster import LocalCluster, local_cluster
from rex_ray.train.trainer import RexTrainer
from rex_ray.worker.emulation import EmulationSpec, emulated

__all__ = ["DEFAULT_POLICIES", "DEFAULT_WORKERS", "DemoSettings", "run_demo", "truth_of"]

FULL_EPOCHS = 40
QUICK_EPOCHS = 8

DEFAULT_POLICIES = ("bsp", "dlb", "rex")
DEFAULT_WORKERS: Mapping[str, int] = {"T4": 2, "V100": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Everything that the demo's figures depend on.

    Attributes:
        workers: workers per kind of device.
        num_epochs: of six steps each at the default batch.
        global_batch_size: rows per step over all workers.
        learning_rate: of SGD with momentum 0.9.
        target_accuracy: on the 360 test images; reached about half way.
        workload: profile that the workers' own times are stretched to.
        network: kind of device whose public cluster gives the all-reduce time. The profiles' T4 cluster needs 97 ms
            for four workers, which would hide a part of what a split can change; the default is a fast network.
        time_scale: real seconds per emulated second: slow enough for four workers on two cores to keep up.
        noise_sd: relative sd of own times, with memory (a dedicated machine's is 1 %).
        seed: of the order of the rows, of the weights, of the noise and of the controller.
    """

    workers: Mapping[str, int] = field(default_factory=lambda: dict(DEFAULT_WORKERS))
    num_epochs: int = FULL_EPOCHS
    global_batch_size: int = 256
    learning_rate: float = 0.025
    target_accuracy: float = 0.95
    workload: str = "resnet50"
    network: str = "A100"
    time_scale: float = 0.5
    noise_sd: float = 0.01
    seed: int = 0

    def emulation(self) -> EmulationSpec:
        """The world that the workers play."""
        return EmulationSpec(
            workload=self.workload,
            time_scale=self.time_scale,
            noise=NoiseModel(sd=self.noise_sd),
            network=load_network(self.workload, self.network),
            seed=self.seed,
        )

    def check(self, policies: Sequence[str]) -> None:
        """Refuse what cannot work, before the cluster starts.

        Raises:
            ConfigError: names the value and the remedy.
        """
        if not policies:
            raise ConfigError(f"no policy was given; choose some of {', '.join(policy_names())}")
        for policy in policies:
            if policy not in policy_names():
                raise ConfigError(f"unknown policy {policy!r}{nearest_name_hint(policy, policy_names())}")
        if self.num_epochs < 1:
            raise ConfigError(f"the demo needs at least one epoch, got {self.num_epochs}")
        self.emulation().check(self.workers)
        num_workers = sum(self.workers.values())
        RexConfig(global_batch_size=self.global_batch_size).check_group(num_workers, NUM_TRAIN_ROWS)

    def sentence(self) -> str:
        """What is real and what is emulated, in one sentence."""
        cluster = " + ".join(f"{count} {device}" for device, count in self.workers.items())
        return (
            "Real: the Ray workers, gloo, the data (scikit-learn's digits), the gradients, the controller. Emulated: "
            f"{cluster}, by letting each worker sleep until its step took as long as {self.workload} takes on its "
            "device by public measurements (rex_ray/scenario/profiles.toml), then for the all-reduce of an "
            f"{self.network} cluster; all times scaled by {self.time_scale:g}."
        )


def run_demo(
    policies: Sequence[str] = DEFAULT_POLICIES,
    output_dir: str | Path = "rex-ray-demo",
    *,
    seed: int = 0,
    workers: Mapping[str, int] | None = None,
    num_epochs: int | None = None,
    quick: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train once per policy on one local cluster; print a table and write ``summary.json``.

    Args:
        policies: in this order.
        output_dir: gets ``summary.json`` and a folder per run with its journal; earlier runs stay.
        seed: of everything random.
        workers: workers per kind of device, default two T4 and two V100.
        num_epochs: default: enough for the target accuracy, under five minutes in all on two cores.
        quick: eight epochs: it shows the way the demo works, without reaching the target.
        console: where progress and the table go; default standard output.

    Returns:
        What ``summary.json`` holds: ``runs`` (one ``RunSummary`` with ``run_dir`` per policy) and ``settings``.

    Raises:
        ConfigError: something that cannot work; nothing was started.
    """
    settings = DemoSettings(
        workers=dict(workers or DEFAULT_WORKERS),
        num_epochs=num_epochs if num_epochs is not None else QUICK_EPOCHS if quick else FULL_EPOCHS,
        seed=seed,
    )
    console = console or Console()
    settings.check(policies)
    output = Path(output_dir).resolve()
    output.mkdir(parents=True, exist_ok=True)
    console.print(settings.sentence(), highlight=False)
    runs: list[tuple[RunSummary, Path]] = []
    with local_cluster(settings.workers) as cluster:
        for policy in policies:
            runs.append(_run_policy(policy, output, settings, cluster, console))
    document = {
        "runs": [{**dataclasses.asdict(summary), "run_dir": str(run_dir)} for summary, run_dir in runs],
        "settings": {**dataclasses.asdict(settings), "policies": list(policies), "emulated": settings.sentence()},
    }
    (output / "summary.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print_summary([summary for summary, _ in runs], settings.target_accuracy, console)
    console.print(f"{output / 'summary.json'}", highlight=False, soft_wrap=True)
    return document


def truth_of(emulation: EmulationSpec, devices: Sequence[str], global_batch_size: int) -> Truth:
    """Return what the emulated cluster can do, in real seconds."""
    profiles = [emulation.profile(device) for device in devices]
    timelines = [emulation.timeline(device, rank) for rank, device in enumerate(devices)]

    def own_s(num_rows: Sequence[int]) -> FloatArray:
        times = [line.quiet_time_s(rows) for line, rows in zip(timelines, num_rows, strict=True)]
        return np.array(times, dtype=np.float64)

    peak_rates = []
    for profile in profiles:
        sizes = np.arange(1, profile.max_local_batch_size + 1)
        peak_rates.append(float((sizes / profile.own_time_s(sizes)).max()) / emulation.time_scale)
    return Truth(
        own_s=own_s,
        all_reduce_s=emulation.all_reduce_s(len(devices)),
        optimum=emulation.optimum(devices, global_batch_size).local_batch_sizes,
        peak_rows_per_s=sum(peak_rates),
    )


def _run_policy(
    policy: str, output: Path, settings: DemoSettings, cluster: LocalCluster, console: Console
) -> tuple[RunSummary, Path]:
    run_dir = _fresh_run_dir(output, policy)
    emulation = settings.emulation()
    trainer = RexTrainer(
        emulated(digits_loop, emulation),
        train_loop_config={
            "num_epochs": settings.num_epochs,
            "learning_rate": settings.learning_rate,
            "seed": settings.seed,
        },
        rex_config=RexConfig(
            global_batch_size=settings.global_batch_size,
            policy=policy,
            seed=settings.seed,
            # Growth is not what the demo compares: every policy keeps the batch, so that they learn alike.
            max_global_batch_size=settings.global_batch_size,
        ),
        scaling_config=ScalingConfig(num_workers=cluster.num_workers, label_selector=cluster.label_selectors),
        run_config=RunConfig(name=run_dir.name, storage_path=str(output)),
    )
    with follow(run_dir / "rex_ray" / "journal", console, policy=policy, num_epochs=settings.num_epochs):
        trainer.fit()
    journal = load_journal(run_dir)
    # The ranks' devices as the workers found them, not as they were asked for.
    group = next(event for event in reversed(journal.events) if isinstance(event, GroupStarted))
    devices = [worker.device for worker in group.problem.workers]
    truth = truth_of(emulation, devices, settings.global_batch_size)
    trace = RunTrace.from_events(journal.events)
    return summarise(policy, trace, truth, target_accuracy=settings.target_accuracy), run_dir


def _fresh_run_dir(output: Path, policy: str) -> Path:
    """A folder that does not exist: Ray Train would go on with the run that it finds in one that does."""
    number = 1
    while (output / (name := policy if number == 1 else f"{policy}-{number}")).exists():
        number += 1
    return output / name
