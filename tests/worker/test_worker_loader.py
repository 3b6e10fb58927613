"""What the training loader refuses, forgives and warns of; one rank, no process group."""

from __future__ import annotations

import gc
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scripted import MemoryReporter, Rows, ScriptedLink, opened, two_layers
from torch import nn
from torch.utils.data import Dataset

from rex_ray.core.errors import ConfigError, LinkError, RexError
from rex_ray.core.types import Allocation
from rex_ray.worker.current import get_session
from rex_ray.worker.data.evaluation import EvalLoader
from rex_ray.worker.group.joining import reference_batch
from rex_ray.worker.link import GroupInfo
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.row_cutting import slice_rows
from rex_ray.worker.session import Session


def prepared(session: Session, lr: float = 0.01) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = two_layers()
    net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    return net, optimizer


def backward(model: nn.Module, batch: Any) -> None:
    F.mse_loss(model(batch[1]), batch[2]).backward()


def update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    backward(model, batch)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"batch_size": 32}, "batch_size=32.*global_batch_size"),
        ({"shuffle": True}, "shuffle=True.*RexConfig.seed"),
        ({"sampler": [1, 2]}, r"sampler=\[1, 2\].*wrap the data set"),
        ({"batch_sampler": [[1]]}, "batch_sampler.*leave it out"),
        ({"drop_last": True}, "drop_last=True.*every row"),
        ({"in_order": False}, "in_order=True"),
    ],
)
def test_options_that_the_session_decides_are_refused_with_a_remedy(options: dict[str, Any], remedy: str) -> None:
    with opened() as session, pytest.raises(ConfigError, match=remedy):
        session.loader(Rows(50), **options)


class Nothing(Dataset[int]):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, row: int) -> int:
        raise IndexError(row)


class Uncounted(Rows):
    def __len__(self) -> int:
        raise NotImplementedError("it streams")


def test_data_that_cannot_be_shared_is_refused() -> None:
    with opened() as session:
        with pytest.raises(ConfigError, match="0 rows"):
            session.loader(Nothing())
        for make in (session.loader, session.eval_loader):
            with pytest.raises(ConfigError, match=r"range_iterator, which can be read only once.*IterableDataset"):
                make(iter(range(3)))
            with pytest.raises(ConfigError, match="int, which is no data set"):
                make(7)
            with pytest.raises(ConfigError, match=r"dict with the keys 'train', 'test'; rows are asked for by number"):
                make({"train": Rows(50), "test": Rows(50)})
            with pytest.raises(ConfigError, match=r"dict with the keys \(0, 'a'\), .*, \.\.\.; rows"):
                make({(row, "a"): row for row in range(50)})
            with pytest.raises(ConfigError, match=r"Uncounted whose rows cannot be counted .*NotImplementedError: it"):
                make(Uncounted(50))
        with pytest.raises(ConfigError, match="end='all' was given with a Rows"):
            session.loader(Rows(50), end="all")


def test_a_mapping_by_row_numbers_is_a_data_set() -> None:
    rows = Rows(5)
    with opened() as session:
        batches = session.eval_loader({row: rows[row] for row in range(5)}, local_batch_size=3)
        assert [batch[0].tolist() for batch in batches] == [[0, 1, 2], [3, 4]]


