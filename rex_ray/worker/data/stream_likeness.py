"""Whether ranks were given one and the same stream, of which each would train on every row.

A stream is taken for its rank's own, since only the data set knows how it is divided. Under an ``IterableDataset`` that
forgets to, every row is trained on once per rank, and nothing looks wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from rex_ray.worker.tree import tensors_in

__all__ = ["alike_in_words", "first_rows_digest"]

_NUM_ROWS = 4
"""One row may be like another by chance; several in the same order hardly are."""


def first_rows_digest(batch: Any, num_rows: int) -> int:
    """Return a number that stands for the first rows of a batch, 0 where there are too few to tell."""
    if num_rows < _NUM_ROWS:
        return 0
    digest, num_bytes = hashlib.sha256(), 0
    for tensor in tensors_in(batch):
        if tensor.dim() > 0 and tensor.shape[0] == num_rows and tensor.layout is torch.strided:
            data = tensor[:_NUM_ROWS].detach().reshape(-1).view(torch.uint8).numpy().tobytes()
            digest.update(data)
            num_bytes += len(data)
    return int.from_bytes(digest.digest()[:7], "big") if num_bytes else 0


def alike_in_words(digests: Sequence[int]) -> str | None:
    """Return which ranks' streams begin alike, None if no two do."""
    for digest in digests:
        ranks = [rank for rank, other in enumerate(digests) if other == digest]
        if digest and len(ranks) > 1:
            named = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
            return (
                f"the streams of ranks {named} begin with the same {_NUM_ROWS} rows. A stream is its rank's own: if "
                "these are one stream, every row of it is trained on by each of them. Divide it by session.rank and "
                "session.world_size, or give session.loader a map-style data set, which is divided by itself"
            )
    return None
