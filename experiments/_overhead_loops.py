"""Training loops of the overhead experiment: what runs on the workers.

Each writes what rank 0 measured to a JSON file that the driver reads: both live on one machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rex_ray.core.types import StepRecord
from rex_ray.hosting.pump import Pump, pump_interval_s
from rex_ray.train.telemetry import RayTransport
from rex_ray.worker.current import get_session

__all__ = ["LOCAL_ROWS", "WIDTH", "abba_loop", "layered_net", "plain_cpu_loop", "rex_cpu_loop"]

WIDTH = 180
"""Thirty layers of this width: a million parameters in sixty tensors."""

Timing: TypeAlias = tuple[float, float]

LOCAL_ROWS = 8
LEARNING_RATE = 0.01
SETTLE_STEPS = 5
"""Steps at the start of a block that count for neither side: the pump still sends what the last block measured."""


FIRST_STEPS = 10
"""Steps before the first block: DDP builds its buckets anew after its first step, the session measures the pace."""


class _SleepInBackward(torch.autograd.Function):
    """The identity; its gradient comes ``seconds`` later, as if a device had computed it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class _Net(nn.Module):
    def __init__(self, num_layers: int, sleep_s: float) -> None:
        super().__init__()
        layers = [layer for _ in range(num_layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.body = nn.Sequential(*layers)
        self.sleep_s = sleep_s

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.body(inputs)
        if self.sleep_s:
            outputs = _SleepInBackward.apply(outputs, self.sleep_s)
        return outputs


def layered_net(sleep_s: float = 0.0, num_layers: int = 30) -> nn.Module:
    """The model of all measurements, alike on every rank and in every variant."""
    torch.manual_seed(0)
    return _Net(num_layers, sleep_s)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    """One step of any loop: forward, backward, update."""
    functional.mse_loss(model(inputs), inputs).backward()
    optimizer.step()
    optimizer.zero_grad()


def abba_loop(config: dict[str, Any]) -> None:
    """Alternate blocks of steps through the session and through plain DDP: on off, off on, on off, ...

    Both sides train a model of their own in the same process group on the same rows per rank; plain DDP gets the
    bucket views that the session sets, so that what they save is not counted for the session. Afterwards the pump
    alone is switched on and off beside plain steps.

    Args:
        config: ``num_pairs``, ``num_pump_pairs``, ``block_steps``, ``sleep_s``, ``queue``, ``result_path``.
    """
    session = get_session()
    block_steps, num_pairs = config["block_steps"], config["num_pairs"]
    num_steps = num_pairs * (block_steps + SETTLE_STEPS) + FIRST_STEPS
    rows = TensorDataset(torch.randn(num_steps * LOCAL_ROWS * session.world_size, WIDTH))

    net = layered_net(config["sleep_s"])
    model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=LEARNING_RATE))
    plain_net = layered_net(config["sleep_s"])
    plain = DistributedDataParallel(plain_net, gradient_as_bucket_view=True)
    plain_optimizer = torch.optim.SGD(plain_net.parameters(), lr=LEARNING_RATE)

    on_batches = iter(session.loader(rows))
    off_batches = _endless_batches(rows)
    on, off = (
        _Block(model, optimizer, on_batches, block_steps),
        _Block(plain, plain_optimizer, off_batches, block_steps),
    )
    for block in (on, off):
        block.train_few(FIRST_STEPS)
    pairs = _alternate(on.run, off.run, num_pairs)

    pump = Pump(RayTransport(config["queue"]), session.rank, pump_interval_s(session.world_size))
    pump.start()
    feed = _Block(
        plain, plain_optimizer, off_batches, block_steps, after_step=lambda: pump.put([_a_record(session.rank)])
    )
    pump_pairs = _alternate(feed.run, off.run, config["num_pump_pairs"])
    pump.stop(5.0)

    if session.rank == 0:
        found = {"pairs": pairs, "pump_pairs": pump_pairs}
        Path(config["result_path"]).write_text(json.dumps(found), encoding="utf-8")


