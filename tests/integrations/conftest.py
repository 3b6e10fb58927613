"""Fixtures of the integrations' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gloo_group import GlooGroup
from heavy_imports import load


@pytest.fixture(scope="session")
def pair() -> Iterator[GlooGroup]:
    """Two gloo ranks, kept between tests: what they import takes them seconds."""
    group = GlooGroup(2)
    group.run(load, limit_s=240.0)
    yield group
    group.stop()
