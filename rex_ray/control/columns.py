"""Complete steps as compressed columns: about a seventh of what they take as JSON.

Step times are noise around a level, so what compresses is their distance from it: each column keeps, per rank, either
distances from the median or differences from step to step, whichever is smaller, as small integers whose bytes lie
together by significance (the upper ones are nearly all zero).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rex_ray.core.observations import StepObserved
from rex_ray.core.types import IntArray, StepFlag

__all__ = ["decode_steps", "encode_steps"]

_PER_STEP: dict[str, Callable[[StepObserved], int]] = {
    "epoch": lambda step: step.epoch,
    "step": lambda step: step.step,
    "version": lambda step: step.allocation_version,
    "flags": lambda step: int(step.flags),
}
_PER_RANK: dict[str, Callable[[StepObserved], IntArray]] = {
    "num_rows": lambda step: step.num_rows,
    "data_us": lambda step: step.data_us,
    "compute_us": lambda step: step.compute_us,
    "sync_us": lambda step: step.sync_us,
    # What a step takes beyond its parts is small, so the residual is stored.
    "rest_us": lambda step: step.step_us - step.data_us - step.compute_us - step.sync_us,
}
# Nearly always 1, and then not written at all, so blocks from before it was known read alike.
_NUM_NORM_STEPS = "num_norm_steps"
# What a block's head looks like: known to both sides, so that a small block need not spell it out.
_NAMES = (
    "loss global_sq_norm num_groups weighted_sq_norm rest_us sync_us compute_us data_us num_rows flags version step"
)
_HEAD = "".join(
    f'{{"name":"{name}","shape":[512,4],"num_bytes":2052,"as":"{form}","width":"<u4"}},'
    for form in ("float", "differences", "distances")
    for name in _NAMES.split()
).encode()
_OPTIONAL = ("weighted_sq_norm", "num_groups", "global_sq_norm", "loss", "peak_memory_bytes")


def encode_steps(numbers: Sequence[int], steps: Sequence[StepObserved]) -> bytes:
    """Write steps of one group and their event numbers; at least one of each.

    Every group of int columns is stored whole; an optional column holds only the steps that have it.
    """
    meta: dict[str, Any] = {"generation": steps[0].generation, "num_ranks": len(steps[0].num_rows), "columns": []}
    parts: list[bytes] = []

    def put(name: str, values: npt.NDArray[Any], mask: list[bool] | None = None) -> None:
        layout, data = _pack(values)
        if mask is not None:
            layout["mask"] = np.packbits(mask).tobytes().hex()
        meta["columns"].append({"name": name, "shape": list(values.shape), "num_bytes": len(data), **layout})
        parts.append(data)

    put("number", np.array(numbers, dtype=np.int64))
    for name, read in _PER_STEP.items():
        put(name, np.array([read(step) for step in steps], dtype=np.int64))
    if any(step.num_norm_steps != 1 for step in steps):
        put(_NUM_NORM_STEPS, np.array([step.num_norm_steps for step in steps], dtype=np.int64))
    for name, read_ranks in _PER_RANK.items():
        put(name, np.array([read_ranks(step) for step in steps], dtype=np.int64))
    for name in _OPTIONAL:
        values = [getattr(step, name) for step in steps]
        if any(value is not None for value in values):
            put(name, np.array([value for value in values if value is not None]), [v is not None for v in values])
    head = json.dumps(meta, separators=(",", ":")).encode()
    packer = zlib.compressobj(6, zdict=_HEAD)
    return packer.compress(struct.pack("<I", len(head)) + head + b"".join(parts)) + packer.flush()


def decode_steps(data: bytes) -> list[tuple[int, StepObserved]]:
    """Return the event numbers and steps that ``encode_steps`` was given; arrays are read-only."""
    raw = zlib.decompressobj(zdict=_HEAD).decompress(data)
    (head_bytes,) = struct.unpack_from("<I", raw)
    meta = json.loads(raw[4 : 4 + head_bytes])
    at = 4 + head_bytes
    columns: dict[str, npt.NDArray[Any]] = {}
    masks: dict[str, list[bool]] = {}
    for layout in meta["columns"]:
        name = layout["name"]
        columns[name] = _unpack(layout, raw[at : at + layout["num_bytes"]])
        columns[name].setflags(write=False)
        if "mask" in layout:
            masks[name] = (
                np.unpackbits(np.frombuffer(bytes.fromhex(layout["mask"]), dtype=np.uint8)).astype(bool).tolist()
            )
        at += layout["num_bytes"]
    return [(int(columns["number"][i]), step) for i, step in enumerate(_rebuild(meta["generation"], columns, masks))]


def _rebuild(generation: str, columns: dict[str, npt.NDArray[Any]], masks: dict[str, list[bool]]) -> list[StepObserved]:
    parts_us = columns["data_us"] + columns["compute_us"] + columns["sync_us"]
    step_us = columns["rest_us"] + parts_us
    step_us.setflags(write=False)
    taken = dict.fromkeys(masks, 0)
    num_norm_steps = columns.get(_NUM_NORM_STEPS, np.ones(len(step_us), dtype=np.int64))

    def optional(name: str, index: int) -> Any:
        if name not in masks or not masks[name][index]:
            return None
        value = columns[name][taken[name]]
        taken[name] += 1
        return value if value.ndim else float(value)

    return [
        StepObserved(
            generation=generation,
            epoch=int(columns["epoch"][i]),
            step=int(columns["step"][i]),
            allocation_version=int(columns["version"][i]),
            num_rows=columns["num_rows"][i],
            data_us=columns["data_us"][i],
            compute_us=columns["compute_us"][i],
            sync_us=columns["sync_us"][i],
            step_us=step_us[i],
            num_norm_steps=int(num_norm_steps[i]),
            flags=StepFlag(int(columns["flags"][i])),
            **{name: optional(name, i) for name in _OPTIONAL},
        )
        for i in range(len(step_us))
    ]


def _pack(values: npt.NDArray[Any]) -> tuple[dict[str, str], bytes]:
    if values.dtype.kind == "f":
        return {"as": "float"}, _planes(values.astype("<f8"))
    differences = np.diff(values, axis=0, prepend=np.zeros_like(values[:1]))
    base = np.median(values, axis=0).astype(np.int64)[None]
    distances = np.concatenate([base, values - base])
    moving = np.abs(differences[1:]).sum(dtype=np.float64) < np.abs(distances[1:]).sum(dtype=np.float64)
    small = differences if moving else distances
    # Zigzag: small negative numbers become small positive ones.
    folded = (small << 1) ^ (small >> 63)
    width = "<u4" if folded.min() >= 0 and folded.max() < 2**32 else "<u8"
    return {"as": "differences" if moving else "distances", "width": width}, _planes(folded.astype(width))


def _unpack(layout: dict[str, Any], data: bytes) -> npt.NDArray[Any]:
    shape = tuple(layout["shape"])
    if layout["as"] == "float":
        return _from_planes(data, "<f8", shape).astype(np.float64)
    if layout["as"] == "distances":
        shape = (shape[0] + 1, *shape[1:])
    folded = _from_planes(data, layout["width"], shape).astype(np.int64 if layout["width"] == "<u4" else np.uint64)
    halves = (folded >> 1).astype(np.int64)
    small = halves ^ -(folded & 1).astype(np.int64)
    if layout["as"] == "differences":
        return np.cumsum(small, axis=0, dtype=np.int64)
    return small[1:] + small[:1]


def _planes(values: npt.NDArray[Any]) -> bytes:
    """Return the bytes of all values, least significant first, then the next, and so on."""
    return values.reshape(-1).view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _from_planes(data: bytes, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    planes = np.frombuffer(data, dtype=np.uint8).reshape(np.dtype(dtype).itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype).reshape(shape)
