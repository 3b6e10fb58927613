"""Whoever looks on sees everything in order, and his faults are his own."""

from __future__ import annotations

import itertools
import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from rex_ray.loggers.audience import Audience
from rex_ray.watch.seams import Ended, Happened, Progress, RunInfo, Sight

RUN = RunInfo(name="r", run_id="abc", policy="rex", settings={})
LIMIT_S = 30.0


def progress(step: int) -> Progress:
    nan = float("nan")
    return Progress(
        elapsed_s=0.0,
        epoch=0,
        step=step,
        rows_per_s=nan,
        step_s=nan,
        global_batch_size=1,
        lr_factor=1.0,
        workers=(),
        slowest_rank=None,
        slowest_why="",
        imbalance=nan,
    )


def happened(step: int) -> Happened:
    return Happened(elapsed_s=0.0, step=step, kind="decided", text=f"number {step}")


class Seer:
    """Remembers; fails or waits where it is told to."""

    def __init__(self, fails_at: int | None = None, waits_for: threading.Event | None = None) -> None:
        self.seen: list[Sight] = []
        self.begun, self.closed = 0, 0
        self._fails_at, self._waits_for = fails_at, waits_for

    def begin(self, run: RunInfo) -> None:
        assert run is RUN
        self.begun += 1

    def see(self, sight: Sight) -> None:
        if self._waits_for is not None:
            assert self._waits_for.wait(LIMIT_S)
        if len(self.seen) == self._fails_at:
            raise OSError("the server is gone")
        self.seen.append(sight)

    def close(self) -> None:
        self.closed += 1


@given(is_progress=st.lists(st.booleans(), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=5))
def test_everything_that_happened_is_seen_once_in_order_and_progress_only_goes_up(is_progress, cuts):
    sights = [progress(k) if short else happened(k) for k, short in enumerate(is_progress)]
    seer = Seer()
    audience = Audience([seer], RUN)
    edges = sorted({0, len(sights), *(min(cut, len(sights)) for cut in cuts)})
    for first, last in itertools.pairwise(edges):
        audience.show(sights[first:last])
    audience.close(LIMIT_S)
    assert [sight for sight in seer.seen if isinstance(sight, Happened)] == [
        sight for sight in sights if isinstance(sight, Happened)
    ]
    steps = [sight.step for sight in seer.seen]
    assert steps == sorted(set(steps))
    # The newest state of the run is seen whatever else is passed over.
    assert seer.seen[-1:] == sights[-1:]
    assert (seer.begun, seer.closed) == (1, 1)


def test_one_that_fails_is_told_of_once_and_the_others_see_everything(caplog):
    broken, sound = Seer(fails_at=1), Seer()
    audience = Audience([broken, sound], RUN)
    everything = [*map(happened, range(20)), Ended(elapsed_s=1.0, reason="finished")]
    for sight in everything:
        audience.show([sight])
    audience.close(LIMIT_S)
    assert sound.seen == everything
    assert len(broken.seen) == 1
    told = [record.getMessage() for record in caplog.records]
    assert told == ["Seer failed and sees nothing more of this run; training goes on"]


def test_one_that_hangs_is_left_behind_within_the_limit_and_holds_up_nobody(caplog):
    never = threading.Event()
    slow, quick = Seer(waits_for=never), Seer()
    audience = Audience([slow, quick], RUN)
    audience.show([happened(0)])
    began_s = time.monotonic()
    audience.close(0.5)
    waited_s = time.monotonic() - began_s
    never.set()
    assert quick.seen == [happened(0)]
    assert waited_s < LIMIT_S / 2
    assert "Seer did not close within 0.5 s and is left behind" in caplog.text


def test_no_thread_is_left():
    before = set(threading.enumerate())
    audience = Audience([Seer(), Seer()], RUN)
    audience.close(LIMIT_S)
    assert set(threading.enumerate()) <= before
