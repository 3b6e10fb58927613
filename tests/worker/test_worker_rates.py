"""What the learning rate does while the global batch changes: schedules end at their end, the factor comes on top."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from hypothesis import given
from hypothesis import strategies as st
from scripted import MemoryReporter, Rows, ScriptedLink, opened, two_layers

from rex_ray.core.errors import ConfigError
from rex_ray.core.lr_scaling import lr_factor
from rex_ray.core.types import Allocation
from rex_ray.worker.data.sampler import Plan, Position, plan_step
from rex_ray.worker.model.scheduling import ReferenceScheduler
from rex_ray.worker.progress import Progress
from rex_ray.worker.session import Session

NUM_ROWS, M0, NUM_EPOCHS = 610, 12, 4
PER_EPOCH = math.ceil(NUM_ROWS / M0)
SHARES = {12: (3, 2, 7), 24: (6, 4, 14), 18: (5, 3, 10), 30: (8, 5, 17)}


def allocation(version: int, rows: int, factor: float) -> Allocation:
    return Allocation(version=version, local_batch_sizes=SHARES[rows], lr_factor=factor)


@dataclass
class Trace:
    """What each update saw."""

    steps: list[int] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    scheduled: list[float] = field(default_factory=list)
    applied: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    final_rate: float = math.nan
    weights: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    save: bytes = b""

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the rate inside ``optimizer.step()``: hooks run in the order in which they are registered."""
        optimizer.register_step_pre_hook(lambda inner, *_: self.applied.append(inner.param_groups[0]["lr"]))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
}
SCHEDULES: dict[tuple[str, str], Callable[[torch.optim.Optimizer], Any]] = {
    ("one cycle", "batch"): lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, max_lr=0.1, total_steps=NUM_EPOCHS * PER_EPOCH
    ),
    ("one cycle", "epoch"): lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=NUM_EPOCHS),
    ("step", "batch"): lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=40, gamma=0.5),
    ("step", "epoch"): lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5),
}


def plain_rates(optimizer: str, schedule: str, per: str) -> list[float]:
    """Return the rates of a loop whose batch never changes, before each tick and after the last."""
    parameter = torch.nn.Parameter(torch.zeros(()))
    plain = OPTIMIZERS[optimizer]([parameter])
    scheduler = SCHEDULES[schedule, per](plain)
    rates = [plain.param_groups[0]["lr"]]
    for _ in range(NUM_EPOCHS * (PER_EPOCH if per == "batch" else 1)):
        plain.step()
        scheduler.step()
        rates.append(plain.param_groups[0]["lr"])
    return rates


def train(
    rank: int,
    optimizer_name: str,
    schedule: tuple[str, str],
    published: dict[int, Allocation],
    lr_slew: float | None,
    stop_at: int | None = None,
    saved: bytes | None = None,
) -> Trace:
    trace = Trace()
    restored = None if saved is None else torch.load(io.BytesIO(saved), weights_only=True)
    reporter = MemoryReporter(restored)
    link = ScriptedLink(None if saved else SHARES[M0], published)
    options: dict[str, Any] = {"control_interval_steps": 1, "checkpoint_interval_s": 0.0, "lr_slew": lr_slew}
    with opened(link, reporter, global_batch_size=M0, norm_interval_steps=0, **options) as session:
        model = two_layers()
        ddp, optimizer = session.prepare(model, OPTIMIZERS[optimizer_name](model.parameters()))
        trace.watch(optimizer)
        loader = session.loader(Rows(NUM_ROWS))
        assert len(loader) == PER_EPOCH
        scheduler = session.prepare_scheduler(SCHEDULES[schedule](optimizer))
        for epoch in session.epochs(NUM_EPOCHS):
            for ids, inputs, targets in loader:
                trace.steps.append(session.step)
                trace.positions.append(session._tracker.progress.position)
                trace.scheduled.append(optimizer.param_groups[0]["lr"])
                trace.batches.append(sum(session.allocation.local_batch_sizes) if session.allocation else 0)
                trace.ids += [epoch * NUM_ROWS + row for row in ids.tolist()]
                F.mse_loss(ddp(inputs), targets).backward()
                optimizer.step()
                assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]], "the factor must not be seen"
                optimizer.zero_grad()
                if schedule[1] == "batch":
                    scheduler.step()
                if session.step == stop_at:
                    session.report({})
                    return finished(trace, scheduler, model, reporter)
            if schedule[1] == "epoch":
                scheduler.step()
        return finished(trace, scheduler, model, reporter)


