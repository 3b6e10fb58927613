"""Resuming under a script that has changed: what a save overrules is said, and another kind of part is refused."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scripted import MemoryReporter, Rows, opened, two_layers
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel

from rex_ray.core.errors import ConfigError
from rex_ray.worker.saving.overruled import in_words, settings_of

STEPS = 3  # of an epoch
Make = Callable[..., Any]


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, **options})


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.001)


def cosine(num_epochs: int) -> Make:
    return lambda optimizer: schedules.CosineAnnealingLR(optimizer, num_epochs * STEPS)


def one_cycle(num_epochs: int) -> Make:
    return lambda optimizer: schedules.OneCycleLR(optimizer, 0.1, total_steps=num_epochs * STEPS)


def train(
    reporter: MemoryReporter,
    optimizer_of: Make = sgd,
    schedule_of: Make | None = None,
    num_epochs: int = 2,
    *,
    prepared_together: bool = False,
    parts: Make | None = None,
    **options: Any,
) -> tuple[list[float], list[str]]:
    """Train; return the rate after each step, and the warnings."""
    rates, model = [], two_layers()
    optimizer = optimizer_of(model.parameters())
    with warnings.catch_warnings(record=True) as caught, opened(None, reporter, **options) as session:
        warnings.simplefilter("always")
        if prepared_together and schedule_of is not None:
            net, optimizer, schedule = session.prepare(model, optimizer, schedule_of(optimizer))
        else:
            net, optimizer = session.prepare(model, optimizer)
            schedule = None if schedule_of is None else session.prepare_scheduler(schedule_of(optimizer))
        if parts is not None:
            session.register(**parts(model))
        loader = session.loader(Rows(36))
        for _ in session.epochs(num_epochs):
            for batch in loader:
                F.mse_loss(net(batch[1]), batch[2]).backward()
                optimizer.step()
                optimizer.zero_grad()
                if schedule is not None:
                    schedule.step()
                rates.append(optimizer.param_groups[0]["lr"])
            session.report({})
    return rates, [str(warning.message) for warning in caught]


def saved(*args: Any, **options: Any) -> MemoryReporter:
    """Return a storage that holds the save of a first epoch."""
    reporter = MemoryReporter()
    train(reporter, *args, **{"num_epochs": 1, **options})
    return MemoryReporter(reporter.saves[-1][1])


# --- other kinds


@pytest.mark.parametrize(
    ("before", "now"),
    [((sgd,), (adam,)), ((adam,), (sgd,)), ((adam,), (torch.optim.RMSprop,))],
    ids=("sgd-adam", "adam-sgd", "adam-rmsprop"),
)
def test_the_state_of_another_kind_of_optimizer_is_refused_before_a_step(before: Any, now: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"the optimizer is of kind .*made with another \(.* in place of .*another name"
    ):
        train(saved(*before), *now)


@pytest.mark.parametrize("together", [False, True])
def test_the_state_of_another_kind_of_schedule_is_refused_and_not_mixed_in(together: bool) -> None:
    with pytest.raises(ConfigError, match=r"of kind OneCycleLR, and .*\(T_max, .* in place of .*total_steps"):
        train(saved(sgd, cosine(2), prepared_together=together), sgd, one_cycle(2), prepared_together=together)


# --- other settings


class Plateau(schedules.ReduceLROnPlateau):
    """Whose metric never gets any better; keeps no rate to begin with."""

    def step(self, metrics: Any = 0.0, epoch: Any = None) -> None:
        super().step(metrics, epoch)


SCHEDULES: dict[str, Make] = {
    "plateau": lambda optimizer: Plateau(optimizer, factor=0.5, patience=0),
    "cosine": cosine(2),
    "one cycle": one_cycle(2),
    "cyclic": lambda optimizer: schedules.CyclicLR(optimizer, 0.001, 0.1, step_size_up=2),
    "steps": lambda optimizer: schedules.MultiStepLR(optimizer, [2, 5]),
    "warm restarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 2),
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 0.9**step),
    "in sequence": lambda optimizer: schedules.SequentialLR(
        optimizer, [schedules.LinearLR(optimizer, 0.1), schedules.ExponentialLR(optimizer, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_script_that_has_not_changed_hears_nothing_whatever_its_schedule_has_done(name: str, together: bool) -> None:
    before = saved(sgd, SCHEDULES[name], prepared_together=together)
    assert not train(before, sgd, SCHEDULES[name], prepared_together=together)[1]


def test_settings_that_a_save_overrules_are_said_with_both_values() -> None:
    rates, told = train(saved(), lambda parameters: sgd(parameters, lr=0.01, weight_decay=0.5))
    assert rates == [0.1] * STEPS
    (message,) = told
    assert "optimizer are without effect" in message
    assert "lr=0.01 (it goes on with 0.1), weight_decay=0.5 (it goes on with 0)" in message


def test_a_schedule_made_for_more_epochs_says_that_it_stays_as_long_as_it_was_and_can_be_set() -> None:
    _, (message,) = train(saved(sgd, cosine(1)), sgd, cosine(3), num_epochs=3)
    assert "T_max=9 (it goes on with 3)" in message
    with opened(None, saved(sgd, cosine(1))) as session:
        model = two_layers()
        _, optimizer = session.prepare(model, sgd(model.parameters()))
        with pytest.warns(UserWarning, match="T_max"):
            schedule = session.prepare_scheduler(cosine(3)(optimizer))
        schedule.T_max = 9
        assert schedule.wrapped.T_max == schedule.state_dict()["scheduler"]["T_max"] == 9


def test_epochs_beyond_a_schedules_end_can_be_given_one_of_their_own() -> None:
    rates: list[float] = []
    with warnings.catch_warnings(record=True) as caught, opened(None, saved(sgd, cosine(1))) as session:
        warnings.simplefilter("always")
        model = two_layers()
        net, optimizer = session.prepare(model, sgd(model.parameters()))
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        schedule = session.prepare_scheduler(schedules.CosineAnnealingLR(optimizer, 2 * STEPS), name="the last epochs")
        loader = session.loader(Rows(36))
        for _ in session.epochs(3):
            for batch in loader:
                F.mse_loss(net(batch[1]), batch[2]).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                rates.append(optimizer.param_groups[0]["lr"])
            session.report({})
    assert rates[0] > rates[-2] > rates[-1] == pytest.approx(0.0, abs=1e-9)
    assert rates == sorted(rates, reverse=True)
    assert [("'scheduler'" in str(warning.message)) for warning in caught] == [True, False]


def test_settings_are_named_by_group_and_schedule_and_only_optimizers_and_schedules_have_any() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}], lr=1)
    settings = settings_of(optimizer)
    assert (settings["group 0's lr"], settings["group 1's lr"]) == (1, 0.5)
    inner = settings_of(SCHEDULES["in sequence"](optimizer))
    assert inner["schedule 2's gamma"] == 0.9
    assert settings_of(model) == settings_of(object(), 7) == settings_of(optimizer, 7) == {}
    many = dict.fromkeys("abcdefgh", 1)
    assert "and 2 more" in (in_words("optimizer", many, dict.fromkeys(many, 2)) or "")


class OfAnotherLibrary(torch.optim.SGD):
    """Counts in its groups, as optimizers without schedules do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


