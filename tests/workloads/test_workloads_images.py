"""Images stay what they are under augmentation, and right answers are counted once each."""

from __future__ import annotations

import warnings
from http.client import IncompleteRead

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from rex_ray.core.errors import ConfigError
from workloads.images import (
    ByteImages,
    count_correct,
    no_answer_is_named,
    seed_chance,
    shifted_and_mirrored,
    warn_of_batch_norm,
)

FLAT = {"mean": (0.5, 0.25), "std": (0.5, 0.125)}


class AlwaysThree(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.eye(10)[torch.full((len(images),), 3)]


def test_pixels_are_normalised_per_channel() -> None:
    images = torch.tensor([[0, 255], [255, 0]], dtype=torch.uint8).view(2, 2, 1, 1)
    rows = ByteImages(images, torch.tensor([7, 8]), **FLAT)
    assert len(rows) == 2
    first, label = rows[0]
    assert label == 7
    assert torch.equal(first.flatten(), torch.tensor([-1.0, 6.0]))


@given(seed=st.integers(0, 2**31), size=st.integers(1, 12))
def test_augmentation_shifts_and_mirrors_and_invents_no_pixel(seed: int, size: int) -> None:
    """Every pixel that is left stands where one and the same shift and mirror put it; all others are black."""
    torch.manual_seed(seed)
    image = torch.arange(1, size * size + 1, dtype=torch.uint8).view(1, size, size)
    changed = shifted_and_mirrored(image)
    assert changed.shape == image.shape
    assert changed.dtype == torch.uint8
    places = [
        (row, column, *divmod(int(changed[0, row, column]) - 1, size))
        for row in range(size)
        for column in range(size)
        if changed[0, row, column]
    ]
    assert len({row - from_row for row, _, from_row, _ in places}) <= 1
    straight = {column - from_column for _, column, _, from_column in places}
    mirrored = {column + from_column for _, column, _, from_column in places}
    assert min(len(straight), len(mirrored)) <= 1
    assert all(abs(row - from_row) <= 4 for row, _, from_row, _ in places)


def test_augmentation_varies_and_follows_the_seed_of_the_rank() -> None:
    image = torch.arange(64, dtype=torch.uint8).view(1, 8, 8)

    def drawn(seed: int, rank: int) -> torch.Tensor:
        seed_chance(seed, rank)
        return torch.stack([shifted_and_mirrored(image) for _ in range(8)])

    once = drawn(0, 0)
    assert len({bytes(picture.flatten().tolist()) for picture in once}) > 1
    assert torch.equal(once, drawn(0, 0))
    assert not torch.equal(once, drawn(0, 1))
    assert not torch.equal(once, drawn(1, 0))


def test_evaluation_counts_every_row_once_and_leaves_the_model_training() -> None:
    rows = ByteImages(torch.zeros(5, 2, 4, 4, dtype=torch.uint8), torch.arange(5), **FLAT)
    model = AlwaysThree()
    assert count_correct(model, DataLoader(rows, batch_size=2)) == (1, 5)  # it always says 3, and one label is
    assert model.training


def test_batch_norm_under_changing_shares_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"own rows.*'rex'.*--norm group"):
        warn_of_batch_norm("batch", "rex")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_batch_norm("batch", "bsp")
        warn_of_batch_norm("group", "rex")


@pytest.mark.parametrize("error", [OSError("no route"), IncompleteRead(b"half"), RuntimeError("corrupted")])
def test_a_download_that_fails_says_what_to_do(error: Exception) -> None:
    with (
        pytest.raises(ConfigError, match=r"CIFAR could not be downloaded .* give data_dir"),
        no_answer_is_named("CIFAR"),
    ):
        raise error
