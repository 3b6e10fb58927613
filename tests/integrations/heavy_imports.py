"""What the ranks of the integrations' tests import once, before any of them is timed."""

from __future__ import annotations

import contextlib
import importlib


def load(rank: int) -> None:
    for name in ("accelerate", "transformers", "lightning.pytorch"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
