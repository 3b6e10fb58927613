"""Plain values to JSON and back, over a closed list of classes. Never pickle: a journal may come from anyone.

What may be written: ``None``, booleans, integers, floats, strings, tuples, mappings, enums, arrays, and dataclasses
that the codec was built with. A JSON list is read as a tuple, since no journalled value holds a list. Everything else
is refused when it is *written*, where the mistake is, and not when somebody needs the journal.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from rex_ray.core.errors import RexError, nearest_name_hint

__all__ = ["Codec", "CodecError", "Json"]

Json: TypeAlias = Any
"""What ``json.dumps`` takes; mypy has no useful name for it."""

_TAG = "$"
_ARRAY_KINDS = frozenset("biuf")


class CodecError(RexError, ValueError):
    """The file's, or a new class's: a value that no codec of ours writes or reads. The message says where."""


class Codec:
    """Writes and reads the values of a closed list of classes.

    Args:
        classes: dataclasses and enums that may occur; each is written under its own name.
    """

    def __init__(self, classes: Iterable[type]) -> None:
        self._classes: dict[str, type] = {}
        for cls in classes:
            if self._classes.setdefault(cls.__name__, cls) is not cls:
                raise CodecError(f"two classes are called {cls.__name__!r}; a journal could not tell them apart")

    def encode(self, value: object) -> Json:
        """Return ``value`` as JSON.

        Raises:
            CodecError: ``value`` holds something that the codec does not know, the path to it is named.
        """
        return self._encode(value, "value")

    def decode(self, data: Json) -> Any:
        """Return the value that ``encode`` was given; arrays come back read-only.

        Raises:
            CodecError: an unknown class, fields that the class does not have, or what is no encoded value at all.
        """
        try:
            return self._decode(data)
        except CodecError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise CodecError(f"no value of ours is written like this: {error!r}") from error

    def _decode(self, data: Json) -> Any:
        if isinstance(data, list):
            return tuple(self._decode(item) for item in data)
        if not isinstance(data, dict):
            return data
        if _TAG not in data:
            return {key: self._decode(item) for key, item in data.items()}
        return self._decode_tagged(data[_TAG], data)

    def _encode(self, value: object, path: str) -> Json:
        match value:
            case None | bool() | str():
                return value
            case Enum() if type(value).__name__ in self._classes:
                return {_TAG: type(value).__name__, "value": value.value}
            case int():
                return value
            case float():
                return float(value) if math.isfinite(value) else {_TAG: "float", "value": str(float(value))}
            case tuple():
                return [self._encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
            case Mapping():
                return self._encode_mapping(value, path)
            case np.ndarray() if value.dtype.kind in _ARRAY_KINDS:
                return _encode_array(value)
        name = type(value).__name__
        if self._classes.get(name) is not type(value):
            raise CodecError(f"{path} is a {name}, which the journal's codec does not know")
        fields = dataclasses.fields(value)  # type: ignore[arg-type]
        encoded = {f.name: self._encode(getattr(value, f.name), f"{path}.{f.name}") for f in fields}
        return {_TAG: name, **encoded}

    def _encode_mapping(self, value: Mapping[Any, object], path: str) -> Json:
        if all(isinstance(key, str) and key != _TAG for key in value):
            return {key: self._encode(item, f"{path}[{key!r}]") for key, item in value.items()}
        items = [[self._encode(k, path), self._encode(v, f"{path}[{k!r}]")] for k, v in value.items()]
        return {_TAG: "mapping", "items": items}

    def _decode_tagged(self, tag: str, data: dict[str, Json]) -> Any:
        match tag:
            case "float":
                return float(data["value"])
            case "mapping":
                return {self._decode(key): self._decode(item) for key, item in data["items"]}
            case "array":
                return _decode_array(data)
        cls = self._classes.get(tag)
        if cls is None:
            raise CodecError(f"unknown class {tag!r} in the journal{nearest_name_hint(tag, self._classes)}")
        if issubclass(cls, Enum):
            return cls(data["value"])
        try:
            return cls(**{key: self._decode(item) for key, item in data.items() if key != _TAG})
        except TypeError as error:
            raise CodecError(f"{tag} in the journal does not fit this version of rex_ray: {error}") from error


def _encode_array(value: np.ndarray[Any, Any]) -> Json:
    little_endian = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
    data = base64.b64encode(little_endian.tobytes()).decode("ascii")
    return {_TAG: "array", "dtype": little_endian.dtype.str, "shape": list(value.shape), "data": data}


def _decode_array(data: dict[str, Json]) -> np.ndarray[Any, Any]:
    dtype = np.dtype(data["dtype"])
    if dtype.kind not in _ARRAY_KINDS:
        raise CodecError(f"an array of {data['dtype']!r} has no place in a journal")
    array = np.frombuffer(base64.b64decode(data["data"]), dtype=dtype).reshape(data["shape"])
    array = array.astype(dtype.newbyteorder("="))
    array.setflags(write=False)
    return array
