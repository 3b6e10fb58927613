"""A dealer of blocks, without a cluster: each block goes once per pass to whoever asks first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray.data

from rex_ray.train.dealing import Dealer


@dataclass(frozen=True)
class Bundle:
    """As much of Ray's as a dealer touches."""

    blocks: tuple[int, ...]
    slices: tuple[None, ...]
    owns_blocks: bool = True
    _cached_object_meta: Any = None
    _cached_preferred_locations: Any = None


class Blocks:
    """A data set of five blocks in three bundles."""

    name = "train"
    context = ray.data.DataContext.get_current()

    def iter_internal_ref_bundles(self) -> Iterator[Bundle]:
        yield Bundle((0, 1), (None, None))
        yield Bundle((), ())
        yield Bundle((2, 3, 4), (None,) * 3)


def dealt(dealer: Dealer, pass_number: int, most: int = 9) -> list[int]:
    bundles = [dealer.next_block(pass_number) for _ in range(most)]
    assert not any(bundle.owns_blocks for bundle in bundles if bundle is not None)
    return [bundle.blocks[0] for bundle in bundles if bundle is not None]


def test_every_block_is_dealt_once_per_pass_and_a_pass_ends_for_all_when_it_is_empty(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dealer = Dealer(Blocks())
    assert dealt(dealer, 0, 2) + dealt(dealer, 0) == [0, 1, 2, 3, 4]
    assert dealt(dealer, 0) == []
    assert dealt(dealer, 1) == [0, 1, 2, 3, 4]
    assert caplog.text == ""


def test_a_pass_that_is_left_before_its_end_is_over_for_all_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    dealer = Dealer(Blocks())
    assert dealt(dealer, 0, 2) == [0, 1]
    assert dealt(dealer, 1, 1) == [0]
    assert dealt(dealer, 0) == [], "the others have their pass ended"
    assert dealt(dealer, 2, 1) == [0]
    (told,) = caplog.records
    assert "pass 1 over data set train" in told.getMessage()
    assert "equally often" in told.getMessage()
