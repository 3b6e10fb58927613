"""Every row once per epoch and every rank at the same step, whatever changes, whenever, under any loader."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scripted import MemoryReporter, Rows, ScriptedLink, opened, two_layers
from torch import nn

from rex_ray.core.errors import LinkError, RexError
from rex_ray.core.types import Allocation
from rex_ray.worker.session import Session

pytestmark = pytest.mark.dist

NUM_ROWS = 230

LOADERS: dict[str, dict[str, Any]] = {
    "no loader process": {"num_workers": 0},
    "two, persistent": {"num_workers": 2, "persistent_workers": True},
    "one, not persistent": {"num_workers": 1, "persistent_workers": False, "prefetch_factor": 1},
    "one, far ahead": {"num_workers": 1, "prefetch_factor": 6},
}


def random_script(seed: int) -> dict[int, Allocation]:
    """Up to eight allocations of changing global batch, published at random polls."""
    draw = torch.Generator().manual_seed(seed)
    polls = sorted({int(poll) for poll in torch.randint(1, 30, (8,), generator=draw)})
    script = {}
    for version, poll in enumerate(polls, start=1):
        sizes = [int(size) for size in torch.randint(0, 9, (3,), generator=draw)]
        script[poll] = Allocation(version=version, local_batch_sizes=(sizes[0] + 1, *sizes[1:]))
    return script


class Trace:
    """What one rank saw: row ids per epoch, and per step the version, its shares and the rows in hand."""

    def __init__(self) -> None:
        self.epochs: dict[int, list[int]] = {}
        self.versions: dict[int, int] = {}
        self.partial: list[int] = []

    def note(self, session: Session, ids: torch.Tensor) -> None:
        allocation = session.allocation
        assert allocation is not None
        self.epochs.setdefault(session.epoch, []).extend(ids.tolist())
        self.versions[session.step] = allocation.version
        if len(ids) != allocation.local_batch_sizes[session.rank]:
            self.partial.append(session.step)


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[torch.Tensor]) -> None:
    F.mse_loss(model(batch[1]), batch[2]).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(rank: int, options: Mapping[str, Any], seed: int, stray: bool) -> Trace:
    """Three epochs; the second is left early and taken up again, the third begins with a stray batch on one rank."""
    trace = Trace()
    with opened(ScriptedLink((4, 4, 4), random_script(seed)), control_interval_steps=2) as session:
        model = two_layers()
        ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        loader = session.loader(Rows(NUM_ROWS), **options)
        for epoch in session.epochs(3):
            if epoch == 1:
                for batch in itertools.islice(loader, 3 + seed % 3):
                    trace.note(session, batch[0])
                    train_on(ddp, optimizer, batch)
            if epoch == 2 and stray and rank == 1:
                next(iter(loader))
            for batch in loader:
                trace.note(session, batch[0])
                train_on(ddp, optimizer, batch)
    return trace


@pytest.mark.parametrize(
    ("loader", "seed", "stray"),
    [
        ("no loader process", 1, False),
        ("no loader process", 2, True),
        ("two, persistent", 3, True),
        ("one, not persistent", 4, False),
        ("one, far ahead", 5, True),
    ],
)
def test_random_reallocations_keep_every_row_once_and_switch_together(
    ranks: GlooGroup, loader: str, seed: int, stray: bool
) -> None:
    traces = ranks.run(train, LOADERS[loader], seed, stray, limit_s=100.0)
    for epoch in range(3):
        seen = [row for trace in traces for row in trace.epochs[epoch]]
        assert sorted(seen) == list(range(NUM_ROWS))
    assert traces[0].versions == traces[1].versions == traces[2].versions
    assert len(set(traces[0].versions.values())) >= 4
    orders = [tuple(trace.epochs[epoch] for trace in traces) for epoch in range(3)]
    assert len({str(order) for order in orders}) == 3


def change_far_ahead(rank: int) -> tuple[dict[int, int], list[int], list[int], list[int]]:
    """Two loader processes that prefetch four batches each; new shares are published when step 10 is asked for."""
    held: list[int] = []
    trace, link = Trace(), ScriptedLink((4, 4, 4), {11: Allocation(version=1, local_batch_sizes=(8, 3, 1))})
    with opened(link, control_interval_steps=1) as session:
        model = two_layers()
        ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for batch in session.loader(Rows(NUM_ROWS * 2), num_workers=2, prefetch_factor=4):
            trace.note(session, batch[0])
            train_on(ddp, optimizer, batch)
            held.append(len(batch[0]))
    return trace.versions, trace.epochs[0], [record.num_rows for record in link.steps], held


def test_a6_a_change_under_prefetch_lands_on_one_known_step_and_loses_no_row(ranks: GlooGroup) -> None:
    results = ranks.run(change_far_ahead)
    step, interval, ahead = 10, 1, 2 * 4
    for versions, _, rows, held in results:
        assert rows == held
        assert min(k for k, version in versions.items() if version == 1) == step + interval + ahead
        assert set(rows[: step + interval + ahead]) == {4}
    assert [rows[step + interval + ahead] for *_, rows, _ in results] == [8, 3, 1]
    assert sorted(row for _, ids, *_ in results for row in ids) == list(range(NUM_ROWS * 2))


def switch_too_early(rank: int) -> str:
    """The same, but the agreed lead forgets the loader processes."""
    with opened(ScriptedLink((4, 4, 4), {3: Allocation(version=1, local_batch_sizes=(8, 3, 1))})) as session:
        model = two_layers()
        ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        loader = session.loader(Rows(NUM_ROWS), num_workers=2, prefetch_factor=4)
        loader._course.switch._protocol._ahead = 0
        try:
            for batch in loader:
                train_on(ddp, optimizer, batch)
        except RexError as error:
            return str(error)
    return "not caught"


def test_a_lead_shorter_than_the_prefetch_is_caught_on_every_rank(ranks: GlooGroup) -> None:
    for message in ranks.run(switch_too_early):
        assert "already drawn" in message


def train_and_save(rank: int, stop_at: int | None) -> tuple[bytes, torch.Tensor, list[int]]:
    """Two epochs that save after every step; leaves at ``stop_at`` as if killed."""
    reporter, ids_seen = MemoryReporter(), []
    link = ScriptedLink((3, 2, 7), {4: Allocation(version=3, local_batch_sizes=(6, 5, 1), lr_factor=1.5)})
    with opened(link, reporter, checkpoint_interval_s=0.0, control_interval_steps=1) as session:
        model = two_layers()
        ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        loader = session.loader(Rows(100))
        assert len(loader) == 9
        for _ in session.epochs(2):
            for batch in loader:
                if session.epoch == 1:
                    ids_seen += batch[0].tolist()
                train_on(ddp, optimizer, batch)
                session.report({"step": session.step})
                if session.step == stop_at:
                    return _as_bytes(reporter), _flat(model), ids_seen
        return _as_bytes(reporter), _flat(model), ids_seen


def _as_bytes(reporter: MemoryReporter) -> bytes:
    file = io.BytesIO()
    torch.save(reporter.saves[-1][1], file)
    return file.getvalue()


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def resume(rank: int, saved: bytes) -> tuple[torch.Tensor, list[int], Any, int]:
    link, ids_seen = ScriptedLink(), []
    state = torch.load(io.BytesIO(saved), weights_only=True)
    with opened(link, MemoryReporter(state)) as session:
        model = two_layers()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()  # a fresh start would end elsewhere
        ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        loader = session.loader(Rows(100))
        first_step = session.step
        link.first = None
        for _ in session.epochs(2):
            for batch in loader:
                ids_seen += batch[0].tolist()
                train_on(ddp, optimizer, batch)
    return _flat(model), ids_seen, None if link.group is None else link.group.allocation, first_step


def test_a_save_resumes_at_the_same_sample_with_three_ranks_or_with_one(ranks: GlooGroup) -> None:
    whole = ranks.run(train_and_save, None)
    cut = ranks.run(train_and_save, 12)
    resumed = ranks.run(resume, cut[0][0])
    alone = resume_with_lr_factor(cut[0][0])
    seen_before = [row for _, _, ids in cut for row in ids]
    for continued in (resumed, [alone]):
        rows = seen_before + [row for _, ids, *_ in continued for row in ids]
        assert sorted(rows) == list(range(100))
        assert continued[0][3] == 13
        assert torch.allclose(continued[0][0], whole[0][1], rtol=0, atol=1e-10)
    assert resumed[0][2] == Allocation(version=3, local_batch_sizes=(6, 5, 1), lr_factor=1.5)


def resume_with_lr_factor(saved: bytes) -> tuple[torch.Tensor, list[int], Any, int]:
    """One worker takes over; its controller keeps the global batch and the factor."""
    link = ScriptedLink()
    link.join = lambda group, timeout_s: Allocation(  # type: ignore[method-assign]
        version=4, local_batch_sizes=(group.allocation.global_batch_size,), lr_factor=group.allocation.lr_factor
    )
    ids_seen: list[int] = []
    state = torch.load(io.BytesIO(saved), weights_only=True)
    with opened(link, MemoryReporter(state)) as session:
        model = two_layers()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        loader, first_step = session.loader(Rows(100)), session.step
        for _ in session.epochs(2):
            for batch in loader:
                ids_seen += batch[0].tolist()
                train_on(net, optimizer, batch)
    return _flat(model), ids_seen, None, first_step


def one_rank_keeps_silent(rank: int) -> str:
    try:
        with opened(collective_timeout_s=2.0) as session:
            if rank == 1:
                return "silent"
            session.report({"accuracy": 1.0})
    except LinkError as error:
        return str(error)
    return "nobody missed rank 1"


def test_a_rank_that_does_not_report_is_a_named_error_within_the_limit(ranks: GlooGroup) -> None:
    messages = ranks.run(one_rank_keeps_silent, limit_s=60.0)
    ranks.stop()  # a rank that left early leaves the group in disorder
    assert "for session.report" in messages[0]
    assert "rank 1 has ended its loop" in messages[0]
