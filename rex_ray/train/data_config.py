"""How a run's Ray data sets reach its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray.train import DataConfig

__all__ = ["DealingDataConfig"]


class DealingDataConfig(DataConfig):  # type: ignore[misc]
    """Deals blocks on demand instead of splitting a data set beforehand; what ``RexTrainer`` uses by itself.

    Takes Ray's arguments. Data sets that ``datasets_to_split`` leaves out are read whole by every worker, as ever;
    ``enable_shard_locality`` has no effect, since blocks go to who asks. Give ``ray.train.DataConfig`` instead to
    have Ray's equal parts.
    """

    def configure(
        self,
        datasets: Mapping[str, Any],
        world_size: int,
        worker_handles: Sequence[Any] | None,
        worker_node_ids: Sequence[str] | None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """Return each worker's shards by name, in rank order."""
        from rex_ray.train.dealing import deal  # noqa: PLC0415 - Ray Data takes a second, and most runs use none

        split = self._datasets_to_split
        dealt = {name: dataset for name, dataset in datasets.items() if split == "all" or name in split}
        others = {name: dataset for name, dataset in datasets.items() if name not in dealt}
        shards: list[dict[str, Any]] = super().configure(others, world_size, worker_handles, worker_node_ids, **kwargs)
        for name, dataset in dealt.items():
            if dataset.name is None:
                dataset.set_name(name)
            own = dataset.copy(dataset)
            own.context.execution_options = self._resolve_execution_options(name)
            for by_name, shard in zip(shards, deal(own, world_size), strict=True):
                by_name[name] = shard
        return shards
