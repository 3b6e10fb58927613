"""Fixtures of the worker's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gloo_group import GlooGroup


@pytest.fixture(scope="session")
def ranks() -> Iterator[GlooGroup]:
    """Three gloo ranks, kept between tests."""
    group = GlooGroup(3)
    yield group
    group.stop()