class Restarts(schedules.LRScheduler):
    """Counts in public, as schedules of other libraries do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.step_in_cycle = 0
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.step_in_cycle += 1
        return [rate / self.step_in_cycle for rate in self.base_lrs]


@pytest.mark.parametrize("schedule", [Restarts, one_cycle(2)], ids=["restarts", "one cycle"])
def test_what_optimizers_and_schedules_of_other_libraries_count_is_no_setting_of_the_script(schedule: Make) -> None:
    def of_another_library(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
        return OfAnotherLibrary(parameters, lr=lr, momentum=0.9)

    before = saved(of_another_library, schedule)
    assert not train(before, of_another_library, schedule)[1]
    (message,) = train(saved(of_another_library), lambda parameters: of_another_library(parameters, 0.5))[1]
    assert "lr=0.5 (it goes on with 0.1). Set" in message


def test_another_number_of_groups_is_not_another_kind() -> None:
    def in_groups(parameters: Any) -> torch.optim.Optimizer:
        return sgd([{"params": [parameter]} for parameter in parameters])

    with pytest.raises(ConfigError, match="different number of parameter groups"):
        train(saved(in_groups), sgd)


def test_another_global_batch_is_said_to_be_that_of_the_save() -> None:
    _, (message,) = train(saved(), global_batch_size=24)
    assert "global_batch_size=24 differs from the 12 rows" in message


def test_a_run_that_is_over_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rex_ray"):
        rates, _ = train(saved(num_epochs=2), num_epochs=2)
    assert rates == []
    assert (
        "session.epochs(2) has nothing left to train: the run that was resumed has 2 whole epochs behind it"
        in caplog.text
    )


# --- parts that come and go


def average(model: nn.Module) -> dict[str, Any]:
    return {"ema": AveragedModel(model)}


def test_parts_that_a_run_no_longer_takes_up_or_never_had_are_named_once() -> None:
    _, (lost,) = train(saved(parts=average))
    assert "holds 'ema', which nobody took up" in lost
    _, (lost,) = train(saved(sgd, cosine(2), prepared_together=True))
    assert "holds 'scheduler', which nobody took up" in lost
    _, (afresh,) = train(saved(), parts=average)
    assert "holds no 'ema', which began afresh" in afresh
    assert train(saved(parts=average), parts=average)[1] == []
