"""Whether a state that was read is one that a session can go on from, judged before anything is loaded of it."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rex_ray.core.errors import ConfigError, StorageError, first_line
from rex_ray.worker.tree import is_plain, map_tensors

__all__ = ["check_plain", "checked"]


def checked(state: object) -> dict[str, Any]:
    """Return a state whose own fields are what a session writes; the user's parts are judged by those that load them.

    Raises:
        StorageError: they are not; names the first one.
    """
    if not isinstance(state, dict):
        raise StorageError(f"it holds a {type(state).__name__} and no session's state")
    position, rng, allocation = state.get("position"), state.get("rng"), state.get("allocation")
    if not (isinstance(position, dict) and all(_is_count(position.get(name)) for name in ("epoch", "cursor", "step"))):
        raise StorageError("its position is none")
    if not (_is_count(position.get("seed")) and _is_count_or_none(position.get("dataset_size", 0))):
        raise StorageError("its position is of no data set")
    if not _is_count_or_none(state.get("reference_batch")):
        raise StorageError("its reference batch is no number of rows")
    if not isinstance(state.get("registered"), dict):
        raise StorageError("its registered parts are no mapping")
    if not (isinstance(rng, dict) and _are_generators(rng.get("cpu")) and _are_generators_or_none(rng.get("cuda"))):
        raise StorageError("its generators' states are none")
    if allocation is not None and not _is_allocation(allocation):
        raise StorageError("its allocation is none")
    if not _is_factor(state.get("lr_factor", 1.0)):
        raise StorageError("its learning rate's factor is no positive number")
    if not _are_row_tables(state.get("memory", {})):
        raise StorageError("its memory limits are no rows per kind of device")
    return state


def check_plain(state: Mapping[str, Any]) -> None:
    """Make sure that a state can be read back, before anything relies on it.

    Parts of plain values cost a look; of another's skeleton, with empty tensors, a copy is made and read.

    Raises:
        ConfigError: a part holds something other than tensors and plain values; names the part.
    """
    for name, part in _named_parts(state):
        if is_plain(part):
            continue
        skeleton = io.BytesIO()
        try:
            torch.save(map_tensors(lambda tensor: tensor.new_empty(0), part), skeleton)
            skeleton.seek(0)
            torch.load(skeleton, weights_only=True)
        except Exception as error:  # a user's object may raise anything when it is pickled
            raise ConfigError(
                f"the state_dict of {name!r} holds more than tensors and plain values (numbers, texts, lists, "
                f"mappings), so a save of it could not be read back: {first_line(error)}"
            ) from error


def _named_parts(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, part in state.items():
        if name == "registered":
            yield from part.items()
        else:
            yield name, part


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_count_or_none(value: object) -> bool:
    return value is None or _is_count(value)


def _are_generators(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.dim() == 2 and len(value) > 0


def _are_generators_or_none(value: object) -> bool:
    return value is None or _are_generators(value)


def _is_allocation(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    sizes = value.get("local_batch_sizes")
    return (
        _is_count(value.get("version"))
        and isinstance(sizes, list)
        and all(_is_count(size) for size in sizes)
        and sum(sizes) > 0
        and _is_factor(value.get("lr_factor"))
    )


def _are_row_tables(value: object) -> bool:
    tables = list(value.values()) if isinstance(value, dict) else [None]
    return all(
        isinstance(table, dict) and all(isinstance(kind, str) and _is_count(rows) for kind, rows in table.items())
        for table in tables
    )


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