def with_anchors(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {"ids": torch.tensor([row for row, *_ in rows]), "anchors": torch.ones(9, 1)}


def test_evaluating_no_rows_counts_none_also_beside_a_constant_of_one_column() -> None:
    loader = EvalLoader(
        Rows(1),
        rank=1,
        num_ranks=2,
        local_batch_size=1,
        whole=None,
        device=lambda: torch.device("cpu"),
        on_start=lambda: False,
        in_step=True,
        options={"collate_fn": with_anchors},
    )
    (batch,) = loader
    assert (len(batch["ids"]), batch["anchors"].shape) == (0, (9, 1))


def test_a_second_training_loader_is_refused_and_the_other_one_named() -> None:
    with opened() as session:
        session.loader(Rows(50))
        with pytest.raises(ConfigError, match=r"session\.eval_loader"):
            session.loader(Rows(20))


def test_a1_few_rows_are_an_error_naming_both_numbers_or_a_smaller_batch() -> None:
    def options(**changes: Any) -> WorkerOptions:
        return WorkerOptions(**{"global_batch_size": 64, **changes})

    with pytest.raises(ConfigError, match=r"global_batch_size=64.*5 rows.*small_dataset='clamp'"):
        reference_batch(options(), 5, 3)
    for rows in (5, 2):
        with pytest.warns(UserWarning, match=f"global_batch_size=64 is lowered to the training set's {rows} rows"):
            assert reference_batch(options(small_dataset="clamp"), rows, 3) == rows
    with pytest.raises(ConfigError, match=r"global_batch_size=2 is below the 3 workers"):
        reference_batch(options(global_batch_size=2), 1000, 3)


def test_training_without_a_prepared_model_is_refused() -> None:
    with opened() as session:
        loader = session.loader(Rows(50))
        with pytest.raises(ConfigError, match=r"session\.prepare"):
            next(iter(loader))
        with pytest.raises(ConfigError, match=r"session\.prepare"):
            session.backward(torch.tensor(1.0))


def test_length_counts_reference_steps_whatever_the_shares() -> None:
    with opened(ScriptedLink((30,)), global_batch_size=12) as session:
        loader = session.loader(Rows(100))
        assert len(loader) == 9
        net, optimizer = prepared(session)
        assert sum(1 for batch in loader if update(net, optimizer, batch) is None) == 4


def test_a_batch_that_nothing_was_done_with_is_an_error_naming_eval_loader() -> None:
    with opened() as session:
        net, optimizer = prepared(session)
        batches = iter(session.loader(Rows(50)))
        update(net, optimizer, next(batches))
        next(batches)
        with pytest.raises(RexError, match=r"step 1: .*session\.eval_loader"):
            next(batches)


def test_a_stray_batch_is_drawn_again() -> None:
    with opened() as session:
        net, optimizer = prepared(session)
        loader = session.loader(Rows(50))
        stray = next(iter(loader))
        old = iter(loader)
        first = next(iter(loader))
        assert torch.equal(stray[0], first[0])
        update(net, optimizer, first)
        with pytest.raises(RexError, match="replaced by a newer one"):
            next(old)


def test_leaving_a_pass_early_goes_on_at_the_next_sample() -> None:
    with opened() as session:
        net, optimizer = prepared(session)
        loader, seen = session.loader(Rows(50)), []
        for batch in itertools.islice(loader, 2):
            update(net, optimizer, batch)
            seen += batch[0].tolist()
        for batch in loader:
            update(net, optimizer, batch)
            seen += batch[0].tolist()
        assert sorted(seen) == list(range(50))
        assert session.step == 5
        for batch in itertools.islice(loader, 1):  # outside session.epochs the next pass is the next epoch
            assert session.epoch == 1
            update(net, optimizer, batch)


def test_iterating_twice_within_one_epoch_is_an_error() -> None:
    with opened() as session:
        net, optimizer = prepared(session)
        loader = session.loader(Rows(50))
        for _ in session.epochs(1):
            for batch in loader:
                update(net, optimizer, batch)
            with pytest.raises(RexError, match="epoch 0 is complete"):
                iter(loader)


def test_micro_batches_left_early_are_an_error() -> None:
    with opened() as session:
        net, _ = prepared(session)
        batches = iter(session.loader(Rows(50)))
        for chunk in session.micro_batches(next(batches), 3):
            backward(net, chunk)
            break
        with pytest.raises(RexError, match="before its last micro-batch"):
            next(batches)


def test_micro_batches_that_miss_rows_are_an_error_when_the_optimizer_steps() -> None:
    with opened() as session:
        net, optimizer = prepared(session)
        batch = next(iter(session.loader(Rows(50))))
        with session.accumulate():
            backward(net, [part[:5] for part in batch])
        backward(net, [part[5:9] for part in batch])
        with pytest.raises(RexError, match=r"held 9 rows .* the loader's batch 12"):
            optimizer.step()


def test_stepping_every_other_batch_is_warned_of_once() -> None:
    with opened() as session:
        net, optimizer = prepared(session)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for k, batch in enumerate(session.loader(Rows(150))):
                backward(net, batch)
                if k % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
        messages = [str(warning.message) for warning in caught]
        assert len(messages) == 1
        assert "steps once in 2 loader batches" in messages[0]
        assert "session.micro_batches" in messages[0]


def test_token_weights_are_asked_for_and_refused_where_they_belong() -> None:
    with opened(weight_by="tokens") as session:
        net, _ = prepared(session)
        batch = next(iter(session.loader(Rows(50))))
        with pytest.raises(ConfigError, match=r"session\.backward\(loss, weight=num_tokens\)"):
            backward(net, batch)
        with pytest.raises(ConfigError, match=r"session\.backward\(loss, weight=num_tokens\)"):
            session.backward(net(batch[1]).mean())
    with opened() as session:
        net, _ = prepared(session)
        batch = next(iter(session.loader(Rows(50))))
        with pytest.raises(ConfigError, match=r"weight=7.*weight_by='tokens'"):
            session.backward(net(batch[1]).mean(), weight=7)


class Epochal(Rows):
    """A data set whose rows depend on the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, row: int) -> Any:
        return (*super().__getitem__(row), self.epoch)


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2, "persistent_workers": True}])
def test_a9_the_epoch_reaches_persistent_loader_processes(options: dict[str, Any]) -> None:
    with opened() as session:
        net, optimizer = prepared(session)
        loader, orders = session.loader(Epochal(30), **options), []
        for epoch in session.epochs(3):
            order = []
            for batch in loader:
                assert set(batch[3].tolist()) == {epoch}
                order += batch[0].tolist()
                update(net, optimizer, batch[:3])
            orders.append(tuple(order))
        assert len(set(orders)) == 3


def test_the_learning_rate_factor_lives_inside_the_step_only() -> None:
    link = ScriptedLink()
    link.join = lambda group, timeout_s: Allocation(version=0, local_batch_sizes=(12,), lr_factor=3.0)  # type: ignore[method-assign]
    with opened(link) as session:
        net, optimizer = prepared(session, lr=0.1)
        batch = next(iter(session.loader(Rows(50))))
        before = [p.detach().clone() for p in net.parameters()]
        backward(net, batch)
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.1
        for old, new in zip(before, net.parameters(), strict=True):
            assert new.grad is not None
            assert torch.allclose(new, old - 0.3 * new.grad, atol=1e-12)


class DeafLink(ScriptedLink):
    def join(self, group: GroupInfo, timeout_s: float) -> Allocation:
        raise LinkError(f"no answer within {timeout_s:g} s")


def test_a_controller_that_does_not_answer_costs_a_warning() -> None:
    with opened(DeafLink()) as session:
        with pytest.warns(UserWarning, match="equal shares: no answer within"):
            session.loader(Rows(50))
        assert session.allocation == Allocation(version=0, local_batch_sizes=(12,))


def test_a_session_is_found_while_open_and_only_then() -> None:
    link = ScriptedLink()
    with opened(link) as session:
        assert get_session() is session
        assert link.generations == [session.generation]
        with pytest.raises(ConfigError, match="open already"), opened():
            pass
    assert link.closed
    with pytest.raises(ConfigError, match="no session is open"):
        get_session()


def test_what_was_there_before_training_is_left_out_of_garbage_collections_until_it_ends() -> None:
    with opened() as session:
        before = gc.get_freeze_count()
        session.loader(Rows(50))
        assert gc.get_freeze_count() > before + 10_000, "torch alone is more"
    assert gc.get_freeze_count() == 0


class BrokenReporter(MemoryReporter):
    def restore(self, on_progress: Any) -> Any:
        raise ConfigError("not a save of ours")


def test_a_session_that_cannot_open_closes_its_link() -> None:
    link = ScriptedLink()
    with pytest.raises(ConfigError, match="not a save"), opened(link, BrokenReporter()):
        pass
    assert link.closed
    with opened():  # and leaves the way free for the next
        pass


def by_name(rows: list[Any]) -> dict[str, Any]:
    return {"ids": [row[0] for row in rows], "x": torch.stack([row[1] for row in rows])}


def test_a_users_collate_function_keeps_its_form_also_for_no_rows() -> None:
    link = ScriptedLink()
    with opened(link) as session:
        net, _ = prepared(session)
        for batch in session.loader(Rows(30), collate_fn=by_name):
            assert len(batch["ids"]) == len(batch["x"])
            net(batch["x"]).mean().backward()
    assert [record.num_rows for record in link.steps] == [12, 12, 6]
    assert slice_rows(by_name([Rows(1)[0]]), 0, 0, num_rows=1)["ids"] == []


def test_reports_are_journalled_each_time_and_saved_at_most_so_often() -> None:
    link, reporter = ScriptedLink(), MemoryReporter()
    with opened(link, reporter, checkpoint_interval_s=3600.0) as session:
        net, optimizer = prepared(session)
        loader = session.loader(Rows(36))
        for epoch in session.epochs(3):
            for batch in loader:
                update(net, optimizer, batch)
            session.report({"accuracy": torch.tensor(0.5), "epoch": epoch, "note": "text"})
    assert [metric.metrics for metric in link.metrics] == [{"accuracy": 0.5, "epoch": float(k)} for k in range(3)]
    assert [(metric.epoch, metric.step) for metric in link.metrics] == [(0, 3), (1, 6), (2, 9)]
    assert [saved[0]["epoch"] for saved in reporter.saves] == [2]  # the last epoch always


def test_what_was_reported_last_is_saved_when_the_last_epoch_is_left_early() -> None:
    reporter = MemoryReporter()
    with opened(reporter=reporter, checkpoint_interval_s=3600.0) as session:
        net, optimizer = prepared(session)
        loader = session.loader(Rows(36))
        for epoch in session.epochs(2):
            for batch in itertools.islice(loader, 1):
                update(net, optimizer, batch)
            session.report({"epoch": epoch})
    assert [saved[0] for saved in reporter.saves] == [{"epoch": 1}]


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


def test_registered_parts_and_schedulers_are_saved_and_come_back() -> None:
    def run(restored: Any) -> tuple[Counter, Any, MemoryReporter]:
        reporter = MemoryReporter(restored)
        with opened(reporter=reporter) as session:
            model, counter = two_layers(), Counter()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            net, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
            session.register(counter=counter)
            loader = session.loader(Rows(36))
            for _ in session.epochs(1 if restored is None else 2):
                for batch in loader:
                    update(net, optimizer, batch)
                    counter.count += 1
                scheduler.step()
                session.report({})
        return counter, scheduler, reporter

    _, _, reporter = run(None)
    counter, scheduler, _ = run(reporter.saves[-1][1])
    assert counter.count == 6
    assert scheduler.get_last_lr() == [0.25]


def test_a_save_of_other_data_is_refused() -> None:
    reporter = MemoryReporter()
    with opened(reporter=reporter) as session:
        net, optimizer = prepared(session)
        loader = session.loader(Rows(36))
        for _ in session.epochs(1):
            for batch in loader:
                update(net, optimizer, batch)
            session.report({})
    with opened(reporter=MemoryReporter(reporter.saves[-1][1])) as session:
        assert (session.epoch, session.step) == (1, 3)
        with pytest.raises(ConfigError, match="36 rows and this one has 40"):
            session.loader(Rows(40))
