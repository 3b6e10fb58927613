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


@pytest.fixture(scope="session")
def pair() -> Iterator[GlooGroup]:
    """A group of another size, for what is resumed by fewer ranks."""
    group = GlooGroup(2)
    yield group
    group.stop()
