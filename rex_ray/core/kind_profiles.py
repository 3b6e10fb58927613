"""Profiles of device kinds as JSON: what a run has learnt of own times, for the next one to begin with.

They say how long a kind took for so many rows, of the model and data that the run trained. For another workload the
times are other ones, but levels are measured anew at once, and only the kinds' ratio matters to the first split.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

from rex_ray.core.errors import ConfigError
from rex_ray.core.types import LearntShape

__all__ = ["SCHEMA_VERSION", "profiles_from_json", "profiles_to_json"]

SCHEMA_VERSION = 1

_MOST_SIZES = 64
_MOST_ROWS, _MOST_S = 2.0**40, 86_400.0


def profiles_to_json(shapes: Iterable[LearntShape]) -> str:
    """Return profiles as JSON, one kind per entry: ``num_rows``, ``own_s`` and how many samples each counts for."""
    kinds = [
        {
            "device": shape.device,
            "num_rows": list(shape.num_rows),
            "own_s": list(shape.own_s),
            "weights": list(shape.weights),
        }
        for shape in sorted(shapes, key=lambda shape: shape.device)
    ]
    return json.dumps({"schema_version": SCHEMA_VERSION, "kinds": kinds}, indent=2) + "\n"


def profiles_from_json(text: str | bytes) -> tuple[LearntShape, ...]:
    """Return the profiles that ``profiles_to_json`` wrote.

    Raises:
        ConfigError: it is no such text, of another version, or holds figures that no device has.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"profiles of device kinds are not valid JSON ({error}); train anew without them") from None
    if not isinstance(document, dict) or not isinstance(document.get("kinds"), list):
        raise ConfigError("profiles of device kinds are a JSON object with a list of 'kinds'; this is something else")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"profiles of device kinds of schema {document.get('schema_version')!r} cannot be read, only of "
            f"{SCHEMA_VERSION}: have a run of this rex_ray write them"
        )
    shapes = tuple(_shape(entry) for entry in document["kinds"])
    if len({shape.device for shape in shapes}) < len(shapes):
        raise ConfigError("profiles of device kinds hold a kind twice; remove one of them")
    return shapes


def _shape(entry: object) -> LearntShape:
    if not isinstance(entry, dict) or not isinstance(entry.get("device"), str):
        raise ConfigError(f"a profile of a device kind must name its 'device'; this one is {entry!r:.80}")
    device = entry["device"]
    num_rows = _figures(entry, device, "num_rows", _MOST_ROWS)
    own_s = _figures(entry, device, "own_s", _MOST_S)
    weights = _figures(entry, device, "weights", _MOST_ROWS)
    if not len(num_rows) == len(own_s) == len(weights) or not 1 <= len(num_rows) <= _MOST_SIZES:
        raise ConfigError(
            f"the profile of {device!r} has {len(num_rows)} sizes, {len(own_s)} times and {len(weights)} weights; it "
            f"needs as many of each, 1 to {_MOST_SIZES}"
        )
    return LearntShape(device=device, num_rows=num_rows, own_s=own_s, weights=weights)


def _figures(entry: dict[str, object], device: str, name: str, most: float) -> tuple[float, ...]:
    values = entry.get(name)
    if not isinstance(values, list) or not all(_is_positive(value, most) for value in values):
        raise ConfigError(f"the profile of {device!r} needs positive numbers as {name!r}, got {values!r:.80}")
    return tuple(float(value) for value in values)


def _is_positive(value: object, most: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 < value <= most  # type: ignore[arg-type, operator]
