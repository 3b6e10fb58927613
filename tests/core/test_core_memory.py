"""How many rows fit, learnt from peaks of allocated memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.memory import FILL, UNLIMITED, KindMemory, MemoryBook
from rex_ray.core.types import WorkerSpec

GIB = 2**30


def rows(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def workers(*devices: str, memory_bytes: int | None = None) -> tuple[WorkerSpec, ...]:
    return tuple(WorkerSpec(rank=rank, device=device, memory_bytes=memory_bytes) for rank, device in enumerate(devices))


@given(
    fixed=st.integers(0, 4 * GIB),
    per_row=st.integers(1, GIB // 8),
    sizes=st.sets(st.integers(1, 400), min_size=2, max_size=12),
)
def test_the_limit_of_an_affine_peak_is_exact_but_for_the_margin_and_never_beyond_twice_what_ran(fixed, per_row, sizes):
    book = MemoryBook.empty(["A"])
    for size in sorted(sizes):
        book = book.observe(rows(size), rows(fixed + per_row * size))
    memory = fixed + per_row * int(1.5 * max(sizes))
    most = int(book.max_rows(workers("A", memory_bytes=memory))[0])
    assert max(sizes) <= most <= 2 * max(sizes)
    assert most == max(sizes) or fixed + per_row * most <= FILL * memory + 1
    unknown = book.max_rows(workers("A"))
    assert int(unknown[0]) == 2 * max(sizes)


@given(peaks=st.dictionaries(st.integers(1, 500), st.integers(1, 2**40), min_size=1, max_size=8))
def test_the_law_is_at_or_above_every_peak_seen(peaks):
    kind = KindMemory(device="A", num_rows=(), peak_bytes=())
    for size, peak in peaks.items():
        kind = kind.with_peak(size, peak)
    fixed, per_row = kind.law()
    assert fixed >= 0 <= per_row
    for size, peak in peaks.items():
        assert fixed + per_row * size >= peak * (1 - 1e-9)


def test_one_size_promises_the_fewest_rows_and_a_second_one_more():
    memory = 16 * GIB
    one = MemoryBook.empty(["A"]).observe(rows(64), rows(8 * GIB))
    two = one.observe(rows(32), rows(6 * GIB))
    first, second = (int(book.max_rows(workers("A", memory_bytes=memory))[0]) for book in (one, two))
    assert first == int(FILL * memory / (8 * GIB / 64))
    assert second == 128, "4 GiB fixed and 1/16 GiB a row leave room for more than twice what ran"


def test_d9_a_worker_near_its_limit_learns_it_and_workers_of_other_kinds_are_not_held_back():
    """1 GiB a row on a device of 24 GiB: 20 rows and the margin are all that fits."""
    book = MemoryBook.empty(["small", "large"])
    book = book.observe(rows(10, 10), rows(10 * GIB, 10 * GIB)).observe(rows(16, 4), rows(16 * GIB, 4 * GIB))
    specs = (
        WorkerSpec(rank=0, device="small", memory_bytes=24 * GIB),
        WorkerSpec(rank=1, device="large", memory_bytes=80 * GIB),
        WorkerSpec(rank=2, device="never run", memory_bytes=8 * GIB),
    )
    assert book.max_rows(specs).tolist() == [20, 20, UNLIMITED]


def test_no_peaks_no_limits():
    book = MemoryBook.empty(["A"])
    assert book.observe(rows(5), None) is book
    assert book.max_rows(workers("A")) is None
    assert book.observe(rows(5), rows(-1)).max_rows(workers("A")) is None
    assert book.observe(rows(0), rows(10)).max_rows(workers("A")) is None, "a rank without rows shows nothing"


def test_a_step_that_teaches_nothing_costs_nothing_and_the_book_stays_small():
    book = MemoryBook.empty(["A", "A"]).observe(rows(8, 9), rows(800, 900))
    assert book.observe(rows(8, 9), rows(800, 850)) is book
    for size in range(1, 200):
        book = book.observe(rows(size, size), rows(100 * size, 100 * size))
    (kind,) = book.kinds
    assert len(kind.num_rows) == 8
    assert (kind.num_rows[0], kind.num_rows[-1]) == (1, 199)


def test_a_new_group_keeps_what_is_known_of_its_kinds():
    book = MemoryBook.empty(["A", "B"]).observe(rows(8, 4), rows(800, 100))
    later = MemoryBook.empty(["B", "B", "C"], book)
    assert later.max_rows(workers("B", "B", "C")).tolist() == [8, 8, UNLIMITED]


@pytest.mark.parametrize("memory_bytes", [None, 1])
def test_what_ran_fits_whatever_a_margin_says(memory_bytes):
    book = MemoryBook.empty(["A"]).observe(rows(64), rows(GIB))
    assert int(book.max_rows(workers("A", memory_bytes=memory_bytes))[0]) >= 64
