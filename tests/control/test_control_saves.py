"""Saves that somebody outside of the loop asks for: a notice becomes one request of the running group, replayable."""

from __future__ import annotations

import pytest
from control_worlds import started, step_of

from rex_ray.control.commands import RequestCheckpoint
from rex_ray.control.controller import Controller
from rex_ray.control.events import DrainNoticed, SaveAsked, WorkerLost
from rex_ray.control.journalled import JournalledController
from rex_ray.control.reading import read_journal
from rex_ray.control.replay import replay
from rex_ray.policies.registry import make_policy

DRAIN = DrainNoticed(generation="g", ranks=(0, 1), left_us=30_000_000, reason="node abc is being drained")
ASKED = SaveAsked(generation="g", reason="by hand")


def requests(commands) -> list[RequestCheckpoint]:
    return [command for command in commands if isinstance(command, RequestCheckpoint)]


@pytest.mark.parametrize("event", [DRAIN, ASKED])
def test_f5_a_notice_asks_the_group_for_a_save_in_whatever_phase_it_is(event):
    controller = Controller(make_policy("rex"))
    assert requests(controller.handle(event)) == [], "there is no group yet"
    controller.handle(started())
    first = requests(controller.handle(event))
    controller.handle(step_of(0, 1))
    second = requests(controller.handle(event))
    assert [len(first), len(second)] == [1, 1]
    assert first[0].number < second[0].number, "or the second would pass for the first"
    assert {request.generation for request in (*first, *second)} == {"g"}
    controller.handle(started("later", step=1))
    assert requests(controller.handle(event)) == [], "its group is gone"
    controller.handle(WorkerLost(generation="later", rank=0, reason="killed"))
    assert requests(controller.handle(event)) == []
    assert sum(controller.state.dropped.values()) == 3


def test_f5_the_reason_says_who_goes_and_when():
    controller = Controller(make_policy("bsp"))
    controller.handle(started())
    (request,) = requests(controller.handle(DRAIN))
    assert request.reason == "ranks 0, 1 will be taken away in 30 s (node abc is being drained)"
    (request,) = requests(controller.handle(DrainNoticed(generation="g", ranks=(1,), left_us=None, reason="who knows")))
    assert request.reason == "rank 1 will be taken away soon (who knows)"


def test_requests_stand_in_the_journal_and_replay():
    controller, chunks = JournalledController.begin(policy="rex", seed=3)
    files: dict[str, bytes] = {}
    for event in (started(), DRAIN, step_of(0, 1), ASKED):
        for name, data in (*chunks, *controller.handle(event).chunks):
            files[name] = files.get(name, b"") + data
        chunks = ()
    for name, data in controller.flush():
        files[name] = files.get(name, b"") + data
    journal = read_journal(files)
    assert len(requests(journal.commands)) == 2
    assert replay(journal).is_identical