def finished(trace: Trace, scheduler: Any, model: torch.nn.Module, reporter: MemoryReporter) -> Trace:
    (trace.final_rate,) = scheduler.get_last_lr()
    trace.weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    if reporter.saves:
        file = io.BytesIO()
        torch.save(reporter.saves[-1][1], file)
        trace.save = file.getvalue()
    return trace


def elapsed(position: Position, per: str) -> int:
    """Reference ticks before the step at ``position``."""
    return position.epoch if per == "epoch" else position.epoch * PER_EPOCH + math.ceil(position.cursor / M0)


@pytest.mark.dist
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("name", "rule"), [("sgd", "linear"), ("adamw", "adam")])
def test_c9_schedules_end_at_their_end_when_the_batch_doubles_at_step_100(
    ranks: GlooGroup, name: str, rule: Any, schedule: tuple[str, str]
) -> None:
    factor = lr_factor(rule, 24, M0, noise_scale=math.inf)
    assert factor == pytest.approx({"linear": 2.0, "adam": math.sqrt(2.0)}[rule])
    slew = 0.02 if rule == "linear" else None
    traces = ranks.run(train, name, schedule, {100: allocation(1, 24, factor)}, slew, limit_s=90.0)
    plain = plain_rates(name, *schedule)
    for trace in traces:
        changed = trace.batches.index(24)
        assert 99 <= changed <= 102
        assert len(trace.steps) < NUM_EPOCHS * PER_EPOCH - 30, "fewer steps than ticks is the case to show"
        assert trace.scheduled == [plain[elapsed(position, schedule[1])] for position in trace.positions]
        assert trace.final_rate == plain[-1]
        reached = 1.0
        for k, (scheduled, applied) in enumerate(zip(trace.scheduled, trace.applied, strict=True)):
            if k >= changed:
                reached = min(reached * (1 + slew), factor) if slew else factor
            assert applied == (scheduled if reached == 1.0 else scheduled * reached)
        assert reached == factor
    assert sorted(row for trace in traces for row in trace.ids) == list(range(NUM_EPOCHS * NUM_ROWS))


@pytest.mark.dist
def test_c11_resumed_after_three_batch_changes_everything_goes_on_where_it_was(ranks: GlooGroup) -> None:
    script = {10: allocation(1, 18, 1.5), 25: allocation(2, 24, 2.0), 40: allocation(3, 30, 2.5)}
    common = ("sgd", ("one cycle", "batch"))
    whole = ranks.run(train, *common, script, 0.02, limit_s=90.0)
    cut = ranks.run(train, *common, script, 0.02, 50)
    saved = torch.load(io.BytesIO(cut[0].save), weights_only=True)
    assert (
        saved["allocation"].items() >= {"version": 3, "local_batch_sizes": list(SHARES[30]), "lr_factor": 2.5}.items()
    )
    assert 1.5 < saved["lr_factor"] < 2.5, "a save in the middle of the rise is the case to show"
    resumed = ranks.run(train, *common, {}, 0.02, None, cut[0].save, limit_s=90.0)
    for uncut, first, rest in zip(whole, cut, resumed, strict=True):
        assert first.steps[-1] == 50
        assert rest.steps == uncut.steps[len(first.steps) :]
        assert len(rest.steps) > 40
        assert first.scheduled + rest.scheduled == uncut.scheduled
        assert first.applied + rest.applied == uncut.applied
        assert first.ids + rest.ids == uncut.ids
        assert rest.final_rate == uncut.final_rate == plain_rates("sgd", "one cycle", "batch")[-1]
        assert torch.allclose(rest.weights, uncut.weights, rtol=0, atol=1e-10)


# --- the rise of the factor, on one rank


