"""Fast synchronous PyTorch training on clusters of mixed GPUs, as a Ray Train trainer.

The public names are fetched when they are first used, so that ``import rex_ray`` costs nothing: torch and Ray are
imported only by what needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rex_ray.core.errors import (
    ConfigError,
    DataError,
    IllegalEventError,
    InfeasibleError,
    LinkError,
    MemoryExhaustedError,
    RexError,
    StorageError,
)

if TYPE_CHECKING:
    from rex_ray.config import RexConfig
    from rex_ray.train.launching import launch
    from rex_ray.train.local_cluster import local_cluster
    from rex_ray.train.trainer import RexTrainer
    from rex_ray.worker.current import get_session, session
    from rex_ray.worker.session import Session

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DataError",
    "IllegalEventError",
    "InfeasibleError",
    "LinkError",
    "MemoryExhaustedError",
    "RexConfig",
    "RexError",
    "RexTrainer",
    "Session",
    "StorageError",
    "__version__",
    "get_session",
    "launch",
    "local_cluster",
    "session",
]

_HOMES = {
    "RexConfig": "rex_ray.config",
    "RexTrainer": "rex_ray.train.trainer",
    "Session": "rex_ray.worker.session",
    "get_session": "rex_ray.worker.current",
    "launch": "rex_ray.train.launching",
    "local_cluster": "rex_ray.train.local_cluster",
    "session": "rex_ray.worker.current",
}


def __getattr__(name: str) -> object:
    """Fetch a public name from its module (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
