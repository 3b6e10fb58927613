"""What is said of a wait: the account of the others, the error's sentence, a rank's farewell."""

from __future__ import annotations

from typing import Any

from rex_ray.worker.group.account import Account, give_account
from rex_ray.worker.group.last_words import Heard, Word, named_ranks
from rex_ray.worker.group.sentences import FailedWait, farewell, long_wait


def heard(doing: str, *, age_s: float = 0.5, for_s: float = 3.0, **more: Any) -> Heard:
    return Heard(word=Word(beat=7, doing=doing, for_s=for_s, **more), age_s=age_s)


def account(others: dict[int, Heard], **more: Any) -> Account:
    settings = {"silent_after_s": 3.0, "store_silent_s": None} | more
    return give_account(0, "the control message of step 40", others, **settings)


def test_the_silent_is_named_with_what_it_did_last_and_the_waiting_are_not_blamed() -> None:
    same = {"waits_for": "the control message of step 40"}
    told = account(
        {
            1: heard("between batches, before step 40", **same),
            2: heard("at step 39, in its backward pass", age_s=31.2),
            3: heard("between batches, before step 40", **same),
        }
    )
    assert told.text == (
        "rank 2 was last heard of 31 s ago, at step 39, in its backward pass; ranks 1 and 3 wait as well"
    )
    assert told.missing == (2,)
    assert told.first_witness


def test_a_rank_that_computes_left_never_came_or_waits_for_something_else_is_told_apart() -> None:
    told = account(
        {
            1: heard("at step 39, in its forward pass", for_s=20.0),
            2: heard("at step 39", left="left after ArithmeticError: odd"),
            3: Heard(word=None, age_s=20.0),
            4: heard("at step 39", waits_for="session.pool"),
        }
    )
    assert told.text == (
        "rank 3 was never heard of; rank 2 left after ArithmeticError: odd; rank 1 is alive and has been at step 39, "
        "in its forward pass for 20 s; rank 4 waits for session.pool instead"
    )
    assert told.missing == (1, 2, 3)


def test_a_rank_that_gave_up_the_same_wait_counts_as_waiting() -> None:
    gave_up = heard("x", age_s=60.0, left="left after LinkError: ...", waits_for="the control message of step 40")
    assert account({1: gave_up, 2: Heard(word=None, age_s=1.0)}).missing == (2,)


def test_a_store_that_is_silent_accuses_rank_0_unless_it_said_goodbye() -> None:
    told = give_account(2, "x", {0: heard("y"), 1: heard("z", waits_for="x")}, silent_after_s=3.0, store_silent_s=18.0)
    assert told.text.startswith("the store on rank 0, where ranks leave word, has not answered for 18 s, so rank 0's")
    assert told.missing == (0,)
    assert not told.first_witness
    goodbye = {0: heard("y", left="has ended its loop"), 1: heard("z", waits_for="x")}
    told = give_account(2, "x", goodbye, silent_after_s=3.0, store_silent_s=18.0)
    assert told.text == "rank 0 has ended its loop; rank 1 waits as well"


def test_ranks_are_named_as_people_do() -> None:
    assert [named_ranks(r) for r in ([2], [0, 1], [0, 1, 2, 3], [0, 2, 5], range(0, 40, 2))] == [
        "rank 2",
        "ranks 0 and 1",
        "ranks 0 to 3",
        "ranks 0, 2 and 5",
        "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more",
    ]


def told_of(others: dict[int, Heard], **more: Any) -> str:
    settings: dict[str, Any] = {"waited_s": 4.0, "limit_s": 4.0} | more
    return FailedWait(rank=0, what="the control message of step 40", **settings).sentence(account(others))


WAITS = heard("between batches", waits_for="the control message of step 40")


def test_a_wait_that_passed_its_limit_and_one_that_broke_are_told_apart() -> None:
    busy = {1: heard("at step 39")}
    assert told_of(busy) == (
        "rank 0 waited 4.0 s for the control message of step 40 (limit 4 s): "
        "rank 1 is alive and has been at step 39 for 3.5 s"
    )
    broke = RuntimeError("Connection closed by peer\nException raised from ...")
    assert told_of(busy, waited_s=0.25, error=broke).startswith(
        "rank 0 waited for the control message of step 40, which broke after 0.2 s (limit 4 s), saying "
        "'Connection closed by peer': rank 1 is alive"
    )
    assert "saying 'RuntimeError'" in told_of(busy, waited_s=0.25, error=RuntimeError(" "))
    for error in (RuntimeError("Operation timed out!"), RuntimeError("wait Timed Out after 4000 ms")):
        assert told_of(busy, limit_s=None, error=error).startswith("rank 0 waited 4.0 s for the control message of")


def test_a_limit_is_passed_by_a_backend_that_gives_up_a_little_early() -> None:
    error = RuntimeError("broken")
    waits = [FailedWait(rank=0, what="x", waited_s=s, limit_s=10.0, error=error) for s in (9.4, 9.5, 11.0)]
    assert [wait.timed_out for wait in waits] == [False, True, True]


def test_advice_follows_from_who_waits_for_what() -> None:
    assert told_of({1: WAITS, 2: heard("x", waits_for="session.pool")}).endswith(
        "; every rank must make the same calls at the same places of its loop"
    )
    assert told_of({1: WAITS}).endswith("; every rank is there, so they cannot reach one another")
    assert told_of({1: WAITS, 2: heard("at step 39")}).endswith("; rank 1 waits as well")


def test_a_wait_that_nobody_listened_to_names_the_usual_cause() -> None:
    assert FailedWait(rank=2, what="session.pool", waited_s=60.0, limit_s=60.0).sentence(None) == (
        "rank 2 waited 60 s for session.pool (limit 60 s) and got no answer; every rank must make this call at the "
        "same place of its loop, and a rank that died is named in its own log"
    )


def test_a_wait_that_lasts_and_a_farewell() -> None:
    told = long_wait(0, "the control message of step 40", 31.0, account({1: heard("at step 39"), 2: WAITS}))
    assert told == (
        "rank 0 has waited 31 s for the control message of step 40: rank 1 is alive and has been at step 39 for 3.5 s; "
        "rank 2 waits as well"
    )
    assert farewell(None) == "has ended its loop"
    assert farewell(ArithmeticError("an odd number\nand more")) == "left after ArithmeticError: an odd number"
    assert farewell(KeyboardInterrupt()) == "left after KeyboardInterrupt: "
