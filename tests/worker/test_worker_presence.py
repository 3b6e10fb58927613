"""Who waited for whom: a wait that fails names the ranks that keep the others waiting, and what they last did."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup, RankError
from scripted import Rows, ScriptedLink, opened, two_layers
from torch.nn.parallel import DistributedDataParallel

from rex_ray.core.errors import LinkError
from rex_ray.worker.group.board import Board, group_store
from rex_ray.worker.group.last_words import Activity, Word
from rex_ray.worker.group.presence import Presence
from rex_ray.worker.link import IncidentRecord

LIMIT_S = 1.5
# Far beyond the limit, for a machine that does other things too; and far below what a backend waits by itself.
TOLD_WITHIN_S = 40.0


@contextlib.contextmanager
def told_in_time() -> Iterator[list[Any]]:
    """Collect the LinkError that the block ends with, and how long the block took."""
    began_s = time.monotonic()
    told: list[Any] = []
    try:
        yield told
    except LinkError as error:
        told += [str(error), time.monotonic() - began_s]


def steps(session: Any, misbehave: Callable[[int], None], backward: Callable[[int], None] | None = None) -> None:
    """Train; ``misbehave`` is called with the step before the forward pass, ``backward`` inside the backward pass."""
    model = two_layers()
    ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step, (_, inputs, targets) in enumerate(session.loader(Rows(120))):
        misbehave(step)
        outputs = ddp(inputs)
        if backward is not None:
            outputs.register_hook(lambda _, step=step: backward(step))
        F.mse_loss(outputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def all_that_can_happen(rank: int) -> dict[str, list[Any]]:
    """One mishap after the other, all survived by the processes."""
    happened: dict[str, list[Any]] = {}
    limits = {"collective_timeout_s": LIMIT_S, "control_interval_steps": 1}
    link = ScriptedLink((4, 4, 4))

    with told_in_time() as happened["sleeps"], opened(link, **limits) as session:
        steps(session, lambda step: time.sleep(2.0 * LIMIT_S * (rank == 2 and step == 3)))
    happened["incidents"] = [r.message for r in link.records if isinstance(r, IncidentRecord) and r.kind == "waiting"]
    meet()

    with told_in_time() as happened["calls another"], opened(**limits) as session:
        if rank == 1:
            session.report({"loss": 1.0})
        session.pool(1, 1)
    meet()

    group = dist.new_group(timeout=timedelta(seconds=77))
    with warnings.catch_warnings(record=True) as caught, opened(**limits) as session:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(two_layers(), process_group=group)
        session.prepare(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01))
    happened["own group"] = [str(warning.message) for warning in caught]

    def raise_once(step: int) -> None:
        if rank == 1 and step == 2:
            raise ArithmeticError("an odd number")

    with contextlib.suppress(ArithmeticError), told_in_time() as happened["raises"], opened(**limits) as session:
        steps(session, raise_once)
    meet()

    with told_in_time() as happened["never opens"]:
        if rank != 0:
            with opened(preflight_timeout_s=1.0, **limits):
                pass
        else:
            from rex_ray.worker.group import board

            next(board._sessions)
    meet()

    own = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
    with told_in_time() as happened["own collective"], opened(**limits):
        if rank != 1:
            dist.all_reduce(torch.ones(1), group=own)
    meet()

    happened |= stopped(rank, limits)
    return happened


def stopped(rank: int, limits: dict[str, Any]) -> dict[str, list[Any]]:
    """A rank that the system stops in mid-backward, first one that is only a worker, then the store's."""
    happened: dict[str, list[Any]] = {}
    pids = all_pids(rank)

    def stop(step: int) -> None:
        if step == 2 and rank == 2:
            time.sleep(2.5 * LIMIT_S / 10)  # long enough to say where it is
            os.kill(os.getpid(), signal.SIGSTOP)

    with told_in_time() as happened["stopped"], opened(**limits) as session:
        steps(session, lambda _: None, stop)
    if rank == 0:
        os.kill(pids[2], signal.SIGCONT)
    meet()

    def stop_the_store(step: int) -> None:
        if step == 2 and rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)

    with told_in_time() as happened["store stopped"], opened(**limits) as session:
        steps(session, lambda _: None, stop_the_store)
    if rank != 0:
        time.sleep(1.0)  # both have told their story
        os.kill(pids[0], signal.SIGCONT)
    meet()
    return happened


