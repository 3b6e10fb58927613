"""Shards that come as batches of columns: what the worker asks of Ray Data, without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scripted import MemoryReporter, ScriptedLink, opened
from torch import nn

from rex_ray.core.errors import ConfigError, DataError
from rex_ray.core.types import Allocation
from rex_ray.worker.session import Session

PIECES = (5, 0, 1, 20, 3, 11)
NUM_ROWS = sum(PIECES)


class Shard:
    """Comes in pieces of its own size, as blocks do, which must not be written to."""

    def __init__(self, fails: bool = False) -> None:
        self.asked: list[dict[str, Any]] = []
        self.fails = fails

    def iter_batches(self, **asked: Any) -> Iterator[dict[str, Any]]:
        self.asked.append(asked)
        first = 0
        for size in PIECES:
            ids = np.arange(first, first + size)
            ids.flags.writeable = False
            yield {"id": ids, "x": np.ones((size, 3), np.float32), "name": np.array([f"row {k}" for k in ids], object)}
            first += size
            if self.fails and first > 20:
                raise OSError("the block is lost")


def train(session: Session, dataset: Any, num_epochs: int = 1, **options: Any) -> list[list[int]]:
    model = nn.Linear(3, 1)
    net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = session.loader(dataset, **options)
    epochs = []
    for _ in session.epochs(num_epochs):
        seen: list[int] = []
        for batch in loader:
            net(batch["x"]).mean().backward()
            optimizer.step()
            seen += batch["id"].tolist()
            assert list(batch["name"]) == [f"row {k}" for k in batch["id"].tolist()]
            batch["id"].zero_()
        epochs.append(seen)
    return epochs


def test_batches_are_cut_from_pieces_of_any_size_in_order_and_shares_may_change() -> None:
    shard = Shard()
    link = ScriptedLink((12,), {2: Allocation(version=1, local_batch_sizes=(7,))})
    with opened(link, control_interval_steps=1) as session:
        epochs = train(session, shard, 2, prefetch_batches=3)
        sizes = [record.num_rows for record in link.steps]
    assert epochs == [list(range(NUM_ROWS))] * 2
    assert sizes == [12, 12, 12, 4, *([7] * 5), 5]
    assert shard.asked == [{"batch_size": None, "batch_format": "numpy", "prefetch_batches": 3}] * 2


def test_a_shards_own_shuffling_is_passed_on_and_loader_processes_are_refused() -> None:
    shard = Shard()
    with opened() as session:
        train(session, shard, local_shuffle_buffer_size=40, local_shuffle_seed=1)
    assert shard.asked[0]["local_shuffle_buffer_size"] == 40
    assert shard.asked[0]["batch_size"] == 40
    with opened() as session, pytest.raises(ConfigError, match=r"num_workers=2.*prefetch_batches"):
        session.loader(Shard(), num_workers=2)


def test_a_lost_block_is_named_by_the_rows_before_it() -> None:
    with opened() as session, pytest.raises(DataError, match=r"step 2: .*after row 24 .*OSError: the block is lost"):
        train(session, Shard(fails=True))


def test_a_shard_is_evaluated_whole() -> None:
    with opened() as session:
        loader = session.eval_loader(Shard(), local_batch_size=9)
        assert [len(batch["id"]) for batch in loader] == [9, 9, 9, 9, 4]
        with pytest.raises(TypeError, match="counted by nobody"):
            len(loader)
        with pytest.raises(ConfigError, match="whole=True"):
            session.eval_loader(Shard(), whole=True)


def test_resumed_within_an_epoch_it_begins_the_epoch_anew_with_a_warning() -> None:
    reporter = MemoryReporter()
    with opened(reporter=reporter) as session:
        model = nn.Linear(3, 1)
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for batch in session.loader(Shard()):
            net(batch["x"]).mean().backward()
            optimizer.step()
            break
        session.report({})
    restored = MemoryReporter(reporter.saves[-1][1])
    with opened(reporter=restored) as session:
        with pytest.warns(UserWarning, match="12 rows of it are trained on a second"):
            (seen,) = train(session, Shard())
        assert session.step == 5
    assert seen == list(range(NUM_ROWS))
