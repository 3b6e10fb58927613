"""Everything a user can set: ``RexConfig``, and how it is read from a file and from the environment."""

from __future__ import annotations

from rex_ray.config.rex_config import RexConfig

__all__ = ["RexConfig"]
