"""Whether ranks were given one and the same stream, of which each would train on every row.

A stream is taken for its rank's own, since only the data set knows how it is divided. Under an ``IterableDataset`` that
forgets to, every row is trained on once per rank, and nothing looks wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rex_ray.worker.tree import children

__all__ = ["alike_in_words", "first_rows_digest"]

_NUM_ROWS = 4
"""One row may be like another by chance; several in the same order hardly are."""


def first_rows_digest(batch: Any, num_rows: int) -> int:
    """Return a number that stands for the first rows of a batch, 0 where they do not tell one stream from another.

    They do not where they are too few, or like one another: silence at the beginning, or labels of texts that are not
    looked at.
    """
    if num_rows < _NUM_ROWS:
        return 0
    rows = [hashlib.sha256() for _ in range(_NUM_ROWS)]
    for column in _columns(batch, num_rows):
        for row, content in zip(rows, column, strict=True):
            row.update(content)
    digests = [row.digest() for row in rows]
    if len(set(digests)) < _NUM_ROWS:
        return 0
    return int.from_bytes(hashlib.sha256(b"".join(digests)).digest()[:7], "big")


def alike_in_words(digests: Sequence[int]) -> str | None:
    """Return which ranks' streams begin alike, None if no two do."""
    ranks_of: dict[int, list[int]] = {}
    for rank, digest in enumerate(digests):
        if digest:
            ranks_of.setdefault(digest, []).append(rank)
    for ranks in ranks_of.values():
        if len(ranks) > 1:
            named = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
            return (
                f"the streams of ranks {named} begin with the same {_NUM_ROWS} rows. A stream is its rank's own: if "
                "these are one stream, every row of it is trained on by each of them. Divide it by session.rank and "
                "session.world_size, or give session.loader a map-style data set, which is divided by itself"
            )
    return None


def _columns(batch: Any, num_rows: int) -> Iterator[list[bytes]]:
    """Yield the first rows of each column whose contents can be compared: tensors and texts."""
    if isinstance(batch, torch.Tensor):
        if _is_readable(batch) and batch.dim() > 0 and batch.shape[0] == num_rows:
            # A collate function may have put it on a GPU.
            first = batch[:_NUM_ROWS].detach().cpu().resolve_conj().resolve_neg().contiguous()
            yield [row.reshape(-1).view(torch.uint8).numpy().tobytes() for row in first]
        return
    if isinstance(batch, (list, tuple)) and len(batch) == num_rows:
        texts = [item for item in batch[:_NUM_ROWS] if isinstance(item, (str, bytes))]
        if len(texts) == _NUM_ROWS:
            yield [text.encode(errors="replace") if isinstance(text, str) else text for text in texts]
            return
    for child in children(batch):
        yield from _columns(child, num_rows)


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary one, whose bytes are its contents."""
    is_ordinary = not tensor.is_nested and tensor.layout is torch.strided
    return is_ordinary and not tensor.is_quantized and tensor.device.type != "meta"
