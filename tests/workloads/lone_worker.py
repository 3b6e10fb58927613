"""A workload's own loop on one worker, without Ray and without a controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scripted import MemoryReporter

from rex_ray.worker.link import MetricRecord, NullLink, Record
from rex_ray.worker.opening import open_session
from rex_ray.worker.options import WorkerOptions


class MetricLink(NullLink):
    """Nobody decides; what was reported is kept."""

    def __init__(self) -> None:
        self.metrics: list[Mapping[str, float]] = []

    def send(self, records: Sequence[Record]) -> None:
        self.metrics.extend(record.metrics for record in records if isinstance(record, MetricRecord))


def train_alone(
    train_loop: Callable[[dict[str, Any]], None], config: dict[str, Any], **options: Any
) -> list[Mapping[str, float]]:
    """Run the loop; return what it reported, one mapping per epoch. ``options`` are ``WorkerOptions``'."""
    link = MetricLink()
    with open_session(
        options=WorkerOptions(**options), device="CPU", node="here", link=link, reporter=MemoryReporter()
    ):
        train_loop(config)
    return link.metrics
