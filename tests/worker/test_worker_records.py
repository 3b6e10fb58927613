"""What a step's record says: times, norms, loss, and why it may be no evidence; one rank, no process group."""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scripted import MemoryReporter, Rows, ScriptedLink, gradient_of, opened, two_layers
from torch import nn

from rex_ray.core.measuring import NormSchedule
from rex_ray.core.types import Allocation, StepFlag, StepRecord
from rex_ray.worker.measuring.norms import GradientNorms
from rex_ray.worker.measuring.probes import DeferredScalar, PendingRecord, RecordQueue, squared_norm
from rex_ray.worker.measuring.timing import StepTimer
from rex_ray.worker.session import Session
from rex_ray.worker.step import StepInfo


def run_epochs(session: Session, num_epochs: int, num_rows: int = 60) -> None:
    model = two_layers()
    net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = session.loader(Rows(num_rows))
    for _ in session.epochs(num_epochs):
        for _, inputs, targets in loader:
            session.backward(F.mse_loss(net(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        session.report({"done": 1.0})


def flags_of(link: ScriptedLink) -> list[StepFlag]:
    return [record.flags for record in link.steps]


def test_e7_first_steps_after_start_resume_and_a_change_of_shares_are_marked() -> None:
    published = {6: Allocation(version=1, local_batch_sizes=(6,))}
    link, reporter = ScriptedLink(published=published), MemoryReporter()
    options: dict[str, Any] = {"warm_up_steps": 3, "settle_steps": 2, "control_interval_steps": 1}
    with opened(link, reporter, **options) as session:
        run_epochs(session, 1, num_rows=120)
    marked = [record.step for record in link.steps if record.flags & StepFlag.WARM_UP]
    changed = next(record.step for record in link.steps if record.allocation_version == 1)
    assert marked == [0, 1, 2, changed, changed + 1]
    resumed = ScriptedLink()
    with opened(resumed, MemoryReporter(reporter.saves[-1][1]), **options) as session:
        run_epochs(session, 2, num_rows=120)
    first = link.steps[-1].step + 1
    assert [record.step for record in resumed.steps if record.flags & StepFlag.WARM_UP] == [first, first + 1, first + 2]


def test_steps_after_a_gap_and_partial_batches_are_marked() -> None:
    link = ScriptedLink()
    with opened(link, warm_up_steps=0) as session:
        run_epochs(session, 2, num_rows=30)
    gap, partial, none = StepFlag.AFTER_GAP, StepFlag.PARTIAL, StepFlag.NONE
    assert flags_of(link) == [gap, none, partial, gap, none, partial]
    assert [record.num_rows for record in link.steps] == [12, 12, 6] * 2
    assert [record.epoch for record in link.steps] == [0, 0, 0, 1, 1, 1]
    assert [record.step for record in link.steps] == list(range(6))


def test_evaluation_in_between_marks_the_next_step() -> None:
    link = ScriptedLink()
    with opened(link, warm_up_steps=0) as session:
        model = two_layers()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        held_out = session.eval_loader(Rows(7), local_batch_size=3)
        for k, (_, inputs, targets) in enumerate(session.loader(Rows(60))):
            F.mse_loss(net(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if k == 1:
                with torch.no_grad():
                    assert sum(len(net(x)) for _, x, _ in held_out) == 7
    assert [bool(flags & StepFlag.AFTER_GAP) for flags in flags_of(link)] == [True, False, True, False, False]


class SleepingHook:
    """Sleeps before the stamp and after the reduction, as an emulated device does."""

    def __init__(self, own_s: float, reduce_s: float) -> None:
        self.own_s, self.reduce_s = own_s, reduce_s
        self.infos: list[StepInfo] = []

    def last_gradient(self, info: StepInfo) -> None:
        self.infos.append(info)
        time.sleep(self.own_s)

    def reduced(self, info: StepInfo) -> None:
        time.sleep(self.reduce_s)


class SlowRows(Rows):
    def __getitem__(self, row: int) -> Any:
        time.sleep(0.001)
        return super().__getitem__(row)


def test_times_are_split_into_data_own_computation_and_synchronisation() -> None:
    link, hook = ScriptedLink(), SleepingHook(0.03, 0.02)
    with opened(link, warm_up_steps=1) as session:
        session.add_step_hook(hook)
        model = two_layers()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _, inputs, targets in session.loader(SlowRows(60)):
            F.mse_loss(net(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)  # belongs to the step and to nobody's own time
    assert [(info.step, info.num_rows) for info in hook.infos] == [(k, 12) for k in range(5)]
    for record, info in zip(link.steps[1:], hook.infos[1:], strict=True):
        assert record.data_s == info.data_s >= 0.012
        assert record.compute_s >= 0.03
        assert record.sync_s >= 0.02
        assert record.step_s >= record.data_s + record.compute_s + record.sync_s + 0.01
    # No part contains another: the best of four steps is not far from what was slept.
    assert min(record.compute_s for record in link.steps[1:]) < 0.05
    assert min(record.sync_s for record in link.steps[1:]) < 0.04


def test_one_worker_compares_the_gradients_of_two_steps() -> None:
    link = ScriptedLink()
    with opened(link, norm_interval_steps=3) as session:
        model = two_layers()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        gradients, losses = [], []
        for _, inputs, targets in session.loader(Rows(84)):
            loss = F.mse_loss(net(inputs), targets)
            session.backward(loss)
            gradients.append(gradient_of(model))
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert [record.loss for record in link.steps] == pytest.approx(losses)
    for record in link.steps:
        if record.step % 3 == 1:
            first, second = gradients[record.step - 1], gradients[record.step]
            assert (record.num_norm_steps, record.num_groups, record.num_rows) == (2, 2, 12)
            squares = float(first.square().sum() + second.square().sum())
            assert record.weighted_sq_norm == pytest.approx(12 * squares, rel=1e-12)
            assert record.global_sq_norm == pytest.approx(float(((first + second) / 2).square().sum()), rel=1e-12)
        else:
            assert record.weighted_sq_norm is record.global_sq_norm is None
            assert record.num_norm_steps == 1
    assert [record.step for record in link.steps] == list(range(7))


def test_steps_of_different_rows_and_steps_apart_make_no_pair() -> None:
    published = {3: Allocation(version=1, local_batch_sizes=(6,))}
    link = ScriptedLink(published=published)
    with opened(link, norm_interval_steps=1, control_interval_steps=1) as session:
        run_epochs(session, 1, num_rows=60)
    measured = [record.step for record in link.steps if record.weighted_sq_norm is not None]
    sizes = [record.num_rows for record in link.steps]
    changed = sizes.index(6)
    assert changed % 2 == 1, "the change must fall inside a pair for this test to mean anything"
    assert measured == [k for k in range(1, len(sizes)) if k % 2 and sizes[k - 1] == sizes[k]]


def test_nothing_is_held_between_pairs() -> None:
    link = ScriptedLink()
    with opened(link, norm_interval_steps=4) as session:
        model = two_layers()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        pair = session._tracker.norms._pair
        held = []
        for _, inputs, targets in session.loader(Rows(120)):
            F.mse_loss(net(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            held.append(pair._held is not None)
    assert held == [k % 4 == 0 for k in range(10)]


def test_the_first_steps_of_a_batch_are_all_measured_a_change_of_shares_is_no_other_batch() -> None:
    norms = GradientNorms(NormSchedule(interval_steps=8, dense_steps=3))
    due = []
    for step in range(40):
        norms.begin(step, 64 if step < 21 else 128)
        due.append(norms.due(step))
    assert [step for step, is_due in enumerate(due) if is_due] == [0, 1, 2, 8, 16, 21, 22, 23, 24, 32]


def test_a_session_measures_densely_after_the_batch_changes() -> None:
    link = ScriptedLink(published={9: Allocation(version=1, local_batch_sizes=(18,))})
    with opened(link, norm_interval_steps=100, norm_dense_steps=4, control_interval_steps=1) as session:
        run_epochs(session, 1, num_rows=240)
    changed = [record.num_rows for record in link.steps].index(18)
    assert changed > 4
    measured = [record.step for record in link.steps if record.weighted_sq_norm is not None]
    assert measured == [1, 3, changed + 1, changed + 3]  # the second of each pair of steps


def test_the_loss_scale_is_taken_out_and_a_skipped_step_is_marked() -> None:
    link = ScriptedLink()
    with opened(link, norm_interval_steps=1, warm_up_steps=0, on_non_finite="skip") as session:
        model = two_layers()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        net, optimizer, scaler = session.prepare(model, optimizer, scaler=scaler)
        gradients, scales = [], []
        for k, (_, inputs, targets) in enumerate(session.loader(Rows(96))):
            session.backward(F.mse_loss(net(inputs), targets) * (float("inf") if k == 4 else 1.0))
            scales.append(scaler.get_scale())
            gradients.append(gradient_of(model) / scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [bool(flags & StepFlag.SKIPPED) for flags in flags_of(link)] == [k == 4 for k in range(8)]
    assert scales[2] != scales[3], "a pair under two scales is the case to show"
    measured = [k for k, record in enumerate(link.steps) if record.weighted_sq_norm is not None]
    # 4 was skipped; the gradient after it is not this batch's alone, as far as hooks can tell.
    assert measured == [1, 3, 7]
    for k in measured:
        first, second = gradients[k - 1], gradients[k]
        squares = float(first.square().sum() + second.square().sum())
        assert link.steps[k].weighted_sq_norm == pytest.approx(12 * squares)
        assert link.steps[k].global_sq_norm == pytest.approx(float((first + second).square().sum()) / 4)
    assert link.steps[4].loss is None


def chunked_norms(model: nn.Module, batch: Any, bounds: list[int]) -> float:
    """Return ``sum_j rows_j |g_j|^2`` over the batch's pieces, one by one in a model of their own."""
    total = 0.0
    for start, stop in pairwise(bounds):
        model.zero_grad()
        F.mse_loss(model(batch[1][start:stop]), batch[2][start:stop]).backward()
        total += (stop - start) * float(gradient_of(model).square().sum())
    return total


@pytest.mark.parametrize("how", ["micro_batches", "accumulate"])
def test_micro_batches_are_groups_of_their_own(how: str) -> None:
    link, hook = ScriptedLink(), SleepingHook(0.0, 0.0)
    bounds = [0, 2, 4, 7, 9, 12]
    with opened(link, norm_interval_steps=2) as session:
        session.add_step_hook(hook)
        model, alone = two_layers(), two_layers()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        expected = []
        for batch in session.loader(Rows(48)):
            if how == "micro_batches":
                for _, inputs, targets in session.micro_batches(batch, 5):
                    session.backward(F.mse_loss(net(inputs), targets))
            else:
                with session.accumulate():
                    for start, stop in pairwise(bounds[:-1]):
                        F.mse_loss(net(batch[1][start:stop]), batch[2][start:stop]).backward()
                F.mse_loss(net(batch[1][bounds[-2] :]), batch[2][bounds[-2] :]).backward()
            expected.append((chunked_norms(alone, batch, bounds), float(gradient_of(model).square().sum())))
            optimizer.step()
            optimizer.zero_grad()
            loss = F.mse_loss(alone(batch[1]), batch[2])
    assert len(hook.infos) == len(link.steps) == 4
    if how == "micro_batches":
        assert link.steps[-1].loss == pytest.approx(loss.item())
    for record, (weighted, reduced) in zip(link.steps, expected, strict=True):
        if record.step % 2 == 0:
            assert (record.num_groups, record.num_norm_steps) == (5, 1)
            assert record.weighted_sq_norm == pytest.approx(weighted, rel=1e-12)
            assert record.global_sq_norm == pytest.approx(reduced, rel=1e-12)
        else:
            assert record.weighted_sq_norm is record.global_sq_norm is None
    assert not session._tracker.norms._watching
    assert all(not p._backward_hooks for p in model.parameters())


def test_a_micro_batch_of_two_backward_passes_is_no_group() -> None:
    link = ScriptedLink()
    with opened(link, norm_interval_steps=1) as session:
        model = two_layers()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for k, batch in enumerate(session.loader(Rows(24))):
            for j, (_, inputs, targets) in enumerate(session.micro_batches(batch, 2)):
                session.backward(F.mse_loss(net(inputs), targets))
                if k == 0 and j == 0:
                    session.backward(net(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert [record.weighted_sq_norm is None for record in link.steps] == [True, False]


class Late(DeferredScalar):
    """A value that the device has not computed yet."""

    done = False

    def ready(self) -> bool:
        return self.done


def pending(step: int, local_sq: DeferredScalar | None = None) -> PendingRecord:
    known = partial(
        StepRecord,
        generation="g",
        epoch=0,
        rank=0,
        step=step,
        allocation_version=0,
        num_rows=4,
        data_s=0.0,
        step_s=1.0,
    )
    return PendingRecord(known=known, timer=StepTimer(torch.device("cpu")), local_sq=local_sq, local_factor=2.0)


def test_records_leave_in_step_order_once_each_is_complete() -> None:
    sent: list[StepRecord] = []
    queue = RecordQueue(sent.extend)
    late = Late(torch.tensor(3.0))
    queue.put(pending(0))
    queue.put(pending(1, late))
    queue.put(pending(2))
    assert [record.step for record in sent] == [0]
    late.done = True
    queue.put(pending(3))
    assert [record.step for record in sent] == [0, 1, 2, 3]
    assert sent[1].weighted_sq_norm == 6.0


def test_a_value_that_never_comes_does_not_hold_records_back_for_ever() -> None:
    sent: list[StepRecord] = []
    queue = RecordQueue(sent.extend)
    queue.put(pending(0, Late(torch.tensor(3.0))))
    for step in range(1, 200):
        queue.put(pending(step))
    assert [record.step for record in sent] == list(range(200))
    assert sent[0].weighted_sq_norm is None


def test_half_precision_norms_do_not_overflow() -> None:
    values = torch.full((100,), 300.0, dtype=torch.float16)
    assert squared_norm(values).item() == pytest.approx(100 * 300.0**2)


class SmallNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(inputs.float()))


def test_b10_batch_norm_asks_for_two_rows_and_spares_a_single_one() -> None:
    link = ScriptedLink()
    with opened(link) as session:
        model = SmallNorm()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _, inputs, targets in session.loader(Rows(12 + 12 + 1)):
            F.mse_loss(net(inputs[:1]), targets[:1].float()).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert model.norm.training
    assert link.group is not None
    assert link.group.workers[0].min_local_batch_size == 2