def killed_in_backward(rank: int) -> None:
    def kill(step: int) -> None:
        if step == 2 and rank == 1:
            time.sleep(2.5 * LIMIT_S / 10)
            os.kill(os.getpid(), signal.SIGKILL)

    with opened(collective_timeout_s=LIMIT_S) as session:
        steps(session, lambda _: None, kill)


_meetings = iter(range(1000))


def meet() -> None:
    """Wait for all ranks by the store, which outlives every broken group."""
    store: Any = group_store()
    name = f"meeting/{next(_meetings)}"
    store.add(name, 1)
    deadline = time.monotonic() + 40.0
    while store.add(name, 0) < 3:
        assert time.monotonic() < deadline, "the ranks did not meet"
        time.sleep(0.05)


def all_pids(rank: int) -> list[int]:
    with opened() as session:
        return session.pool_sum(torch.tensor([os.getpid() * (k == rank) for k in range(3)])).tolist()


@pytest.fixture(scope="module")
def mishaps(ranks: GlooGroup) -> Callable[[str], list[list[Any]]]:
    """What each rank was told of each mishap, from one run of three processes."""
    results = ranks.run(all_that_can_happen, limit_s=100.0)
    return lambda name: [result[name] for result in results]


@pytest.mark.dist
@pytest.mark.slow
class TestWaits:
    def test_a_rank_that_sleeps_is_named_within_the_limit_and_the_others_wait(self, mishaps: Any) -> None:
        for rank, other in ((0, 1), (1, 0)):
            message, took_s = mishaps("sleeps")[rank]
            assert took_s < TOLD_WITHIN_S
            assert message.startswith(f"rank {rank} waited")
            assert "for the gradient of step 3" in message
            assert "rank 2 is alive and has been at step 3, in its forward pass for" in message
            assert f"rank {other} waits as well" in message

    def test_a_long_wait_is_an_incident_before_it_is_an_error_and_told_by_one_rank(self, mishaps: Any) -> None:
        by_rank = [[told for told in rank if "gradient of step 3" in told] for rank in mishaps("incidents")]
        assert [len(told) for told in by_rank] == [1, 0, 0]
        assert "rank 0 has waited" in by_rank[0][0]
        assert "rank 2" in by_rank[0][0]

    def test_ranks_that_make_different_calls_are_told_which(self, mishaps: Any) -> None:
        (zero, _), _, _ = mishaps("calls another")
        assert "for session.pool" in zero
        assert "rank 1 waits for session.report instead" in zero
        assert "same calls at the same places" in zero

    def test_a_users_own_group_keeps_its_limit_with_a_warning_that_names_both(self, mishaps: Any) -> None:
        for caught in mishaps("own group"):
            (said,) = [text for text in caught if "process group" in text]
            assert "limit of 77 s" in said
            assert f"collective_timeout_s={LIMIT_S:g}" in said

    def test_an_error_of_the_loops_own_collective_says_for_whom_it_waited(self, mishaps: Any) -> None:
        for rank in (0, 2):
            message, _ = mishaps("own collective")[rank]
            assert "for a collective of the loop's own" in message
            assert "rank 1 has ended its loop" in message

    def test_a_rank_that_raised_is_named_with_its_error_and_nobody_waits_out_the_limit(self, mishaps: Any) -> None:
        (zero, _), nothing, (two, _) = mishaps("raises")
        assert nothing == []  # its own error, not ours
        for message in (zero, two):
            assert "rank 1 left after ArithmeticError: an odd number" in message

    def test_a_rank_that_never_opens_its_session_is_named_before_any_collective(self, mishaps: Any) -> None:
        _, (one, took_s), (two, _) = mishaps("never opens")
        assert took_s < TOLD_WITHIN_S
        for message in (one, two):
            assert "all ranks to open their sessions" in message
            assert "rank 0 was never heard of" in message

    def test_f1_a_rank_stopped_in_mid_backward_is_named_with_the_step(self, mishaps: Any) -> None:
        for rank in (0, 1):
            message, took_s = mishaps("stopped")[rank]
            assert took_s < TOLD_WITHIN_S
            assert "rank 2 was last heard of" in message
            assert "at step 2, in its backward pass" in message

    def test_f1_a_stopped_rank_0_takes_the_store_with_it_and_the_others_say_so(self, mishaps: Any) -> None:
        for rank in (1, 2):
            message, took_s = mishaps("store stopped")[rank]
            assert took_s < TOLD_WITHIN_S
            assert "the store on rank 0, where ranks leave word, has not answered" in message

    def test_f1_a_rank_killed_in_mid_backward_is_named_by_the_others_at_once(self, ranks: GlooGroup) -> None:
        with pytest.raises(RankError) as raised:
            ranks.run(killed_in_backward, limit_s=60.0)
        zero, one, two = raised.value.errors
        assert one == "the process died"
        for text in (zero, two):
            assert text is not None
            message = text.strip().splitlines()[-1]
            assert "LinkError: rank" in message
            assert "for the gradient of step 2" in message
            assert "rank 1 was last heard of" in message
            assert "at step 2, in its backward pass" in message


