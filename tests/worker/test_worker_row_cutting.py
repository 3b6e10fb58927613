"""Which lists of a batch have one entry per row and which are columns, and what cannot be cut at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from rex_ray.core.errors import ConfigError
from rex_ray.worker.data.dataloader import to_device
from rex_ray.worker.data.row_reader import kept_rows
from rex_ray.worker.row_cutting import empty_like, opaque_part, slice_rows
from rex_ray.worker.tree import map_tensors

META = torch.device("meta")


def shapes(tree: Any) -> Any:
    return map_tensors(lambda tensor: tuple(tensor.shape), tree)


def boxes(*counts: int) -> list[torch.Tensor]:
    return [torch.zeros(count, 4) for count in counts]


@pytest.mark.parametrize("counts", [(1, 4, 7, 2), (4, 4, 4, 1), (3, 5, 6, 7), (0, 4, 0, 4)])
def test_boxes_of_each_image_stay_with_their_image_whatever_their_number(counts: tuple[int, ...]) -> None:
    given = boxes(*counts)
    images, cut = slice_rows((torch.zeros(4, 3, 8, 8), given), 1, 3, num_rows=4, strict=True)
    assert images.shape == (2, 3, 8, 8)
    assert all(one is other for one, other in zip(cut, given[1:3], strict=True))


def test_images_of_as_many_channels_as_rows_are_no_columns() -> None:
    images = tuple(torch.zeros(3, 8 + k, 8) for k in range(3))
    targets = tuple({"boxes": each, "labels": each[:, 0]} for each in boxes(3, 1, 3))
    cut_images, cut_targets = slice_rows((images, targets), 0, 2, num_rows=3, strict=True)
    assert all(one is other for one, other in zip(cut_images, images[:2], strict=True))
    assert cut_targets == targets[:2]


@pytest.mark.parametrize(
    "rows",
    [
        [["a", "b", "c"], ["d", "e"], ["f", "g", "h"]],
        [["a", "b", "c"], ["d", "e", "f"], ["g", "h", "i"]],
        [(480, 640, 3), (100, 200, 3), (7, 8, 3)],
        [[0, 1, 2], [3], [4, 5]],
    ],
)
def test_a_rows_own_list_is_not_cut_where_it_is_as_long_as_the_batch(rows: list[Any]) -> None:
    assert slice_rows({"x": torch.zeros(3, 2), "rows": rows}, 1, 2, num_rows=3)["rows"] == rows[1:2]


def test_columns_within_a_batch_are_cut_beside_other_columns() -> None:
    x, y = torch.zeros(2, 5), torch.arange(2)
    pair, labels = slice_rows([[x, x], y], 0, 1, num_rows=2)
    assert shapes(pair) == [(1, 5), (1, 5)]
    assert labels.shape == (1,)
    # What torch's own collate function makes of pairs of texts.
    assert slice_rows([x, [("a", "b"), ("c", "d")]], 0, 1, num_rows=2)[1] == [("a",), ("c",)]
    assert slice_rows((x, None), 0, 1, num_rows=2)[1] is None
    assert shapes(slice_rows((x, torch.zeros(10)), 0, 1, num_rows=2)) == ((1, 5), (10,))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_no_rows_of_one_image_are_no_boxes_whatever_their_number(count: int) -> None:
    images, targets = empty_like((torch.zeros(1, 3, 8, 8), boxes(count)), 1)
    assert (len(images), targets) == (0, [])
    assert slice_rows([torch.zeros(1, 5)], 0, 0, num_rows=1)[0].shape == (0, 5)  # a single column


class Graph:
    """Holds tensors by rules of its own, as graphs and lists of boxes of many libraries do."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device))


class Named(list[torch.Tensor]):
    """A list of the user's own type."""


PACKED = pack_sequence([torch.ones(length, 2) for length in (1, 3)], enforce_sorted=False)
UNCUT = {
    "Graph": Graph(torch.zeros(7, 2)),
    "PackedSequence": PACKED,
    "NestedTensor": torch.nested.nested_tensor(boxes(1, 3), layout=torch.jagged),
}


@pytest.mark.parametrize("name", UNCUT)
def test_what_cannot_be_cut_is_refused_where_it_must_be_and_else_stays_with_its_labels(name: str) -> None:
    labels = torch.arange(2)
    batch = {"x": [UNCUT[name]], "labels": labels}
    assert opaque_part(batch) == name
    assert kept_rows(batch, 2) == 2
    with pytest.raises(ConfigError, match=rf"2 rows holds a {name}, which cannot be cut .*session\.accumulate"):
        slice_rows(batch, 0, 1, num_rows=2, strict=True)
    assert empty_like(batch, 2) is batch


def test_rows_that_are_second_stay_together() -> None:
    batch = (torch.zeros(5, 1, 3), torch.zeros(1))  # time comes first
    assert empty_like(batch, 1) is batch


def test_sparse_columns_are_cut() -> None:
    table = torch.eye(3).to_sparse()
    assert torch.equal(slice_rows((table, torch.zeros(3)), 1, 3, num_rows=3)[0].to_dense(), torch.eye(3)[1:])
    assert empty_like((table, torch.zeros(3)), 3)[0].shape == (0, 3)


def test_a_batch_moves_with_what_moves_itself() -> None:
    named = Named([torch.zeros(2)])
    batch = {"packed": PACKED, "graph": Graph(torch.zeros(2)), "list": named, "text": ["a"]}
    moved = to_device(batch, META)
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["packed"].data.device == META
    assert moved["packed"].batch_sizes.device.type == "cpu"  # torch asks for them there
    assert moved["graph"].nodes.device == META
    assert isinstance(moved["list"], Named)
    assert moved["list"][0].device == META
    assert moved["text"] == ["a"]
    assert named[0].device.type == "cpu"
