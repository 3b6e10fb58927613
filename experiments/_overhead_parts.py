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
from rex_ray.worker.data.sampler import Plan
from rex_ray.worker.group.presence import Presence
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.measuring.probes import RecordQueue
from rex_ray.worker.measuring.timing import now_s
from rex_ray.worker.model.comm_hook import Reduction
from rex_ray.worker.model.guard import ReplicaGuard
from rex_ray.worker.model.non_finite import NonFiniteGuard
from rex_ray.worker.model.optimizer_hooks import BeforeUpdate, OptimizerHooks
from rex_ray.worker.model.thawed import ThawedGradients
from rex_ray.worker.model.weighting import OutputWeights
from rex_ray.worker.notices import Notices
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.progress import Progress
from rex_ray.worker.tracker import StepTracker

__all__ = ["measure_parts"]

NORM_INTERVAL = WorkerOptions(global_batch_size=1).norm_interval_steps
PARTS = ("weights", "stamp and optimizer hooks", "look for what is not finite", "norms")


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
            # In a new order each round: a step is a little quicker or slower for what ran just before it.
            rng = np.random.default_rng(seed)
            seconds = np.empty((num_rounds, len(variants)))
            for times in seconds:
                for k in rng.permutation(len(variants)):
                    times[k] = variants[k].step()
        finally:
            dist.destroy_process_group()
    added = np.diff(seconds, axis=1)
    added[:, PARTS.index("norms")] /= NORM_INTERVAL
    return {part: bootstrap_median(added[:, k], seed=seed) for k, part in enumerate(PARTS)}


class _Variant:
    """A training step with the first ``num_parts`` parts."""

    def __init__(self, num_parts: int) -> None:
        self._takes_norms = num_parts > 3
        looks = num_parts > 2
        options = WorkerOptions(global_batch_size=4 * LOCAL_ROWS, norm_interval_steps=int(self._takes_norms))
        self._net = layered_net()
        model = DistributedDataParallel(self._net, gradient_as_bucket_view=True)
        self._tracker = StepTracker(
            rank=0,
            options=options,
            device=torch.device("cpu"),
            generation="parts",
            records=RecordQueue(lambda _: None),
            progress=Progress(),
        )
        self._tracker.norms.parameters = list(self._net.parameters())
        if num_parts > 0:
            OutputWeights(self._tracker, by_tokens=False, complete=None, notes_gradient=looks).install(model)
        checks: list[BeforeUpdate] = []
        if num_parts > 1:
            group = dist.group.WORLD
            assert group is not None, "the process group was initialised"
            reduction = Reduction(self._tracker, group, Presence(0, 1, 60.0), ThawedGradients(self._net))
            reduction.install(model)
            if looks:
                checks.append(self._look_at(reduction))
        self._model = model
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=LEARNING_RATE)
        if num_parts > 1:
            OptimizerHooks(self._tracker, ReplicaGuard(self._net), checks=checks).install(self._optimizer)
        self._inputs = torch.randn(LOCAL_ROWS, WIDTH)
        # A quarter of the rows, so that the weight is not 1 and has to be multiplied.
        allocation = Allocation(version=0, local_batch_sizes=(LOCAL_ROWS, 3 * LOCAL_ROWS))
        self._plan = Plan(step=0, epoch=0, cursor=0, allocation=allocation, num_rows=allocation.local_batch_sizes)

    def _look_at(self, reduction: Reduction) -> BeforeUpdate:
        records = RecordQueue(lambda _: None)
        return NonFiniteGuard(
            tracker=self._tracker,
            notices=Notices(rank=0, generation="parts", progress=self._tracker.progress, records=records),
            group=SideGroup(60.0),
            policy="stop",
            model=self._net,
            reduction=reduction,
        ).before_update

    def step(self) -> float:
        """Run one step; return its seconds.

        Raises:
            RuntimeError: norms were taken where they should not be, or the reverse: the variants are not what they say.
        """
        in_hand = self._tracker.begin(self._plan, asked_s=now_s())
        began_s = time.perf_counter()
        train_step(self._model, self._optimizer, self._inputs)
        took_s = time.perf_counter() - began_s
        if (in_hand.norms.local_sq is not None) != self._takes_norms:
            raise RuntimeError(f"a step that should {'' if self._takes_norms else 'not '}take norms did otherwise")
        return took_s
