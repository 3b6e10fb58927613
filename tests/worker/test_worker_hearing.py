"""What a rank has heard, by its own clock alone: how old words are, and when a silence is sure."""

from __future__ import annotations

import pytest

from rex_ray.worker.group.hearing import Hearing, Pace, StoreWatch
from rex_ray.worker.group.last_words import Word

PACE = Pace(beat_s=1.0, listen_s=1.0)


def said(beat: int) -> bytes:
    return Word(beat=beat, doing="at step 3", for_s=0.0).encode().encode()


def ages_s(hearing: Hearing, moment_s: float) -> dict[int, float]:
    return {rank: heard.age_s for rank, heard in hearing.newest(moment_s).items()}


def test_a_word_is_as_old_as_its_number_and_never_older_than_the_listening() -> None:
    hearing = Hearing(1, 3, PACE)
    hearing.begin(10.0)
    hearing.take({0: said(7)}, 10.0)
    for moment_s in (11.0, 12.0, 13.0):
        hearing.begin(moment_s)
        hearing.take({0: said(7 + int(moment_s >= 12.0))}, moment_s)
    assert ages_s(hearing, 13.5) == {0: 1.5, 2: 3.5}
    assert hearing.unheard == [2]
    hearing.pause()
    hearing.begin(50.0)  # what was said in between was not missed
    hearing.take({0: said(8)}, 50.0)
    assert ages_s(hearing, 50.5) == {0: 0.5, 2: 0.5}


def test_a_silence_is_sure_once_it_was_listened_to_for_long_enough() -> None:
    hearing = Hearing(0, 2, PACE)
    assert not hearing.is_sure()
    hearing.take({1: said(1)}, 5.0)  # a first word, before anybody waits
    assert not hearing.is_sure()
    hearing.begin(10.0)
    hearing.take({}, 10.0 + PACE.sure_after_s)
    assert not hearing.is_sure()
    hearing.take({}, 10.1 + PACE.sure_after_s)
    assert hearing.is_sure()
    assert not hearing.is_sure(after_s=11.0)
    hearing.take({}, 11.1 + PACE.sure_after_s)
    assert hearing.is_sure(after_s=11.0)
    hearing.pause()
    assert not hearing.is_sure()


def test_listening_is_due_about_every_beat() -> None:
    hearing = Hearing(0, 2, PACE)
    assert hearing.is_due(0.0)
    hearing.take({}, 10.0)
    assert not hearing.is_due(10.5)
    assert hearing.is_due(10.95)


def test_beats_follow_short_limits_and_listening_the_number_of_ranks() -> None:
    assert Pace.of(4, limit_s=60.0) == PACE
    assert Pace.of(4, limit_s=2.0) == Pace(beat_s=0.2, listen_s=0.2)
    many = Pace.of(1000, limit_s=60.0)
    assert (many.beat_s, many.listen_s, many.silent_after_s) == (1.0, 50.0, 150.0)
    assert many.silent_after_s < many.sure_after_s < many.sure_limit_s


def test_a_store_is_silent_while_it_is_asked_for_long_or_once_it_is_gone() -> None:
    watch = StoreWatch(3.0, watched=True)
    assert watch.silent_s(100.0) is None
    watch.ask(100.0)
    assert watch.silent_s(102.0) is None
    assert watch.silent_s(104.0) == pytest.approx(4.0)
    watch.answer()
    assert watch.silent_s(110.0) is None
    watch.ask(120.0)
    watch.gone = True
    assert watch.silent_s(120.5) == pytest.approx(0.5)


def test_nobody_is_blamed_for_a_store_of_ones_own() -> None:
    watch = StoreWatch(3.0, watched=False)
    watch.ask(0.0)
    assert watch.silent_s(50.0) is None