def factors_of(published: dict[int, Allocation], **options: Any) -> list[float]:
    factors = []
    options = {"control_interval_steps": 1, **options}
    with opened(ScriptedLink((12,), published), **options) as session:
        model = two_layers()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        assert session.lr_factor == 1.0
        for _, inputs, targets in session.loader(Rows(240)):
            F.mse_loss(net(inputs), targets).backward()
            optimizer.step()
            optimizer.step()  # a second update of one batch takes the rise no further
            assert optimizer.param_groups[0]["lr"] == 0.5
            optimizer.zero_grad()
            factors.append(session.lr_factor)
    return factors


def test_the_factor_rises_slowly_where_asked_and_falls_at_once() -> None:
    def single(version: int, factor: float) -> Allocation:
        return Allocation(version=version, local_batch_sizes=(12,), lr_factor=factor)

    script = {3: single(1, 2.0), 9: single(2, 1.05)}
    jumping = factors_of(script)
    up, down = jumping.index(2.0), jumping.index(1.05)
    assert jumping == [1.0] * up + [2.0] * (down - up) + [1.05] * (20 - down)
    rising = factors_of(script, lr_slew=0.1)
    assert rising[:up] == [1.0] * up
    assert rising[up:down] == pytest.approx([1.1 ** (k + 1) for k in range(down - up)])
    assert rising[down:] == [1.05] * (20 - down)


# --- how schedulers are stepped


def run_with(
    session: Session, make: Callable[[torch.optim.Optimizer], Any], rows: int = 120
) -> tuple[Any, Any, Any, Any]:
    model = two_layers()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    net, optimizer, scheduler = session.prepare(model, optimizer, make(optimizer))
    return net, optimizer, scheduler, session.loader(Rows(rows))


class Counted:
    """The part of a tracker that a scheduler sees."""

    in_hand = None

    def __init__(self) -> None:
        self.progress = Progress()


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def test_a_scheduler_that_the_loop_forgets_for_a_few_skipped_batches_still_counts_them() -> None:
    with opened() as session:
        net, optimizer, scheduler, loader = run_with(session, halving)
        for k, (_, inputs, targets) in enumerate(loader):
            F.mse_loss(net(inputs), targets).backward()
            optimizer.step()
            if k >= 3:
                scheduler.step()
    assert scheduler.last_epoch == 10


def test_an_epoch_that_was_left_early_ticks_once() -> None:
    with opened() as session:
        net, optimizer, scheduler, loader = run_with(session, halving, rows=600)
        for _ in session.epochs(2):
            for k, (_, inputs, targets) in enumerate(loader):
                F.mse_loss(net(inputs), targets).backward()
                optimizer.step()
                if k == 30:
                    break
            scheduler.step()
    assert scheduler.last_epoch == 2


def test_a_metric_is_passed_on_and_everything_else_is_the_schedulers_own() -> None:
    with opened() as session:
        plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0)
        net, optimizer, scheduler, loader = run_with(session, plateau)
        for _, inputs, targets in loader:
            F.mse_loss(net(inputs), targets).backward()
            optimizer.step()
        scheduler.step(1.0)
        scheduler.step(2.0)
    assert scheduler.best == 1.0
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert scheduler.optimizer is optimizer


def test_how_it_is_stepped_can_be_said_and_a_name_holds_one_scheduler() -> None:
    with opened() as session:
        model = two_layers()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        loader = session.loader(Rows(60))
        per_epoch = session.prepare_scheduler(halving(optimizer), stepped="epoch")
        with pytest.raises(ConfigError, match="'scheduler' is saved already"):
            session.prepare_scheduler(halving(optimizer))
        per_batch = session.prepare_scheduler(halving(optimizer), stepped="batch", name="other")
        for _, inputs, targets in loader:
            F.mse_loss(net(inputs), targets).backward()
            optimizer.step()
        per_batch.step()
        per_epoch.step()
    assert (per_batch.last_epoch, per_epoch.last_epoch) == (5, 1)


