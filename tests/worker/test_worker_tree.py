"""Cutting rows out of what collate functions return."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rex_ray.core.errors import ConfigError
from rex_ray.worker.row_cutting import slice_rows
from rex_ray.worker.tree import leading_rows, map_tensors

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Record:
    values: torch.Tensor
    name: str


def test_columns_are_cut_wherever_they_are() -> None:
    x = torch.arange(12).reshape(4, 3)
    batch = {
        "x": x,
        "array": np.arange(4),
        "texts": ["a", "b", "c", "d"],
        "pair": Pair(x, (x, 7)),
        "record": Record(x, "kept"),
        "ordered": OrderedDict(k=x),
        "scalar": torch.tensor(3.0),
        "nothing": None,
    }
    cut = slice_rows(batch, 1, 3, num_rows=4)
    assert torch.equal(cut["x"], x[1:3])
    assert cut["array"].tolist() == [1, 2]
    assert cut["texts"] == ["b", "c"]
    assert isinstance(cut["pair"], Pair)
    assert torch.equal(cut["pair"].second[0], x[1:3])
    assert cut["pair"].second[1] == 7
    assert torch.equal(cut["record"].values, x[1:3])
    assert cut["record"].name == "kept"
    assert isinstance(cut["ordered"], OrderedDict)
    assert cut["scalar"] == 3.0
    assert batch["texts"] == ["a", "b", "c", "d"]


def test_no_rows_of_the_placeholder_row() -> None:
    images, target = torch.zeros(1, 3, 8, 8), torch.zeros(1, dtype=torch.int64)
    inputs, labels = slice_rows([images, target], 0, 0, num_rows=1)
    assert inputs.shape == (0, 3, 8, 8)
    assert labels.shape == (0,)
    assert slice_rows(("one text",), 0, 0, num_rows=1) == ()
    # One entry per row, as detection models collate: the list is cut, not the image in it.
    assert slice_rows(((torch.zeros(3, 8, 8),), ({"boxes": torch.zeros(5, 4)},)), 0, 0, num_rows=1) == ((), ())


def test_as_many_columns_as_rows_are_columns_still() -> None:
    x, y = torch.arange(6).reshape(2, 3), torch.arange(2)
    first = slice_rows([x, y], 0, 1, num_rows=2)
    assert [part.tolist() for part in first] == [[[0, 1, 2]], [0]]
    images, boxes = (torch.zeros(3, 8, 8), torch.ones(3, 4, 4)), ({"boxes": torch.zeros(5)}, {"boxes": torch.zeros(0)})
    cut = slice_rows((images, boxes), 1, 2, num_rows=2)
    assert cut[0][0] is images[1]
    assert cut[1][0]["boxes"] is boxes[1]["boxes"]
    assert slice_rows(["a", "b"], 1, 2, num_rows=2) == ["b"]


def test_a_tensor_without_rows_first_is_refused_where_it_would_be_seen_whole() -> None:
    batch = (torch.zeros(7, 4, 2), torch.zeros(4))
    assert slice_rows(batch, 0, 2, num_rows=4)[0].shape == (7, 4, 2)
    with pytest.raises(ConfigError, match=r"\(7, 4, 2\).*session.accumulate"):
        slice_rows(batch, 0, 2, num_rows=4, strict=True)


def test_mapping_and_leading_rows() -> None:
    tree = ({"a": [torch.tensor(1.0), torch.zeros(5, 2)]}, "text")
    assert leading_rows(tree) == 5
    assert leading_rows((torch.tensor(1.0), "text")) is None
    doubled = map_tensors(lambda tensor: tensor + 1, tree)
    assert doubled[0]["a"][0] == 2.0
    assert doubled[1] == "text"
