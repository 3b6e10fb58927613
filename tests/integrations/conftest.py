"""Fixtures of the integrations' tests."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

import pytest
from gloo_group import GlooGroup


def load(rank: int) -> None:
    for name in ("accelerate", "transformers", "lightning.pytorch"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


@pytest.fixture(scope="session")
def pair() -> Iterator[GlooGroup]:
    """Two gloo ranks, kept between tests: what they import takes them seconds."""
    group = GlooGroup(2)
    group.run(load, limit_s=240.0)
    yield group
    group.stop()
