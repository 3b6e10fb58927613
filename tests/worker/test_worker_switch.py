"""The switch on a group of one: when it asks, what it agrees on, and what it refuses."""

from __future__ import annotations

import pytest
from scripted import ScriptedLink

from rex_ray.core.errors import RexError
from rex_ray.core.types import Allocation
from rex_ray.worker.data.schedule import Schedule
from rex_ray.worker.group.protocol import LONG_STEP_S
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.group.switch import Switch

LONG_S = LONG_STEP_S


def allocation(version: int, rows: int = 8) -> Allocation:
    return Allocation(version=version, local_batch_sizes=(rows,), lr_factor=1.5)


def make(
    link: ScriptedLink, *, ahead: int = 0, undrawn: int | None = None, interval: int = 4
) -> tuple[Switch, Schedule]:
    schedule = Schedule(allocation(0))
    switch = Switch(
        group=SideGroup(1.0),
        link=link,
        schedule=schedule,
        next_undrawn=lambda: undrawn or 0,
        ahead=ahead,
        interval_steps=interval,
    )
    return switch, schedule


def test_an_allocation_takes_effect_beyond_what_is_drawn_ahead() -> None:
    switch, schedule = make(ScriptedLink(published={1: allocation(3, rows=5)}), ahead=6)
    switch.boundary(10, LONG_S)  # launched
    assert schedule.at(100) == allocation(0)
    switch.boundary(11, LONG_S)  # read
    assert schedule.at(10 + 1 + 6 - 1) == allocation(0)
    assert schedule.at(10 + 1 + 6) == allocation(3, rows=5)


def test_a_boundary_is_passed_once_however_often_a_batch_is_asked_for() -> None:
    link = ScriptedLink()
    switch, _ = make(link)
    for step in (0, 0, 1, 0, 1, 2, 2):
        switch.boundary(step, LONG_S)
    assert link.num_polls == 3


def test_boundaries_are_as_often_in_time_as_one_per_long_step_but_never_rarer_than_asked_for() -> None:
    for step_s, polls in ((LONG_S / 50, 2 + 5), (LONG_S / 4, 2 + 5), (LONG_S / 2, 2 + 9), (LONG_S, 20)):
        link = ScriptedLink()
        switch, _ = make(link, interval=4)
        for step in range(20):
            switch.boundary(step, step_s)
        # The interval itself is agreed by a broadcast, so the first boundaries are one step apart.
        assert polls - 1 <= link.num_polls <= polls


def test_an_old_version_is_not_published_again() -> None:
    switch, schedule = make(ScriptedLink(published={1: allocation(2), 3: allocation(1, rows=3), 4: allocation(2, 4)}))
    for step in range(8):
        switch.boundary(step, LONG_S)
    assert schedule.newest == allocation(2)


def test_a_lead_shorter_than_what_was_drawn_is_refused() -> None:
    switch, _ = make(ScriptedLink(published={1: allocation(1)}), ahead=0, undrawn=9)
    switch.boundary(4, LONG_S)
    with pytest.raises(RexError, match=r"step 5, but this rank's loader has already drawn every step before 9"):
        switch.boundary(5, LONG_S)


def test_shares_of_another_group_are_refused() -> None:
    published = {1: Allocation(version=1, local_batch_sizes=(4, 4))}
    switch, _ = make(ScriptedLink(published=published))
    with pytest.raises(RexError, match=r"shares \(4, 4\) for 1 workers"):
        switch.boundary(0, LONG_S)
