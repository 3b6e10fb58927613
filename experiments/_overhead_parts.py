"""The parts of the session's path one by one, in one process: the noise of a second one would drown them.

Variants of the same training step that add one part each take turns, so that whatever disturbs the machine disturbs
all alike; a part is the median over rounds of the difference between two neighbours.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from experiments._harness import bootstrap_median
from experiments._overhead_loops import LEARNING_RATE, LOCAL_ROWS, WIDTH, layered_net, train_step
from rex_ray.core.types import Allocation
from rex_ray.worker.comm_hook import Reduction, reduce_bucket
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.probes import RecordQueue
from rex_ray.worker.sampler import Plan
from rex_ray.worker.timing import now_s
from rex_ray.worker.tracker import StepTracker
from rex_ray.worker.weighting import OutputWeights

__all__ = ["measure_parts"]

NORM_INTERVAL = WorkerOptions(global_batch_size=1).norm_interval_steps
PARTS = ("weights", "hook and stamp", "norms")


def measure_parts(num_rounds: int, seed: int) -> dict[str, tuple[float, float, float]]:
    """Return seconds per step of each part: median and 95 % bootstrap interval.

    Norms are measured at every step and counted at the share of steps that takes them.
    """
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'meet'}", rank=0, world_size=1)
        try:
            variants = [_Variant(num_parts) for num_parts in range(len(PARTS) + 1)]
            for variant in variants:
                for _ in range(10):
                    variant.step()
            seconds = np.array([[variant.step() for variant in variants] for _ in range(num_rounds)])
        finally:
            dist.destroy_process_group()
    added = np.diff(seconds, axis=1)
    added[:, PARTS.index("norms")] /= NORM_INTERVAL
    return {part: bootstrap_median(added[:, k], seed=seed) for k, part in enumerate(PARTS)}


class _Variant:
    """A training step with the first ``num_parts`` parts."""

    def __init__(self, num_parts: int) -> None:
        options = WorkerOptions(global_batch_size=4 * LOCAL_ROWS, norm_interval_steps=1 if num_parts > 2 else 0)
        self._net = layered_net()
        model = DistributedDataParallel(self._net, gradient_as_bucket_view=True)
        self._tracker = StepTracker(
            rank=0, options=options, device=torch.device("cpu"), generation="parts", records=RecordQueue(lambda _: None)
        )
        self._tracker.parameters = list(self._net.parameters())
        if num_parts > 0:
            OutputWeights(self._tracker, by_tokens=False, complete=None).install(model)
        if num_parts > 1:
            group = dist.group.WORLD
            assert group is not None, "the process group was initialised"
            model.register_comm_hook(Reduction(self._tracker, group), reduce_bucket)
        self._model = model
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=LEARNING_RATE)
        self._inputs = torch.randn(LOCAL_ROWS, WIDTH)
        # A quarter of the rows, so that the weight is not 1 and has to be multiplied.
        allocation = Allocation(version=0, local_batch_sizes=(LOCAL_ROWS, 3 * LOCAL_ROWS))
        self._plan = Plan(step=0, epoch=0, cursor=0, allocation=allocation, num_rows=allocation.local_batch_sizes)

    def step(self) -> float:
        """Run one step; return its seconds."""
        self._tracker.begin(self._plan, asked_s=now_s())
        self._tracker.reductions_since_update = 0
        began_s = time.perf_counter()
        train_step(self._model, self._optimizer, self._inputs)
        return time.perf_counter() - began_s
