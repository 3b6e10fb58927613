"""What the session's path costs: ``python -m experiments.overhead --json FILE``.

Three measurements, each of its own kind:

- GPU-like steps. Two Ray workers train under ``RexTrainer``; their steps sleep 50 ms in backward, as a host does while
  its device computes. Blocks of 50 steps through the session (weights, hook, norms, control boundary, loader, pump,
  poller, and the controller beside them, deciding in ``advise`` mode so that both sides keep equal shares) alternate in
  ABBA order with blocks through plain DDP in the same processes and the same process group. The goal is that the upper
  end of the ratio's interval stays within 1.01. The session's freezing of old objects, which spares full garbage
  collections, is in force on both sides: one process has one collector.
- The parts one by one.
- Whole CPU-bound runs against plain TorchTrainer and DDP. They have no goal: where the host computes, every microsecond
  of Python is on the critical path, and the control plane's processes share the same cores.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.util.queue import Queue

from experiments._harness import Findings, Row, Settings, bootstrap_median, main
from experiments._overhead_loops import LOCAL_ROWS, abba_loop, plain_cpu_loop, rex_cpu_loop
from experiments._overhead_parts import measure_parts
from rex_ray.config import RexConfig
from rex_ray.train.local_cluster import LocalCluster, local_cluster
from rex_ray.train.trainer import RexTrainer

NUM_WORKERS = 2
BLOCK_STEPS = 50
SLEEP_S = 0.05
CPU_STEPS_PER_EPOCH = 250


def measure(settings: Settings) -> Findings:
    """Measure what the session's path costs, whole and in parts."""
    num_pairs, num_pump_pairs, num_rounds, num_runs, num_epochs = (
        (4, 2, 200, 1, 2) if settings.quick else (40, 10, 2000, 3, 8)
    )
    with tempfile.TemporaryDirectory() as folder, local_cluster({"CPU": NUM_WORKERS}) as cluster:
        runs = _Runs(Path(folder), cluster, settings.seed)
        abba = runs.abba(num_pairs, num_pump_pairs)
        whole = [runs.whole_pair(num_epochs) for _ in range(num_runs)]
    parts = measure_parts(num_rounds, settings.seed)

    # Shape [pairs, (on, off), (block, its batches)].
    pairs, pump_pairs = np.array(abba["pairs"]), np.array(abba["pump_pairs"])
    ratio = bootstrap_median(pairs[:, 0, 0] / pairs[:, 1, 0], seed=settings.seed)
    step_s = float(np.median(pairs[:, 1, 0])) / BLOCK_STEPS
    for part, extra_s in {
        "loader and control boundary": pairs[:, 0, 1] - pairs[:, 1, 1],
        "pump": pump_pairs[:, 0, 0] - pump_pairs[:, 1, 0],
    }.items():
        parts[part] = bootstrap_median(extra_s / BLOCK_STEPS, seed=settings.seed)
    whole_ratios = np.array([rex_s / plain_s for rex_s, plain_s in whole])
    figures = {
        "overhead_ratio_median": ratio[0],
        "overhead_ratio_lo": ratio[1],
        "overhead_ratio_hi": ratio[2],
        "overhead_goal_hi": 1.01,
        "plain_step_ms": 1e3 * step_s,
        "cpu_bound_ratio_median": float(np.median(whole_ratios)),
        **{f"{part.replace(' ', '_')}_us": 1e6 * median for part, (median, _, _) in parts.items()},
    }
    part_rows: list[Row] = [
        {"part": part, "us_per_step": 1e6 * m, "lo_us": 1e6 * lo, "hi_us": 1e6 * hi, "share_of_step": m / step_s}
        for part, (m, lo, hi) in parts.items()
    ]
    whole_rows: list[Row] = [
        {"run": k, "rex_s": rex_s, "plain_s": plain_s, "ratio": rex_s / plain_s}
        for k, (rex_s, plain_s) in enumerate(whole)
    ]
    return Findings(
        figures=figures,
        tables={"GPU-like steps, parts one by one": part_rows, "CPU-bound whole runs": whole_rows},
        settings={
            "num_workers": NUM_WORKERS,
            "num_pairs": num_pairs,
            "block_steps": BLOCK_STEPS,
            "sleep_s": SLEEP_S,
            "num_pump_pairs": num_pump_pairs,
            "num_rounds": num_rounds,
            "num_whole_runs": num_runs,
        },
    )


class _Runs:
    """Ray Train runs on one cluster; each hands its figures over in a file."""

    def __init__(self, folder: Path, cluster: LocalCluster, seed: int) -> None:
        self._folder, self._cluster, self._seed = folder, cluster, seed
        self._num_runs = 0

    def abba(self, num_pairs: int, num_pump_pairs: int) -> dict[str, Any]:
        """The pairs of GPU-like blocks, and of blocks with and without a pump beside them."""
        config = {
            "num_pairs": num_pairs,
            "num_pump_pairs": num_pump_pairs,
            "block_steps": BLOCK_STEPS,
            "sleep_s": SLEEP_S,
        }
        queue = Queue(actor_options={"num_cpus": 0})
        try:
            found: dict[str, Any] = self._rex(abba_loop, config | {"queue": queue})
            return found
        finally:
            queue.shutdown(force=True)

    def whole_pair(self, num_epochs: int) -> tuple[float, float]:
        """Seconds of a CPU-bound run with rex_ray and of the same run without; they take turns in going first."""
        config = {"num_epochs": num_epochs, "steps_per_epoch": CPU_STEPS_PER_EPOCH}
        if self._num_runs % 4 < 2:
            rex_s = self._rex(rex_cpu_loop, config)["seconds"]
            return rex_s, self._plain(plain_cpu_loop, config)["seconds"]
        plain_s = self._plain(plain_cpu_loop, config)["seconds"]
        return self._rex(rex_cpu_loop, config)["seconds"], plain_s

    def _rex(self, loop: Callable[[dict[str, Any]], None], config: dict[str, Any]) -> Any:
        # The controller does all of its work, but both sides of a comparison must keep equal shares.
        rex_config = RexConfig(global_batch_size=NUM_WORKERS * LOCAL_ROWS, policy="rex", mode="advise", seed=self._seed)
        return self._fit(RexTrainer, loop, config, rex_config=rex_config)

    def _plain(self, loop: Callable[[dict[str, Any]], None], config: dict[str, Any]) -> Any:
        return self._fit(TorchTrainer, loop, config)

    def _fit(self, trainer: Any, loop: Callable[..., None], config: dict[str, Any], **options: Any) -> Any:
        self._num_runs += 1
        name = f"run-{self._num_runs}"
        result_path = self._folder / f"{name}.json"
        trainer(
            loop,
            train_loop_config=config | {"result_path": str(result_path)},
            scaling_config=ScalingConfig(num_workers=NUM_WORKERS, label_selector=self._cluster.label_selectors),
            run_config=RunConfig(name=name, storage_path=str(self._folder)),
            **options,
        ).fit()
        return json.loads(result_path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main("overhead", measure)
