"""Data that cannot be read, or is not what it was: an error that names the row, the rank, the epoch and the step."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scripted import Rows, ScriptedLink, opened, two_layers
from torch import nn
from torch.utils.data import default_collate, get_worker_info

from rex_ray.core.errors import DataError
from rex_ray.worker.data.row_reader import kept_rows
from rex_ray.worker.data.sampler import epoch_order
from rex_ray.worker.session import Session

NUM_ROWS = 36
BAD_ROW = int(epoch_order(0, 0, NUM_ROWS)[15])  # the fourth of the second step


class Broken(Rows):
    """Raises on one row, or kills the process that reads it while the loop waits for its first batch."""

    def __init__(self, how: str, bad_row: int = BAD_ROW) -> None:
        super().__init__(NUM_ROWS)
        self.how, self.bad_row = how, bad_row

    def __getitem__(self, row: int) -> Any:
        if row == self.bad_row and self.how == "raises":
            raise OSError("truncated file")
        if row == self.bad_row and self.how == "dies":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(row)


class Whole(Broken):
    """Reads a batch in one go, so that nobody knows which of its rows failed."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in rows]


def prepared(session: Session) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = two_layers()
    net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    return net, optimizer


def train(session: Session, dataset: Any, **options: Any) -> int:
    net, optimizer = prepared(session)
    steps = 0
    for batch in session.loader(dataset, **options):
        F.mse_loss(net(batch[1]), batch[2]).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps


@pytest.mark.parametrize(("num_workers", "trace"), [(0, False), (1, True)])
def test_a_row_that_raises_is_named_with_rank_epoch_and_step(num_workers: int, trace: bool) -> None:
    with opened() as session, pytest.raises(DataError) as raised:
        train(session, Broken("raises"), num_workers=num_workers)
    message = str(raised.value)
    assert f"rank 0, epoch 0, step 1: row {BAD_ROW} could not be read: OSError: truncated file" in message
    assert ("In the loader process" in message) == trace
    assert isinstance(raised.value.__cause__, OSError) != trace


def test_of_rows_that_are_read_together_all_are_named() -> None:
    with opened() as session, pytest.raises(DataError, match=rf"one of the rows .*{BAD_ROW}.* could not be read"):
        train(session, Whole("raises"))


def test_a_loader_process_that_is_killed_is_an_error_with_a_remedy() -> None:
    first = int(epoch_order(0, 0, NUM_ROWS)[0])
    with opened() as session, pytest.raises(DataError, match=r"rank 0, epoch 0, step 0: .*fewer num_workers.*pid"):
        train(session, Broken("dies", first), num_workers=1)


def keep_few(rows: list[Any]) -> Any:
    return default_collate(rows[:5])


def test_a_collate_function_that_leaves_rows_out_is_an_error_unless_rows_weigh_nothing() -> None:
    with opened() as session, pytest.raises(DataError, match=r"given 12 rows and returned a batch of 5.*weight_by"):
        train(session, Rows(NUM_ROWS), collate_fn=keep_few)
    with opened(ScriptedLink(), weight_by="tokens") as session:
        net, _ = prepared(session)
        for batch in session.loader(Rows(NUM_ROWS), collate_fn=keep_few):
            session.backward(net(batch[1]).mean(), weight=float(len(batch[1])))


@pytest.mark.parametrize(
    ("batch", "kept"),
    [
        ((torch.zeros(5, 3), torch.zeros(5)), 5),
        (None, 0),
        ({"time first": torch.zeros(5, 12)}, 12),
        ((torch.zeros(5, 12), torch.zeros(12)), 12),
        ((torch.zeros(200), torch.zeros(200)), 12),
        ((torch.zeros(12, 5), torch.tensor(3.0)), 12),
        (["text"], 12),
    ],
)
def test_rows_count_as_left_out_only_where_all_tensors_say_so(batch: Any, kept: int) -> None:
    assert kept_rows(batch, 12) == kept


def test_a_data_set_that_changes_its_length_is_refused_at_the_next_pass() -> None:
    dataset = Rows(NUM_ROWS)
    with opened() as session:
        net, optimizer = prepared(session)
        loader = session.loader(dataset)
        for batch in loader:
            F.mse_loss(net(batch[1]), batch[2]).backward()
            optimizer.step()
        dataset.inputs = dataset.inputs[:30]
        with pytest.raises(DataError, match=r"rank 0, epoch 1: .*30 rows now, and had 36"):
            iter(loader)


class Marked(Rows):
    mark = 0

    def __getitem__(self, row: int) -> Any:
        return (*super().__getitem__(row), self.mark)


def mark_the_users_own(process: int) -> None:
    info: Any = get_worker_info()
    info.dataset.mark = 7 + process


def test_a_worker_init_function_finds_the_users_data_set() -> None:
    with opened() as session:
        prepared(session)
        batch = next(iter(session.loader(Marked(NUM_ROWS), num_workers=1, worker_init_fn=mark_the_users_own)))
    assert set(batch[3].tolist()) == {7}
