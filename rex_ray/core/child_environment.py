"""What a helper process beside training is given of its parent's environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["child_environment"]

_LIBRARY: Final = str(Path(__file__).parents[2])
_ASIDE: Final = {
    # Training needs the cores, and the memory of its devices: torch must not open a context there.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def child_environment(present: Mapping[str, str], added: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment with one thread for arithmetic, no device, and this library where the parent found it.

    Args:
        present: the parent's.
        added: what goes over all of it.
    """
    merged = {**present, **_ASIDE, **(added or {})}
    path = [merged.get("PYTHONPATH", ""), _LIBRARY]
    merged["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    return merged
