"""Loader processes: what cannot be sent is an error, what a loop sets is seen, and ranks draw random numbers apart."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scripted import MemoryReporter, Rows, opened, two_layers
from torch import nn
from torch.utils.data import ConcatDataset, IterableDataset, Subset, default_collate, get_worker_info

from rex_ray.core.errors import ConfigError, DataError
from rex_ray.worker.data.copied_settings import settings_of
from rex_ray.worker.data.loader_processes import LoaderProcesses
from rex_ray.worker.data.row_reader import RowReader
from rex_ray.worker.data.sending import check_sendable
from rex_ray.worker.session import Session

ROWS = Rows(36)
IN_TIME = {"num_workers": 1, "timeout": 10}
"""What hangs for ever elsewhere is another error than the one that is asked for."""


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (ROWS[row] for row in range(36))


def started(session: Session) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = two_layers()
    net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    return net, optimizer


def rows_of_epochs(session: Session, loader: Any, num_epochs: int, before: Callable[[int], None] = int) -> list[Any]:
    """Train; return each epoch's values that come behind id, input and target."""
    net, optimizer = started(session)
    seen = []
    for epoch in session.epochs(num_epochs):
        before(epoch)
        seen.append([])
        for batch in loader:
            F.mse_loss(net(batch[1]), batch[2]).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen[-1].append([column.tolist() for column in (batch[0], *batch[3:])])
    return seen


# --- what cannot be sent


def with_a_function(rows: list[Any]) -> Any:
    return (*default_collate(rows), lambda: rows)


def with_a_history(rows: list[Any]) -> Any:
    ids, inputs, targets = default_collate(rows)
    return ids, inputs.requires_grad_() * 2, targets


class Opaque:
    """Not looked into, and so not plain; can be sent."""

    def __init__(self, inside: torch.Tensor) -> None:
        self.inside = inside


def with_an_object(rows: list[Any]) -> Any:
    return (*default_collate(rows), Opaque(torch.ones(3)), np.ones(3))


@pytest.mark.parametrize("dataset", [ROWS, Numbers()], ids=["map-style", "stream"])
@pytest.mark.parametrize(
    ("collate", "cause"), [(with_a_function, "pickle local object"), (with_a_history, r"tensor\.detach\(\)")]
)
def test_a_batch_that_cannot_leave_its_process_is_an_error_and_no_endless_wait(
    dataset: Any, collate: Any, cause: str
) -> None:
    with opened() as session:
        started(session)
        with pytest.raises(DataError, match=rf"rank 0, epoch 0, step 0: .*cannot leave its loader process.*{cause}"):
            next(iter(session.loader(dataset, collate_fn=collate, **IN_TIME)))


def test_evaluating_it_is_an_error_too_and_any_other_object_comes_through() -> None:
    with opened() as session:
        with pytest.raises(DataError, match="cannot be sent out of its loader process"):
            next(iter(session.eval_loader(ROWS, collate_fn=with_a_function, **IN_TIME)))
        *_, opaque, array = next(iter(session.eval_loader(ROWS, collate_fn=with_an_object, **IN_TIME)))
        assert opaque.inside.tolist() == array.tolist() == [1.0] * 3
    check_sendable(lambda: "nothing is sent where there is no loader process")


class Held(Rows):
    """Holds what no other process can be given."""

    def __init__(self) -> None:
        super().__init__(36)
        self.transform = lambda row: row


def test_a_data_set_that_cannot_be_sent_is_refused_with_a_remedy() -> None:
    with opened() as session:
        started(session)
        with (
            pytest.warns(UserWarning, match="pickle"),
            pytest.raises(ConfigError, match=r"Held cannot be sent.*'fork'"),
        ):
            iter(session.loader(Held(), num_workers=1, multiprocessing_context="spawn"))


def fail(process: int) -> None:
    raise ValueError(f"process {process} finds no file")


def test_a_process_that_cannot_begin_is_named_with_the_step() -> None:
    with opened() as session:
        started(session)
        with pytest.raises(DataError, match=r"(?s)rank 0, epoch 0, step 0: .*process 0 finds no file"):
            next(iter(session.loader(ROWS, num_workers=1, worker_init_fn=fail)))


# --- what the loop sets


class Augmented(Rows):
    """Tells with each row what it was set to, and by which process it was read."""

    def __init__(self, num_rows: int = 36) -> None:
        super().__init__(num_rows)
        self.mosaic = True

    def __getitem__(self, row: int) -> Any:
        return (*super().__getitem__(row), self.mosaic, os.getpid())


class AugmentedStream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rows = Augmented()

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[row] for row in range(36))


