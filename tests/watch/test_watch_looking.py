"""Looking on from a driver: a controller that is down is waited for, and nothing comes after a run's end."""

from __future__ import annotations

import threading

import pytest

from rex_ray.core.errors import LinkError
from rex_ray.hosting.looking import looked_on
from rex_ray.watch.backlog import Mark, Shown
from rex_ray.watch.fold import RunFold
from rex_ray.watch.seams import Ended, Happened, Progress, RunInfo, Sight

RUN = RunInfo(name="r", run_id="abc", policy="rex", settings={})
LIMIT_S = 60.0

GROUP = Happened(elapsed_s=0.0, step=-1, kind="group", text="2 workers begin")
END = Ended(elapsed_s=1.0, reason="finished")


class Seer:
    def __init__(self) -> None:
        self.seen: list[Sight] = []
        self.news = threading.Event()

    def begin(self, run: RunInfo) -> None:
        pass

    def see(self, sight: Sight) -> None:
        self.seen.append(sight)
        self.news.set()

    def close(self) -> None:
        pass


class Controller:
    """Answers with what happened since; is down for the first few questions."""

    def __init__(self, *sights: Sight, num_down: int = 0) -> None:
        self.sights = list(sights)
        self.num_asked = 0
        self._num_down = num_down

    def ask(self, mark: Mark) -> Shown:
        self.num_asked += 1
        if self.num_asked <= self._num_down:
            raise LinkError("it is starting again")
        return Shown(
            sights=tuple(self.sights[mark.num_sights :]),
            progress=RunFold().progress(),
            mark=Mark(num_sights=len(self.sights)),
            num_missed=0,
        )


def kinds(sights: list[Sight]) -> list[str]:
    return [type(sight).__name__ for sight in sights]


@pytest.mark.parametrize("is_seen_before_the_body_ends", [False, True])
def test_the_end_is_the_last_that_is_seen_whoever_asked_for_it(is_seen_before_the_body_ends: bool) -> None:
    seer, controller = Seer(), Controller(GROUP, END)
    with looked_on(controller.ask, [seer], RUN):
        if is_seen_before_the_body_ends:
            assert seer.news.wait(LIMIT_S)
    assert kinds(seer.seen) == ["Happened", "Progress", "Ended"]


def test_a_controller_that_is_down_is_waited_for() -> None:
    seer, controller = Seer(), Controller(GROUP, num_down=2)
    with looked_on(controller.ask, [seer], RUN):
        assert seer.news.wait(LIMIT_S)
        controller.sights.append(END)
    assert seer.seen[0] == GROUP
    assert seer.seen[-1] == END
    assert seer.seen.count(GROUP) == 1
    assert not [sight for sight in seer.seen if not isinstance(sight, Happened | Progress | Ended)]


def test_one_that_never_answers_costs_its_last_seconds_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    seer, controller = Seer(), Controller(GROUP, num_down=10**9)
    with looked_on(controller.ask, [seer], RUN):
        pass
    assert seer.seen == []
    assert "the last seconds of the run were not seen (it is starting again)" in caplog.text


def test_nobody_is_asked_where_nobody_looks_on() -> None:
    controller = Controller(GROUP)
    with looked_on(controller.ask, [], RUN):
        pass
    assert controller.num_asked == 0
