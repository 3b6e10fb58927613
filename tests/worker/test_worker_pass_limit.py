"""How a share is cut into passes, and what is learnt when one does not fit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.errors import LinkError, MemoryExhaustedError
from rex_ray.worker.model.out_of_memory import is_out_of_memory
from rex_ray.worker.model.pass_limit import PATIENCE_STEPS, PassLimit


@given(st.integers(0, 500), st.integers(1, 500) | st.none(), st.integers(1, 2))
def test_passes_cover_the_share_and_are_nearly_equal(num_rows: int, most: int | None, fewest: int) -> None:
    bounds = PassLimit(most=most, fewest=fewest).bounds(num_rows)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert sum(sizes) == num_rows
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(num_rows, fewest)
    if most is not None and most >= 2 * fewest:
        assert max(sizes) <= most


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 2))
def test_d9_a_share_beyond_memory_fits_after_as_many_failures_as_halvings(share: int, fits: int, fewest: int) -> None:
    limit = PassLimit(fewest=fewest)
    for _ in range(10):
        longest = max(stop - start for start, stop in pairwise(limit.bounds(share)))
        if longest <= fits:
            break
        if not limit.failed(longest):
            assert longest < 2 * fewest, "only what cannot be cut is given up"
            return
        assert limit.most is not None
        assert limit.most < longest
    else:
        pytest.fail("the passes never fitted")


def test_a_limit_is_tried_upwards_only_where_that_saves_a_pass_and_never_near_what_failed() -> None:
    limit = PassLimit()
    assert limit.failed(64)
    assert limit.failed(32)
    assert limit.most == 16
    for _ in range(PATIENCE_STEPS):
        limit.ran(64, 4, 16)
    assert limit.most == 22, "three passes instead of four"
    assert limit.failed(22)
    assert limit.most == 16, "back to what ran"
    for _ in range(3 * PATIENCE_STEPS):
        limit.ran(64, 4, 16)
    assert limit.most == 16
    near = PassLimit(most=15, fails_at=32)
    for _ in range(3 * PATIENCE_STEPS):
        near.ran(60, 4, 15)
        assert near.most is not None
        assert near.most <= 0.9 * 32


def test_what_says_out_of_memory_is_told_from_who_waited_for_it() -> None:
    told = MemoryExhaustedError("no")
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
        told,
    ):
        assert is_out_of_memory(error)
    wrapped = ValueError("the loop's own words")
    wrapped.__cause__ = told
    assert is_out_of_memory(wrapped)
    assert not is_out_of_memory(LinkError("rank 0 waited for rank 1, which left: CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("Connection closed by peer"))
    assert not is_out_of_memory(ValueError("out of memory"))