def test_how_it_is_stepped_is_what_this_run_says_not_what_an_earlier_one_guessed() -> None:
    bare = halving(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    guessed = ReferenceScheduler(bare, Counted(), "batch")  # type: ignore[arg-type]
    said = ReferenceScheduler(bare, Counted(), "epoch")  # type: ignore[arg-type]
    silent = ReferenceScheduler(bare, Counted())  # type: ignore[arg-type]
    for scheduler in (said, silent):
        scheduler.load_state_dict(guessed.state_dict())
    assert said.state_dict()["stepped"] == "epoch"
    assert silent.state_dict()["stepped"] == "batch"


def test_another_word_for_how_it_is_stepped_is_refused() -> None:
    with opened() as session:
        model = two_layers()
        _, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        with pytest.raises(ConfigError, match="stepped='step' says neither 'batch' nor 'epoch' nor 'sample'"):
            session.prepare_scheduler(halving(optimizer), stepped="step")  # type: ignore[arg-type]


@pytest.mark.parametrize("again", [copy.copy, lambda scheduler: pickle.loads(pickle.dumps(scheduler))])
def test_a_prepared_scheduler_can_be_copied(again: Callable[[Any], Any]) -> None:
    bare = halving(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    twin = again(ReferenceScheduler(bare, Counted()))  # type: ignore[arg-type]
    assert twin.last_epoch == 0
    assert twin.gamma == 0.5


def test_a_bare_schedulers_save_is_read() -> None:
    saved = {"last_epoch": 7}
    with opened() as session:
        _, _, scheduler, _ = run_with(session, halving)
        scheduler.load_state_dict(saved)
    assert scheduler.last_epoch == 7


BY_ROWS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=2 * 100),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda rows: 1 / (1 + rows)),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=30, gamma=0.5),
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_a_schedule_in_samples_is_where_the_rows_are_and_is_resumed_there(name: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(()))
    plain = torch.optim.SGD([parameter], lr=0.1)
    scheduler, expected = BY_ROWS[name](plain), [plain.param_groups[0]["lr"]]
    for _ in range(2 * 100):
        plain.step()
        scheduler.step()
        expected.append(plain.param_groups[0]["lr"])

    seen: list[tuple[int, float]] = []

    def run(reporter: MemoryReporter, stop_at: int | None) -> None:
        grown = {3: Allocation(version=1, local_batch_sizes=(24,))}
        with opened(
            ScriptedLink((12,), grown), reporter, control_interval_steps=1, checkpoint_interval_s=0.0
        ) as session:
            model = two_layers()
            net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            loader = session.loader(Rows(100))
            ours = session.prepare_scheduler(BY_ROWS[name](optimizer), stepped="sample")
            for _ in session.epochs(2):
                for _, inputs, targets in loader:
                    position = session._tracker.progress.position
                    seen.append((100 * position.epoch + position.cursor, optimizer.param_groups[0]["lr"]))
                    F.mse_loss(net(inputs), targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    ours.step()
                    if session.step == stop_at:
                        session.report({})
                        return
            seen.append((200, ours.get_last_lr()[0]))

    first = MemoryReporter()
    run(first, stop_at=3)
    run(MemoryReporter(first.saves[-1][1]), stop_at=None)
    assert len({after - before for (before, _), (after, _) in pairwise(seen)}) >= 3, "batches differ in size"
    assert [rate for _, rate in seen] == pytest.approx([expected[rows] for rows, _ in seen])


# --- the law


@given(
    dataset_size=st.integers(1, 500),
    reference=st.integers(1, 64),
    batches=st.lists(st.integers(1, 200), min_size=1, max_size=20),
)
def test_an_epoch_has_as_many_reference_steps_whatever_its_batches(
    dataset_size: int, reference: int, batches: list[int]
) -> None:
    position, ticks, k = Position(), 0, 0
    while position.cursor < dataset_size:
        rows = batches[k % len(batches)]
        plan: Plan = plan_step(position, Allocation(version=0, local_batch_sizes=(rows,)), dataset_size)
        ticks += plan.reference_steps(reference)
        assert ticks == math.ceil(plan.after.cursor / reference)
        position, k = plan.after, k + 1
    assert ticks == math.ceil(dataset_size / reference)
