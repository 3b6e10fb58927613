"""The group beside the gradient's: what ranks tell each other arrives whole, and leaving it never waits for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_group import GlooGroup

from rex_ray.worker.group.side_group import SideGroup

pytestmark = pytest.mark.dist


def tell(rank: int) -> tuple[list[Any], Any, Any]:
    group = SideGroup(20.0)
    own = {"rank": rank, "rows": list(range(1000 * rank)), "nothing": None}
    told = (
        group.gather_objects(own, "own"),
        group.broadcast_object(own, "first"),
        group.broadcast_object(own, "last", 2),
    )
    group.close()
    return told


def test_objects_of_any_size_arrive_in_rank_order(ranks: GlooGroup) -> None:
    for everybodys, first, last in ranks.run(tell):
        assert [told["rank"] for told in everybodys] == [0, 1, 2]
        assert [len(told["rows"]) for told in everybodys] == [0, 1000, 2000]
        assert first == everybodys[0]
        assert last == everybodys[2]


def leave_at_once(rank: int, num_times: int) -> int:
    for k in range(num_times):
        group = SideGroup(20.0)
        match k % 3:
            case 0:
                group.gather_objects(rank, "a number")
            case 1:
                group.gather(torch.arange(4), "values")
            case _:
                group.sum(torch.arange(4), "a sum")
        group.close()
    return num_times


def test_a_group_is_left_right_after_its_last_operation(ranks: GlooGroup) -> None:
    """Torch 2.6 waits for ever where one of gloo's threads is the last to let go of an operation's tensors."""
    assert ranks.run(leave_at_once, 60) == [60] * 3