@pytest.mark.parametrize(
    ("dataset", "inner"),
    [
        ((first := Augmented()), first),
        (Subset((second := Augmented(40)), range(36)), second),
        (ConcatDataset([Subset((third := Augmented(40)), range(36))]), third),
        ((fourth := AugmentedStream()), fourth.rows),
    ],
    ids=["itself", "subset", "concatenated", "stream"],
)
def test_what_the_loop_sets_on_a_data_set_is_seen_from_the_next_pass_on(dataset: Any, inner: Augmented) -> None:
    def set_mosaic(epoch: int) -> None:
        inner.mosaic = epoch < 2

    with opened() as session:
        loader = session.loader(dataset, num_workers=1)
        seen = rows_of_epochs(session, loader, 4, set_mosaic)
    assert [{flag for _, flags, _ in epoch for flag in flags} for epoch in seen] == [{True}, {True}, {False}, {False}]
    pids = [{pid for *_, each in epoch for pid in each} for epoch in seen]
    assert pids[0] == pids[1] != pids[2] == pids[3], "processes stay where nothing was set"
    assert [sorted(row for rows, *_ in epoch for row in rows) for epoch in seen] == [list(range(36))] * 4


def test_settings_are_what_was_set_and_neither_contents_nor_the_epoch_that_is_told() -> None:
    dataset = Subset(Augmented(), range(36))
    before = settings_of(dataset)
    dataset.dataset.inputs[0] = 7.0
    assert settings_of(dataset) == before
    dataset.dataset.inputs = dataset.dataset.inputs.clone()
    assert settings_of(dataset) != before
    dataset.dataset.set_epoch = dataset.dataset.itself = dataset.dataset  # a circle ends, too
    dataset.dataset.set_epoch = print
    before = settings_of(dataset)
    dataset.dataset.epoch = 3
    assert settings_of(dataset) == before
    dataset.dataset.mosaic = 1  # True is no 1
    assert settings_of(dataset) != before


class MadeAnew(Mapping[str, Any]):
    """Makes its entries at each look, as files of arrays do."""

    def __getitem__(self, key: str) -> Any:
        return Augmented()

    def __iter__(self) -> Iterator[str]:
        return iter(("a", "b"))

    def __len__(self) -> int:
        return 2


def test_settings_are_few_however_much_a_data_set_holds_and_what_is_made_at_each_look_is_none() -> None:
    held = [Opaque(torch.ones(1)) for _ in range(30)]
    for one in held:
        one.__dict__ |= {f"other_{k}": other for k, other in enumerate(held)}
    dataset = Augmented()
    dataset.__dict__ |= {"held": held, "table": [[[0.5] * 60] * 60] * 60, "file": MadeAnew(), "text": "text" * 1000}
    before = settings_of(dataset)
    assert len(before) < 2_000
    assert settings_of(dataset) == before
    assert any(value == (str, dataset.text) and value[1] is dataset.text for value in before.values()), "no copy of it"
    held[7].inside = torch.ones(1)
    assert settings_of(dataset) != before


# --- random numbers


class Drawn(Rows):
    def __getitem__(self, row: int) -> Any:
        return torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002 - as users' transforms do


def initial_seed(process: int) -> None:
    info: Any = get_worker_info()
    assert torch.initial_seed() == info.seed, "what worker_init_fn seeds by is this process's own, too"


def drawn_by(rank: int) -> list[Any]:
    torch.manual_seed(0)
    requests = [[(0, 0)], [(0, 1)]]
    processes = LoaderProcesses(
        RowReader(Drawn(2), None), requests, {"num_workers": 2, "worker_init_fn": initial_seed}, rank
    )
    return [[float(value) for value in fetched.batch] for fetched in processes.begin()]


def test_ranks_with_one_seed_draw_apart_and_each_alike_every_time() -> None:
    ranks = [drawn_by(0), drawn_by(1)]
    drawn = [value for rank in ranks for values in rank for value in values]
    assert len(set(drawn)) == len(drawn)
    assert drawn_by(1) == ranks[1]
    torch.manual_seed(0)
    plain = torch.utils.data.DataLoader(Drawn(2), num_workers=2)
    assert [[float(value) for value in batch] for batch in plain] == ranks[0], "the first rank's are plain torch's"


# --- resuming


def test_a_resumed_stream_leaves_rows_out_once_though_its_processes_do_not_outlive_an_epoch() -> None:
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": False}
    reporter = MemoryReporter()
    with opened(None, reporter, checkpoint_interval_s=0.0) as session:
        net, optimizer = started(session)
        for batch in session.loader(Numbers(), **options):
            F.mse_loss(net(batch[1]), batch[2]).backward()
            optimizer.step()
            session.report({})
            break
    with opened(None, MemoryReporter(reporter.saves[0][1])) as session:
        seen = rows_of_epochs(session, session.loader(Numbers(), **options), 3)
    assert [len([row for (rows,) in epoch for row in rows]) for epoch in seen] == [24, 36, 36]
