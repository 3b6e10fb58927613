"""Values as JSON can hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["finite_json"]


def finite_json(value: Any) -> Any:
    """Return a value of mappings, sequences and scalars with null for every number that is not finite.

    JSON has no word for these; Python's writer makes up one, which other readers refuse.
    """
    if isinstance(value, Mapping):
        return {str(key): finite_json(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
