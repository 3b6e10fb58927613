"""What measuring gradient norms costs a step: ``python -m experiments.norm_cost --json FILE``.

Pairs of one training step, with norms at every step and with none, take turns in one process of one gloo rank: for
SGD and for AdamW, whose norms are taken after its preconditioner, with the share as one batch and cut into
micro-batches, each of which is a gradient group. A kind's cost is the median over rounds of the difference in the
process's own CPU time, counted once in ``INTERVAL_STEPS`` steps. A million parameters in sixty tensors: the cost
is a few passes over the gradient and a few calls per tensor, so it grows with the parameters and the micro-batches, and
not with the rows.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from experiments._harness import Findings, Row, Settings, bootstrap_median, main
from experiments._overhead_loops import LEARNING_RATE, WIDTH, layered_net
from rex_ray.core.measuring import INTERVAL_STEPS
from rex_ray.core.types import Allocation, FloatArray
from rex_ray.worker.data.sampler import Plan
from rex_ray.worker.group.presence import Presence
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.measuring.probes import RecordQueue
from rex_ray.worker.measuring.timing import now_s
from rex_ray.worker.model.comm_hook import Reduction, reduce_bucket
from rex_ray.worker.model.microbatch import Gradients
from rex_ray.worker.model.optimizer_hooks import OptimizerHooks
from rex_ray.worker.model.preconditioner import AdamPreconditioner
from rex_ray.worker.model.thawed import ThawedGradients
from rex_ray.worker.model.weighting import OutputWeights
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.progress import Progress
from rex_ray.worker.tracker import StepTracker

LOCAL_ROWS = 64
NUM_CHUNKS = 4
KINDS = {
    "SGD": (torch.optim.SGD, 1),
    "AdamW": (torch.optim.AdamW, 1),
    f"SGD, {NUM_CHUNKS} micro-batches": (torch.optim.SGD, NUM_CHUNKS),
    f"AdamW, {NUM_CHUNKS} micro-batches": (torch.optim.AdamW, NUM_CHUNKS),
}


def measure(settings: Settings) -> Findings:
    """Measure what gradient norms cost."""
    num_rounds = 40 if settings.quick else 200
    torch.set_num_threads(1)
    seconds = step_seconds(num_rounds, settings.seed)
    rows: list[Row] = []
    figures: dict[str, float] = {}
    for kind, times in seconds.items():
        measured = bootstrap_median(times[:, 1] - times[:, 0], seed=settings.seed)
        step_s = float(np.median(times[:, 0]))
        median, low, high = (1e6 * cost / INTERVAL_STEPS for cost in measured)
        rows.append(
            {
                "norms of": kind,
                "us_when_due": 1e6 * measured[0],
                "us_per_step": median,
                "lo_us": low,
                "hi_us": high,
                "of_step": median / (1e6 * step_s),
            }
        )
        figures[f"norms_{kind.lower().replace(', ', '_').replace(' ', '_').replace('-', '_')}_us"] = median
    return Findings(
        figures=figures,
        tables={"norms, per step": rows},
        settings={"num_rounds": num_rounds, "local_rows": LOCAL_ROWS, "interval_steps": INTERVAL_STEPS},
    )


def step_seconds(num_rounds: int, seed: int) -> dict[str, FloatArray]:
    """Return seconds of each step without and with norms by kind, shape ``[num_rounds, 2]``."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'meet'}", rank=0, world_size=1)
        try:
            return {kind: _seconds(*of, num_rounds, seed) for kind, of in KINDS.items()}
        finally:
            dist.destroy_process_group()


def _seconds(make: type[torch.optim.Optimizer], num_chunks: int, num_rounds: int, seed: int) -> FloatArray:
    """Time steps without and with norms in turns of random order."""
    variants = [_Variant(make, num_chunks, takes_norms=takes_norms) for takes_norms in (False, True)]
    for variant in variants:
        for _ in range(5):
            variant.step()
    rng = np.random.default_rng(seed)
    seconds = np.empty((num_rounds, 2))
    for times in seconds:
        for k in rng.permutation(2):
            times[k] = variants[k].step()
    return seconds


class _Variant:
    """A training step of the first of two ranks, with norms at every step or with none."""

    def __init__(self, make: type[torch.optim.Optimizer], num_chunks: int, *, takes_norms: bool) -> None:
        self._num_chunks, self._takes_norms = num_chunks, takes_norms
        net = layered_net()
        options = WorkerOptions(global_batch_size=4 * LOCAL_ROWS, norm_interval_steps=int(takes_norms))
        self._tracker = StepTracker(
            rank=0,
            options=options,
            device=torch.device("cpu"),
            generation="cost",
            records=RecordQueue(lambda _: None),
            progress=Progress(),
        )
        self._optimizer = make(net.parameters(), lr=LEARNING_RATE)  # type: ignore[call-arg]
        self._tracker.norms.parameters = list(net.parameters())
        if make is not torch.optim.SGD:
            self._tracker.norms.preconditioner = AdamPreconditioner(self._optimizer)
        self._model = DistributedDataParallel(net, gradient_as_bucket_view=True)
        OutputWeights(self._tracker, by_tokens=False, complete=None).install(self._model)
        group = dist.group.WORLD
        assert group is not None, "the process group was initialised"
        reduction = Reduction(self._tracker, group, Presence(0, 1, 60.0), ThawedGradients(net))
        self._model.register_comm_hook(reduction, reduce_bucket)
        OptimizerHooks(self._tracker, None).install(self._optimizer)
        self._gradients = Gradients(tracker=self._tracker, group=SideGroup(60.0), by_tokens=False, model=self._model)
        self._inputs = torch.randn(LOCAL_ROWS, WIDTH)
        allocation = Allocation(version=0, local_batch_sizes=(LOCAL_ROWS, 3 * LOCAL_ROWS))
        self._plan = Plan(step=0, epoch=0, cursor=0, allocation=allocation, num_rows=allocation.local_batch_sizes)
        self._num_steps = 0

    def step(self) -> float:
        """Run one step; return its seconds.

        Raises:
            RuntimeError: norms were taken where they should not be, or the reverse.
        """
        began_s = time.process_time()
        in_hand = self._tracker.begin(self._plan, asked_s=now_s())
        for chunk in self._gradients.micro_batches(self._inputs, self._num_chunks, None):
            self._gradients.backward(functional.mse_loss(self._model(chunk), chunk), None)
        self._optimizer.step()
        self._optimizer.zero_grad()
        took_s = time.process_time() - began_s
        self._num_steps += 1
        if self._num_steps > 1 and (in_hand.norms.global_sq is not None) != self._takes_norms:
            raise RuntimeError(f"a step that should {'' if self._takes_norms else 'not '}take norms did otherwise")
        return took_s


if __name__ == "__main__":
    main("norm_cost", measure)
