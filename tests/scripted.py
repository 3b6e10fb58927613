"""In-memory counterparts of a worker's two outside contacts, and the data that the cases ask for."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from rex_ray.core.types import Allocation, StepRecord
from rex_ray.worker.link import GroupInfo, MetricRecord, NullLink, Record
from rex_ray.worker.opening import open_session
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.saving.archive import Saved
from rex_ray.worker.session import Session


class ScriptedLink(NullLink):
    """A link whose controller follows a script.

    Args:
        first: shares that the group starts with; None: equal ones.
        published: allocations by the number of the poll from which on they are the newest.
    """

    def __init__(self, first: Sequence[int] | None = None, published: Mapping[int, Allocation] | None = None) -> None:
        self.first = first
        self.published = dict(published or {})
        self.records: list[Record] = []
        self.group: GroupInfo | None = None
        self.generations: list[str] = []
        self.num_polls = 0
        self.closed = False

    def join(self, group: GroupInfo, timeout_s: float) -> Allocation:
        self.group = group
        if self.first is None:
            return super().join(group, timeout_s)
        return Allocation(version=0, local_batch_sizes=tuple(self.first))

    def started(self, generation: str) -> None:
        self.generations.append(generation)

    def send(self, records: Sequence[Record]) -> None:
        self.records.extend(records)

    def latest(self) -> Allocation | None:
        self.num_polls += 1
        due = [poll for poll in self.published if poll <= self.num_polls]
        return self.published[max(due)] if due else None

    def close(self, timeout_s: float) -> None:
        self.closed = True

    @property
    def steps(self) -> list[StepRecord]:
        return [record for record in self.records if isinstance(record, StepRecord)]

    @property
    def metrics(self) -> list[MetricRecord]:
        return [record for record in self.records if isinstance(record, MetricRecord)]


class MemoryReporter:
    """Keeps saves in memory."""

    def __init__(self, restored: Mapping[str, Any] | None = None) -> None:
        self.restored = restored
        self.saves: list[tuple[Mapping[str, Any], Mapping[str, Any] | None]] = []

    def check(self) -> None:
        """There is always room."""

    def restore(self, on_progress: Callable[[], None]) -> Saved | None:
        if self.restored is None:
            return None
        file = io.BytesIO()
        torch.save(dict(self.restored), file)
        return Saved(data=bytearray(file.getvalue()), step=self.restored["position"]["step"], where="memory")

    def write(self, state: Mapping[str, Any], on_progress: Callable[[], None]) -> None:
        """It is kept when it is reported."""

    def report(self, metrics: Mapping[str, Any], state: Mapping[str, Any] | None) -> None:
        self.saves.append((metrics, state))


class Rows(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Synthetic regression rows that carry their id; float64, so that gradients can be compared to 1e-10."""

    def __init__(self, num_rows: int, num_features: int = 6) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(num_rows, num_features, generator=generator, dtype=torch.float64)
        self.targets = torch.randn(num_rows, 1, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return row, self.inputs[row], self.targets[row]


def two_layers(num_features: int = 6) -> nn.Module:
    """The same two-layer network on every call."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(num_features, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def opened(
    link: NullLink | None = None, reporter: MemoryReporter | None = None, **options: Any
) -> AbstractContextManager[Session]:
    """Open a session with defaults fit for tests."""
    options = {"global_batch_size": 12, "collective_timeout_s": 15.0, "replica_check_interval_steps": 1, **options}
    return open_session(
        options=WorkerOptions(**options),
        device="test",
        node="here",
        link=link or NullLink(),
        reporter=reporter or MemoryReporter(),
    )


def gradient_of(model: nn.Module) -> torch.Tensor:
    """Return all gradients as one vector."""
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).clone()