@contextlib.contextmanager
def two_ranks(store: Any, *, on_rank_0: bool = False) -> Iterator[tuple[Presence, Presence]]:
    """Two ranks' presences in one process, whose beats are a hundredth of a second."""
    zero, one = (Presence(rank, 2, 0.1, board=Board(store, "words", on_rank_0=on_rank_0)) for rank in range(2))
    zero.activity = one.activity = lambda: Activity(doing="at step 3, in its forward pass")
    yield zero, one
    zero.leave()
    one.leave()
    assert not any(thread.name == "rex_ray-presence" for thread in threading.enumerate())


def test_a_wait_that_failed_says_what_the_other_rank_last_said() -> None:
    with two_ranks(dist.HashStore()) as (zero, one):
        zero.meet(TOLD_WITHIN_S)
        one.meet(TOLD_WITHIN_S)
        told = str(zero.lost("the end", 5.0, limit_s=5.0))
        assert told.startswith("rank 0 waited 5.0 s for the end (limit 5 s): rank 1 ")
        assert "at step 3, in its forward pass" in told
        one.leave(ArithmeticError("an odd number\nand more"))
        told = str(zero.lost("the end", 0.1, error=RuntimeError("Connection closed by peer")))
        assert told == (
            "rank 0 waited for the end, which broke after 0.1 s, saying 'Connection closed by peer': "
            "rank 1 left after ArithmeticError: an odd number"
        )
        assert "got no answer" in str(one.lost("the end", 0.1))  # nobody listens for a rank that has left


def test_a_rank_that_gave_up_is_remembered_as_one_that_waited() -> None:
    with two_ranks(dist.HashStore()) as (zero, one):
        error = one.lost("the end", 5.0, limit_s=5.0)
        one.leave(error)
        assert str(zero.lost("the end", 5.0, limit_s=5.0)).endswith(
            ": rank 1 waits as well; every rank is there, so they cannot reach one another"
        )


def test_a_rank_that_never_comes_is_named_by_those_that_meet() -> None:
    alone = Presence(0, 3, 0.1, board=Board(dist.HashStore(), "words", on_rank_0=False))
    with pytest.raises(LinkError, match=r"waited 0\.\d s for all ranks to open .*: ranks 1 and 2 were never heard of$"):
        alone.meet(0.1)
    alone.leave()


def test_a_store_that_is_gone_accuses_rank_0_at_once() -> None:
    class Breaking:
        """A store over whose connection one can dispose."""

        def __init__(self) -> None:
            self.inner: Any = dist.HashStore()

        def __getattr__(self, name: str) -> Any:
            if self.inner is None:
                raise dist.DistNetworkError("Connection reset by peer")
            return getattr(self.inner, name)

    store = Breaking()
    with two_ranks(store, on_rank_0=True) as (zero, one):
        zero.meet(TOLD_WITHIN_S)
        one.meet(TOLD_WITHIN_S)
        store.inner = None
        assert "the store on rank 0, where ranks leave word, has not answered" in str(one.lost("the end", 0.1))
        assert "the store" not in str(zero.lost("the end", 0.1))


def test_nobody_is_listened_to_while_nobody_waits() -> None:
    class Counting:
        on_rank_0 = False
        reads = writes = 0

        def write(self, rank: int, text: str) -> None:
            self.writes += 1

        def read(self, ranks: Any) -> dict[int, bytes]:
            self.reads += 1
            return {1: Word(beat=self.reads, doing="at step 3", for_s=0.0).encode().encode()}

    board: Any = Counting()
    presence = Presence(0, 2, limit_s=0.5, board=board)
    presence.activity = lambda: Activity(doing="at step 3, in its forward pass")
    time.sleep(0.3)
    assert board.writes >= 2
    assert board.reads == 0
    presence.on_long_wait = (told := []).append
    with presence.waiting("the end"):
        wait_for(lambda: told)
    presence.leave()
    assert "rank 0 has waited" in told[0]
    assert "rank 1 is alive and has been at step 3" in told[0]
    assert not any(thread.name == "rex_ray-presence" for thread in threading.enumerate())


def wait_for(what: Callable[[], Any], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)
