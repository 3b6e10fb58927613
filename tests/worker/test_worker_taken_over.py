"""What a script has made already is prepared in one call: parts by their kind, DataLoaders for their data."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from scripted import Rows, opened, two_layers
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, WeightedRandomSampler

import rex_ray
from rex_ray.core.errors import ConfigError

NUM_ROWS = 36


def collate(rows: list[Any]) -> Any:
    return "collated", torch.utils.data.default_collate(rows)


def test_parts_come_back_prepared_in_the_order_in_which_they_were_given() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for _ in range(2))
    loader, test_loader = DataLoader(Rows(NUM_ROWS), 12, shuffle=True), DataLoader(Rows(7), 4)
    with opened() as session:
        parts = session.prepare(first, loader, optimizer, test_loader, second, model)
        assert parts[2] is optimizer
        assert parts[5] is model  # one rank has no DDP
        assert [len(batch[0]) for batch in parts[3]] == [4, 3]
        for _, inputs, targets in parts[1]:
            torch.nn.functional.mse_loss(parts[5](inputs), targets).backward()
            optimizer.step()
            parts[0].step()
            parts[4].step()
        assert session.step == len(parts[1]) == 3
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**6)


def test_a_data_loader_gives_its_data_set_and_what_means_the_same_for_anybodys_rows() -> None:
    given = DataLoader(Rows(NUM_ROWS), 12, shuffle=True, collate_fn=collate)
    with opened() as session:
        model = two_layers()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = session.loader(given)
        assert loader.dataset is given.dataset
        assert next(iter(loader))[0] == "collated"


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"batch_size": 12}, "make it with shuffle=True"),
        ({"batch_size": 12, "sampler": WeightedRandomSampler([1.0] * NUM_ROWS, NUM_ROWS)}, "wrap the data set"),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(36)), 6, drop_last=False)}, "make it with"),
        ({"batch_sampler": [[0, 1], [2]]}, "batches of its own"),
        ({"batch_size": None}, "batches of its own"),
    ],
    ids=["in order", "weighted", "in order, by hand", "own batches", "no batches"],
)
def test_a_choice_of_rows_that_would_be_lost_is_refused(options: dict[str, Any], remedy: str) -> None:
    with opened() as session, pytest.raises(ConfigError, match=remedy):
        session.loader(DataLoader(Rows(NUM_ROWS), **options))


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({"batch_size": 8, "shuffle": True}, "batch_size=8, and the run's global_batch_size is 12"),
        ({"batch_size": 12, "shuffle": True, "drop_last": True}, "every row is seen once per epoch"),
    ],
)
def test_what_is_decided_otherwise_is_warned_of(options: dict[str, Any], warning: str) -> None:
    with opened() as session, pytest.warns(UserWarning, match=warning):
        session.loader(DataLoader(Rows(NUM_ROWS), **options))


def test_a_distributed_samplers_batches_add_up_to_the_global_batch() -> None:
    sampler = DistributedSampler(Rows(NUM_ROWS), num_replicas=3, rank=1)
    with opened() as session:
        assert len(session.loader(DataLoader(Rows(NUM_ROWS), 4, sampler=sampler))) == 3


def test_evaluating_leaves_no_row_out() -> None:
    with opened() as session:
        assert [len(batch[0]) for batch in session.eval_loader(DataLoader(Rows(7), 3, shuffle=True))] == [3, 3, 1]
        with pytest.raises(ConfigError, match="drop_last=True"):
            session.eval_loader(DataLoader(Rows(7), 3, drop_last=True))
        with pytest.raises(ConfigError, match="WeightedRandomSampler"):
            session.eval_loader(DataLoader(Rows(7), 3, sampler=WeightedRandomSampler([1.0] * 7, 7)))


def test_the_session_of_the_process_can_be_imported_before_it_is_open_and_sent_to_another() -> None:
    from rex_ray import session

    assert pickle.loads(pickle.dumps(session)) is session
    with pytest.raises(ConfigError, match="no session is open"):
        _ = session.step
    with opened() as open_session:
        assert session.step == open_session.step == 0
        assert session.prepare == open_session.prepare
    assert rex_ray.session is session


def test_a_sum_over_ranks_is_in_double_precision_for_a_number_too() -> None:
    with opened() as session:
        assert float(session.pool_sum(0.1)) == 0.1
