"""A group that shrinks, grows or comes back begins with shares planned at once from what is known of its devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from policy_worlds import group, observed

from rex_ray.control.controller import Controller
from rex_ray.control.events import GroupStarted
from rex_ray.control.notes import Decided
from rex_ray.core.types import Allocation, LearntShape
from rex_ray.policies.learnt import learnt_book, learnt_shapes
from rex_ray.policies.registry import make_policy, policy_names

US_PER_ROW = {"T4": 2000, "V100": 1000, "A100": 500}
BATCH = 240
LEARNT = tuple(
    LearntShape(device=device, num_rows=(40.0, 120.0), own_s=(40e-6 * us, 120e-6 * us), weights=(10.0, 10.0))
    for device, us in US_PER_ROW.items()
)


def trained(devices: Sequence[str], num_steps: int = 40, policy: str = "rex") -> tuple[Controller, Allocation]:
    """A controller whose first group trained for a while, and the allocation that it ran at the end."""
    controller = Controller(make_policy(policy), seed=0)
    return controller, run(controller, devices, "g", range(num_steps))


def run(
    controller: Controller,
    devices: Sequence[str],
    generation: str,
    steps: range,
    resumed: Allocation | None = None,
    learnt: Sequence[LearntShape] = (),
) -> Allocation:
    """Have a group train, taking up at once what is published; return what it ran last."""
    problem = replace(group(devices, BATCH), learnt=tuple(learnt))
    event = GroupStarted(generation=generation, problem=problem, step=steps.start, allocation=resumed)
    *_, command = controller.handle(event)
    running = command.allocation
    for step in steps:
        rows = running.local_batch_sizes
        own_us = [US_PER_ROW[device] * num_rows for device, num_rows in zip(devices, rows, strict=True)]
        seen = replace(observed(step, rows, own_us, version=running.version), generation=generation)
        for told in controller.handle(seen):
            running = getattr(told, "allocation", running)
    return running


def first_shares(controller: Controller, devices: Sequence[str], resumed: Allocation | None, **known) -> list[int]:
    sizes = run(controller, devices, "next", range(100, 100), resumed, **known).local_batch_sizes
    assert sum(sizes) == BATCH, "the global batch is kept"
    return list(sizes)


@pytest.mark.parametrize(
    ("devices", "right"),
    [
        (["T4", "V100"], [80, 160]),
        (["V100", "V100"], [120, 120]),
        (["T4", "V100", "V100"], [48, 96, 96]),
        (["V100", "T4", "V100", "T4"], [80, 40, 80, 40]),
    ],
)
def test_f4_a_group_of_another_size_begins_with_the_right_shares(devices, right):
    controller, running = trained(["T4", "T4", "V100"])
    assert first_shares(controller, devices, running) == pytest.approx(right, abs=6)


def test_ranks_that_changed_places_have_their_shares_with_them():
    controller, running = trained(["T4", "V100"])
    assert running.local_batch_sizes == pytest.approx([80, 160], abs=6)
    turned = replace(running, local_batch_sizes=running.local_batch_sizes[::-1])
    for resumed in (running, turned):
        assert first_shares(controller, ["V100", "T4"], resumed) == pytest.approx([160, 80], abs=6)


def test_on_the_same_devices_the_newest_shares_are_taken_and_not_those_of_an_old_save():
    controller, running = trained(["T4", "V100"])
    saved = Allocation(version=1, local_batch_sizes=(120, 120))
    assert first_shares(controller, ["T4", "V100"], saved) == list(running.local_batch_sizes)


def test_a_kind_that_nobody_knows_is_learnt_and_nothing_is_guessed():
    controller, running = trained(["T4", "V100"])
    assert first_shares(controller, ["T4", "V100", "A100"], running) == [80, 80, 80]
    later = run(controller, ["T4", "V100", "A100"], "later", range(100, 160), running)
    assert later.local_batch_sizes == pytest.approx([34, 69, 137], abs=6)


def test_a_new_job_that_learnt_from_another_begins_with_the_right_shares():
    controller = Controller(make_policy("rex"), seed=0)
    assert first_shares(controller, ["T4", "V100", "A100"], None, learnt=LEARNT) == pytest.approx([34, 69, 137], abs=2)
    resumed = Allocation(version=7, local_batch_sizes=(80, 80, 80), lr_factor=1.5)
    controller = Controller(make_policy("rex"), seed=0)
    assert first_shares(controller, ["T4", "V100", "A100"], resumed, learnt=LEARNT) == pytest.approx(
        [34, 69, 137], abs=2
    )


def test_what_a_job_measures_itself_replaces_what_it_was_told():
    lies = tuple(replace(shape, own_s=(0.1, 0.3)) for shape in LEARNT)
    controller = Controller(make_policy("rex"), seed=0)
    running = run(controller, ["T4", "V100"], "g", range(40), learnt=lies)
    assert running.local_batch_sizes == pytest.approx([80, 160], abs=6)


def test_every_policy_keeps_the_global_batch_and_the_journal_says_so():
    for name in policy_names():
        controller, running = trained(["T4", "V100"], policy=name)
        controller.take_notes()
        first_shares(controller, ["T4", "V100", "V100"], running)
        (said,) = (note for note in controller.take_notes() if isinstance(note, Decided))
        assert said.reason == f"first allocation of the group: the {BATCH} rows resumed from are kept"


def test_a_global_batch_that_does_not_fit_any_more_is_cut_and_the_journal_says_why():
    controller, running = trained(["T4", "V100"])
    grown = replace(running, local_batch_sizes=(320, 640), lr_factor=2.0)
    problem = group(["T4", "V100"], BATCH, upper=200)
    controller.take_notes()
    *_, command = controller.handle(GroupStarted(generation="next", problem=problem, step=100, allocation=grown))
    assert sum(command.allocation.local_batch_sizes) <= 400
    (said,) = (note for note in controller.take_notes() if isinstance(note, Decided))
    assert "since it cannot run the 960 rows resumed from" in said.reason
    assert command.allocation.lr_factor < 2.0


def test_what_is_known_of_kinds_is_found_under_any_wrapper():
    for options in ({}, {"cooldown_steps": 3, "hysteresis_gain": 0.01}, {"rollback": False}, {"probe": True}):
        policy = make_policy("rex", options)
        _, state = policy.init(replace(group(["T4"], BATCH), learnt=LEARNT))
        assert learnt_book(state) is not None
        assert {shape.device for shape in learnt_shapes(state)} == set(US_PER_ROW)
    assert learnt_shapes(make_policy("bsp").init(group(["T4"], BATCH))[1]) == ()
    assert learnt_shapes(None) == ()