class _Block:
    """One side of the comparison."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Iterator[Any],
        num_steps: int,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self._model, self._optimizer, self._batches = model, optimizer, batches
        self._block_steps = num_steps
        self._after_step = after_step

    def train_few(self, num_steps: int) -> float:
        """Train; return the seconds spent on getting the batches."""
        batch_s = 0.0
        for _ in range(num_steps):
            asked_s = time.perf_counter()
            (inputs,) = next(self._batches)
            batch_s += time.perf_counter() - asked_s
            train_step(self._model, self._optimizer, inputs)
            if self._after_step is not None:
                self._after_step()
        return batch_s

    def run(self) -> Timing:
        """Time a block, once it runs smoothly: seconds in all, and on getting the batches."""
        self.train_few(SETTLE_STEPS)
        dist.barrier()
        began_s = time.perf_counter()
        batch_s = self.train_few(self._block_steps)
        return time.perf_counter() - began_s, batch_s


def _alternate(on: Callable[[], Timing], off: Callable[[], Timing], num_pairs: int) -> list[tuple[Timing, Timing]]:
    """Run pairs of blocks in ABBA order."""
    pairs = []
    for pair in range(num_pairs):
        if pair % 2 == 0:
            on_s = on()
            off_s = off()
        else:
            off_s = off()
            on_s = on()
        pairs.append((on_s, off_s))
    return pairs


def _endless_batches(rows: TensorDataset) -> Iterator[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(rows, shuffle=True)
    loader: DataLoader[Any] = DataLoader(rows, batch_size=LOCAL_ROWS, sampler=sampler)
    while True:
        yield from loader


def _a_record(rank: int) -> StepRecord:
    return StepRecord(
        generation="overhead",
        epoch=0,
        rank=rank,
        step=0,
        allocation_version=0,
        num_rows=LOCAL_ROWS,
        data_s=0.001,
        compute_s=0.05,
        sync_s=0.001,
        step_s=0.052,
    )


def rex_cpu_loop(config: dict[str, Any]) -> None:
    """A whole CPU-bound run through the session; its loop alone is timed, not the start of processes."""
    session = get_session()
    rows = _cpu_rows(config)
    net = layered_net()
    model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=LEARNING_RATE))
    loader = session.loader(rows)
    began_s = time.perf_counter()
    for _ in session.epochs(config["num_epochs"]):
        for (inputs,) in loader:
            train_step(model, optimizer, inputs)
    _write_seconds(config, session.rank, time.perf_counter() - began_s)


def plain_cpu_loop(config: dict[str, Any]) -> None:
    """The same run as a Ray Train user writes it without rex_ray."""
    from ray.train import get_context  # noqa: PLC0415
    from ray.train.torch import prepare_model  # noqa: PLC0415

    rows = _cpu_rows(config)
    model = prepare_model(layered_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    sampler: DistributedSampler[Any] = DistributedSampler(rows, shuffle=True)
    loader: DataLoader[Any] = DataLoader(rows, batch_size=LOCAL_ROWS, sampler=sampler)
    began_s = time.perf_counter()
    for epoch in range(config["num_epochs"]):
        sampler.set_epoch(epoch)
        for (inputs,) in loader:
            train_step(model, optimizer, inputs)
    _write_seconds(config, get_context().get_world_rank(), time.perf_counter() - began_s)


def _cpu_rows(config: dict[str, Any]) -> TensorDataset:
    return TensorDataset(torch.randn(config["steps_per_epoch"] * LOCAL_ROWS * dist.get_world_size(), WIDTH))


def _write_seconds(config: dict[str, Any], rank: int, seconds: float) -> None:
    if rank == 0:
        Path(config["result_path"]).write_text(json.dumps({"seconds": seconds}), encoding="utf-8")
