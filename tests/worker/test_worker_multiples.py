"""Shares in multiples on the worker's side: what it begins with where nobody decides, and of how few rows."""

from __future__ import annotations

import pytest

from rex_ray.core.errors import ConfigError
from rex_ray.core.types import Allocation, WorkerSpec
from rex_ray.worker.group.joining import reference_batch
from rex_ray.worker.link import GroupInfo, NullLink
from rex_ray.worker.options import WorkerOptions


def test_a_batch_that_is_lowered_to_few_rows_is_lowered_to_a_multiple() -> None:
    options = WorkerOptions(global_batch_size=64, small_dataset="clamp", local_batch_multiple=8)
    with pytest.warns(UserWarning, match="lowered to 56 of the training set's 61 rows"):
        assert reference_batch(options, 61, 3) == 56
    with pytest.raises(ConfigError, match="5 rows make no share of local_batch_multiple=8"):
        reference_batch(options, 5, 3)


@pytest.mark.parametrize("resumed", [None, (5, 20, 11), (16, 8, 8), (7,)])
def test_without_a_controller_shares_are_multiples_too(resumed: tuple[int, ...] | None) -> None:
    allocation = None if resumed is None else Allocation(version=4, local_batch_sizes=resumed, lr_factor=1.2)
    info = GroupInfo(
        generation="g",
        workers=tuple(WorkerSpec(rank=rank, device="T4") for rank in range(3)),
        dataset_size=100,
        global_batch_size=32,
        step=0,
        allocation=allocation,
        local_batch_multiple=8,
    )
    first = NullLink().join(info, 0.0)
    assert all(rows % 8 == 0 for rows in first.local_batch_sizes)
    rows = 32 if resumed is None else max(sum(resumed) // 8, 1) * 8
    assert (len(first.local_batch_sizes), first.global_batch_size) == (3, rows)
    if resumed == (16, 8, 8):
        assert first is allocation
