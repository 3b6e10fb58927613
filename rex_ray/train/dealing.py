"""Deals the blocks of a Ray data set to whichever worker asks first, so that a fast one never waits for a slow one.

Ray's own ``streaming_split`` fixes each worker's rows beforehand: equal parts, or each block to the worker that was
given the least so far. Workers of unequal shares empty equal parts at unequal speed, and the rest of the epoch is the
slow ones' alone. Here nobody owns a block until it is asked for, and each is dealt once per pass.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

import ray
from ray.data import DataIterator

__all__ = ["Dealer", "DealtShard", "deal"]

logger = logging.getLogger("rex_ray")


class Dealer:
    """Holds a data set and deals its blocks; an actor, which answers one worker at a time.

    Args:
        dataset: a Ray data set; executed anew for each pass.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        ray.data.DataContext._set_current(dataset.context)
        self._pass = -1
        self._bundles: Iterator[Any] = iter(())
        self._blocks: deque[Any] = deque()
        self._is_dealt = True
        self._warned = False

    def next_block(self, pass_number: int) -> Any:
        """Return the next block's bundle, None at the pass's end. Whoever first asks for a later pass begins it."""
        if pass_number > self._pass:
            self._warn_of_undealt()
            self._pass, self._is_dealt = pass_number, False
            self._blocks.clear()
            self._bundles = iter(self._dataset.iter_internal_ref_bundles())
        if pass_number < self._pass:
            return None  # the others have left that pass
        while not self._blocks:
            bundle = next(self._bundles, None)
            if bundle is None:
                self._is_dealt = True
                return None
            self._blocks.extend(_single_blocks(bundle))
        return self._blocks.popleft()

    def context(self) -> Any:
        """Return the data set's context."""
        return self._dataset.context

    def _warn_of_undealt(self) -> None:
        if not self._is_dealt and not self._warned:
            self._warned = True
            logger.warning(
                "a worker begins pass %d over data set %s before all blocks of the last one were dealt, and nobody is "
                "given those any more: right where an epoch ends with the shortest stream, else have every worker "
                "iterate its shard equally often, and to its end",
                self._pass + 1,
                self._dataset.name,
            )

    def schema(self) -> Any:
        """Return the data set's schema."""
        return self._dataset.schema()


class DealtShard(DataIterator):  # type: ignore[misc]
    """One worker's end of a dealer: iterated like any shard, with the rows that its worker was quick enough for.

    Every worker iterates its shard once per pass; a pass that nobody waits for any more is over for all.

    Args:
        dealer: handle of the actor.
        rank: whose shard.
        num_ranks: shards of the dealer.
    """

    def __init__(self, dealer: Any, rank: int, num_ranks: int) -> None:
        self._dealer = dealer
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_passes = 0

    def _to_ref_bundle_iterator(self) -> tuple[Iterator[Any], None, None]:
        pass_number, self._num_passes = self._num_passes, self._num_passes + 1
        # Not a block further ahead than what Ray's iterator fetches: what one worker holds, no other can have.
        bundles = iter(lambda: ray.get(self._dealer.next_block.remote(pass_number)), None)
        return bundles, None, None

    def _get_dataset_tag(self) -> dict[str, str | None]:
        return {"dataset": "dealt", "split_index": str(self._rank)}

    def get_context(self) -> Any:
        """Return the data set's context."""
        return ray.get(self._dealer.context.remote())

    def schema(self) -> Any:
        """Return the data set's schema."""
        return ray.get(self._dealer.schema.remote())

    def stats(self) -> str:
        """Return nothing: what was executed is the dealer's."""
        return ""

    def world_size(self) -> int:
        """Return the number of shards."""
        return self._num_ranks


def deal(dataset: Any, num_ranks: int) -> list[DealtShard]:
    """Return a shard for each rank of a new dealer, which lives on this node as long as one of them is held."""
    node_id = ray.get_runtime_context().get_node_id()
    dealer = ray.remote(Dealer).options(num_cpus=0, label_selector={"ray.io/node-id": node_id}).remote(dataset)
    return [DealtShard(dealer, rank, num_ranks) for rank in range(num_ranks)]


def _single_blocks(bundle: Any) -> Iterator[Any]:
    """Return a bundle of several blocks as bundles of one: the smaller what is dealt, the later an epoch's end."""
    for block, part in zip(bundle.blocks, bundle.slices, strict=True):
        yield dataclasses.replace(
            bundle,
            blocks=(block,),
            slices=(part,),
            # Several workers may yet ask for other passes over the same blocks.
            owns_blocks=False,
            _cached_object_meta=None,
            _cached_preferred_locations=None,
        )
