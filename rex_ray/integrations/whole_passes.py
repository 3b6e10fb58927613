"""A training loader for loops that count batches instead of asking until there is none.

Such a loop never hears of an epoch's end, at which running statistics are made alike and replicas are compared; so it
says where it thinks the end is, and the pass is ended there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rex_ray.worker.data.loader import TrainLoader

__all__ = ["WholePasses"]


class WholePasses:
    """Hands out a training loader's batches.

    Args:
        loader: the session's.
    """

    _is_accelerate_prepared = True

    def __init__(self, loader: TrainLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self.dataset = loader.dataset

    def __len__(self) -> int:
        """Reference steps per epoch; there are fewer where the global batch has grown."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._batches = iter(self._loader)
        return self._batches

    def end_pass(self) -> None:
        """End the pass if all its rows were handed out; a batch that is left comes again in the next one."""
        batches, self._batches = self._batches, None
        if batches is not None:
            next(batches, None)
