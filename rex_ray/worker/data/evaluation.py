"""Evaluating over ranks: every row once, and sums that are exact whatever each rank saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, Subset

from rex_ray.core.errors import ConfigError
from rex_ray.worker.data.loader import check_map_style, to_device
from rex_ray.worker.group.side_group import SideGroup

__all__ = ["EvalLoader", "Summable", "pool_ratio", "pool_sum"]

Summable: TypeAlias = torch.Tensor | float


class EvalLoader:
    """Yields this rank's part of a data set, in order, without padding: over all ranks every row comes once.

    Args:
        dataset: any map-style data set.
        rank: whose part.
        num_ranks: parts.
        local_batch_size: rows per batch.
        device: tells where batches are moved to.
        on_start: called when an iteration begins.
        options: further DataLoader options.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        rank: int,
        num_ranks: int,
        local_batch_size: int,
        device: Callable[[], torch.device],
        on_start: Callable[[], None],
        options: dict[str, Any],
    ) -> None:
        for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"):
            if name in options:
                raise ConfigError(
                    f"session.eval_loader does not take {name}={options[name]!r}: it gives each rank its part of the "
                    "rows in order; set local_batch_size for the rows per batch"
                )
        num_rows = check_map_style(dataset, "session.eval_loader")
        self.dataset = dataset
        self._device = device
        self._on_start = on_start
        part = Subset(dataset, range(rank, num_rows, num_ranks))
        self._loader: DataLoader[Any] = DataLoader(part, batch_size=local_batch_size, **options)

    def __len__(self) -> int:
        """Batches of this rank; ranks may differ by one, also down to none."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._on_start()
        for batch in self._loader:
            yield to_device(batch, self._device())


def pool_sum(group: SideGroup, values: Summable) -> torch.Tensor:
    """Return the sum of ``values`` over ranks, on the CPU: integers as int64, everything else as float64."""
    tensor = torch.as_tensor(values).detach().cpu()
    exact = torch.float64 if tensor.is_floating_point() else torch.int64
    return group.sum(tensor.to(exact), "session.pool")


def pool_ratio(group: SideGroup, numerator: Summable, denominator: Summable) -> float:
    """Return the ratio of two sums over ranks; NaN where the second one is 0."""
    pair = torch.tensor([float(numerator), float(denominator)], dtype=torch.float64)
    above, below = group.sum(pair, "session.pool").tolist()
    return above / below if below else float("nan")
