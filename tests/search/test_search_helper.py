"""The helper process from its asker's end: dialogue, death, limits, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from search_worlds import mixed, tiled_s, tiny, wait_for

from rex_ray.core.search_problem import SearchProblem, objective_of
from rex_ray.search.helper import HelperLimits, SearchHelper
from rex_ray.search.protocol import Failed, Finished, Reply, TrialAsked


@pytest.fixture
def helper() -> Iterator[SearchHelper]:
    made = SearchHelper(HelperLimits(cpu_s=60.0))
    yield made
    pid = made.pid
    made.close()
    assert pid is None or not Path(f"/proc/{pid}").exists()


@pytest.fixture
def broken_ax(tmp_path: Path) -> dict[str, str]:
    """An environment in which importing Ax fails."""
    (tmp_path / "ax").mkdir()
    (tmp_path / "ax" / "__init__.py").write_text("raise ImportError('no Ax on this machine')")
    return {"PYTHONPATH": str(tmp_path)}


def is_over(said: list[Reply]) -> bool:
    return any(isinstance(reply, Finished | Failed) for reply in said)


def dialogue(helper: SearchHelper, problem: SearchProblem, seed: int = 0) -> list[Reply]:
    """Have a whole measured search on devices with tiles."""
    helper.start("measured", seed, problem)
    said: list[Reply] = []
    while not is_over(said):
        said += wait_for(helper, bool)
        if isinstance(said[-1], TrialAsked):
            own_s = tiled_s(problem, said[-1].local_batch_sizes)
            helper.tell("measured", said[-1].trial, objective_of(own_s), tuple(own_s))
    return said


def reaped(helper: SearchHelper, pid: int | None) -> None:
    """See to it that a process that was let go leaves no zombie either, while its asker goes on."""
    deadline_s = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline_s, f"process {pid} is still there"
        helper.poll()
        time.sleep(0.01)


def test_nothing_is_started_before_it_is_needed() -> None:
    helper = SearchHelper()
    assert helper.poll() == []
    assert helper.pid is None
    helper.close()


def test_a_tiny_space_is_searched_without_ax(helper: SearchHelper) -> None:
    helper.start("tiny", 0, tiny())
    (reply,) = wait_for(helper, is_over)
    assert isinstance(reply, Finished)
    assert sum(reply.local_batch_sizes) == tiny().global_batch_size


def test_a_measured_search_is_a_dialogue_that_may_refuse(helper: SearchHelper) -> None:
    problem = tiny("measured")
    helper.start("a", 0, problem)
    asked = []
    while not is_over(said := wait_for(helper, bool)):
        (trial,) = said
        assert isinstance(trial, TrialAsked)
        asked.append(trial.local_batch_sizes)
        refuses = trial.local_batch_sizes == problem.plan
        helper.tell("a", trial.trial, float("inf") if refuses else -float(trial.trial))
    (finished,) = said
    assert isinstance(finished, Finished)
    assert asked[0] == problem.plan
    assert finished.local_batch_sizes == asked[-1]
    assert finished.objective == 1.0 - len(asked)
    assert finished.num_trials == len(asked) == len(set(asked))


def test_d7_of_a_search_that_was_called_off_nothing_is_heard_any_more(helper: SearchHelper) -> None:
    helper.start("a", 0, tiny("measured"))
    wait_for(helper, bool)
    helper.tell("a", 0, 0.0)  # its answer is on the way when the group changes
    helper.cancel("a")
    helper.tell("a", 1, 0.0)
    helper.start("b", 0, tiny())
    said = wait_for(helper, is_over)
    assert [reply.search_id for reply in said] == ["b"]


def test_a_new_search_of_the_same_name_gets_no_old_answers(helper: SearchHelper) -> None:
    for _ in range(3):
        helper.start("a", 0, tiny("measured"))
    said = wait_for(helper, bool)
    time.sleep(0.2)
    assert said + helper.poll() == [TrialAsked(search_id="a", trial=0, local_batch_sizes=tiny().plan)]


def test_a_killed_helper_fails_its_searches_and_the_next_one_is_started_after_a_pause() -> None:
    now = [0.0]
    helper = SearchHelper(HelperLimits(pause_s=5.0, max_deaths=3, answer_s=1e9, tell_s=1e9), clock=lambda: now[0])
    for death in range(3):
        helper.start("a", 0, tiny("measured"))
        wait_for(helper, bool)
        pid = helper.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        (failed,) = wait_for(helper, bool)
        assert isinstance(failed, Failed)
        assert "exit status -9" in failed.reason
        now[0] += 5.0 * 2**death - 0.1
        helper.start("b", 0, tiny())
        (failed,) = helper.poll()
        assert isinstance(failed, Failed)
        assert helper.pid is None, "not yet"
        now[0] += 0.2
    helper.start("c", 0, tiny())
    (failed,) = helper.poll()
    assert isinstance(failed, Failed)
    assert "3 times in a row" in failed.reason
    helper.close()


def test_an_idle_helper_is_ended_and_the_next_search_has_another() -> None:
    now = [0.0]
    helper = SearchHelper(HelperLimits(idle_s=60.0, answer_s=1e9, tell_s=1e9, max_deaths=1), clock=lambda: now[0])
    helper.start("a", 0, tiny("measured"))
    wait_for(helper, bool)
    pid = helper.pid
    now[0] += 1000.0
    assert helper.poll() == []
    assert helper.pid == pid, "a search waits to be told"
    helper.cancel("a")
    now[0] += 59.0
    helper.poll()
    assert helper.pid == pid
    now[0] += 2.0
    assert helper.poll() == []
    assert helper.pid is None
    reaped(helper, pid)
    helper.start("b", 0, tiny())
    assert isinstance(wait_for(helper, is_over)[-1], Finished), "an end that was wanted is no death"
    helper.close()


def test_a_helper_sees_no_device_and_computes_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    helper = SearchHelper()
    helper.start("a", 0, tiny())
    wait_for(helper, is_over)
    seen = Path(f"/proc/{helper.pid}/environ").read_bytes().split(b"\0")
    helper.close()
    assert {b"CUDA_VISIBLE_DEVICES=", b"OMP_NUM_THREADS=1"} <= set(seen)


def test_a_helper_steps_aside_within_its_session_and_as_a_session(helper: SearchHelper) -> None:
    """Linux shares the processor evenly among sessions, however nice their processes are (autogroup)."""
    helper.start("first", 0, tiny())
    wait_for(helper, is_over)
    assert helper.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, helper.pid) > os.getpriority(os.PRIO_PROCESS, 0)
    group = Path(f"/proc/{helper.pid}/autogroup")
    if group.exists():
        assert group.read_text().split()[-1] == str(os.getpriority(os.PRIO_PROCESS, helper.pid))


def test_success_forgives_deaths() -> None:
    now = [0.0]
    helper = SearchHelper(HelperLimits(pause_s=5.0, max_deaths=2, answer_s=1e9), clock=lambda: now[0])
    for _ in range(3):
        helper.start("a", 0, tiny())
        assert isinstance(wait_for(helper, is_over)[-1], Finished)
        pid = helper.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while helper.pid == pid:  # a busy machine takes its time to bury it
            helper.poll()
            time.sleep(0.01)
        now[0] += 10.0
    helper.close()


def test_a_helper_that_gives_no_answer_is_ended() -> None:
    helper = SearchHelper(HelperLimits(answer_s=0.3))
    helper.start("a", 0, tiny())
    pid = helper.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    for k in range(200):  # more than a pipe holds, to somebody who does not read
        helper.start(f"b{k}", 0, mixed(16, kind="measured"))
    said = wait_for(helper, is_over)
    assert {reply.search_id for reply in said} == {"a", *(f"b{k}" for k in range(200))}
    assert all(isinstance(reply, Failed) and "no answer within 0.3 s" in reply.reason for reply in said)
    reaped(helper, pid)
    helper.close()


def test_a_trial_that_nobody_measures_ends_its_search_and_not_the_helper() -> None:
    helper = SearchHelper(HelperLimits(tell_s=0.2))
    helper.start("a", 0, tiny("measured"))
    said = wait_for(helper, is_over)
    assert [type(reply) for reply in said] == [TrialAsked, Failed]
    helper.start("b", 0, tiny())
    assert isinstance(wait_for(helper, is_over)[-1], Finished)
    helper.close()


def test_closing_ends_the_process_also_in_the_middle_of_something() -> None:
    helper = SearchHelper()
    helper.start("a", 0, tiny("measured"))
    pid = helper.pid
    helper.close()
    assert pid is not None
    assert not Path(f"/proc/{pid}").exists()
    assert helper.poll() == []
    helper.start("b", 0, tiny())
    (failed,) = helper.poll()
    assert failed == Failed(search_id="b", reason="the search helper is closed")
    helper.close()


def test_who_is_let_go_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The asker drives a controller: only ``close`` may wait, and then nothing is left."""
    now = [0.0]
    helper = SearchHelper(HelperLimits(answer_s=5.0, idle_s=60.0), clock=lambda: now[0])
    pids = []
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", lambda *_, **__: pytest.fail("waited"))
        helper.start("a", 0, tiny("measured"))
        pids.append(helper.pid)
        now[0] += 6.0
        assert [type(reply) for reply in helper.poll()] in ([Failed], [TrialAsked])
        now[0] += 1000.0
        helper.poll()
        helper.start("b", 0, tiny())
        pids.append(helper.pid)
    helper.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


ASKER = """
import os, sys, time
sys.path.insert(0, {folder!r})
from search_worlds import mixed
from rex_ray.search.helper import SearchHelper

helper = SearchHelper()
helper.start("a", 0, mixed(16))
print(helper.pid, flush=True)
time.sleep(60)
"""


def test_a_helper_does_not_outlive_its_asker() -> None:
    program = textwrap.dedent(ASKER).format(folder=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as asker:
        assert asker.stdout is not None
        pid = int(asker.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        asker.kill()
    deadline = time.monotonic() + 20
    while _is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


@pytest.mark.parametrize("said", [b"", b'{"op":"start","search":0,"pro', b"[]\n", b"{}\n"])
def test_a_helper_is_gone_whatever_its_asker_said_last(said: bytes) -> None:
    """An asker that is killed may leave half a line behind. Within a session, it asks nothing of that session."""
    group = Path("/proc/self/autogroup")
    before = group.read_text() if group.exists() else ""
    with subprocess.Popen(
        [sys.executable, "-m", "rex_ray.search.helper_main"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            process.communicate(said, timeout=20)
        finally:
            process.kill()
    assert process.returncode in (0, 1)
    assert before == (group.read_text() if group.exists() else "")


def _is_running(pid: int) -> bool:
    """A zombie, whose new parent has yet to look, is gone as far as anybody is concerned."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_d7_without_ax_a_search_that_needs_it_fails_with_the_remedy(broken_ax: dict[str, str]) -> None:
    helper = SearchHelper(env=broken_ax)
    helper.warm_up()
    helper.start("a", 0, mixed(8))
    (failed,) = wait_for(helper, is_over)
    assert isinstance(failed, Failed)
    assert "no Ax on this machine" in failed.reason
    assert "ax-platform" in failed.reason
    helper.start("b", 0, tiny())
    assert isinstance(wait_for(helper, is_over)[-1], Finished), "what needs no Ax goes on without"
    helper.close()


def test_a_process_that_cannot_begin_says_why(tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise ImportError('numpy was built for another machine')")
    helper = SearchHelper(env={"PYTHONPATH": str(tmp_path)})
    helper.start("a", 0, tiny())
    (failed,) = wait_for(helper, is_over)
    assert isinstance(failed, Failed)
    assert "numpy was built for another machine" in failed.reason
    helper.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ax_answers_alike_for_a_seed_whatever_was_searched_before(helper: SearchHelper) -> None:
    problem = mixed(8)
    answers = []
    for k, seed in enumerate((3, 4, 3)):
        helper.start(f"s{k}", seed, problem)
        (reply,) = wait_for(helper, is_over)
        assert isinstance(reply, Finished), reply
        answers.append((reply.local_batch_sizes, reply.objective, reply.num_trials))
    assert answers[0] == answers[2]
    tiled = [dialogue(helper, mixed(8, 96, "measured", 8), seed=5) for _ in range(2)]
    assert tiled[0][:-1] == tiled[1][:-1], "the same trials in the same order"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ax_searches_measured_tiles_and_beats_the_exact_split(helper: SearchHelper) -> None:
    problem = mixed(8, 96, "measured", 10)
    said = dialogue(helper, problem)
    finished = said[-1]
    assert isinstance(finished, Finished), finished
    assert finished.num_trials <= 10
    ratio = tiled_s(problem, finished.local_batch_sizes).max() / tiled_s(problem, problem.plan).max()
    assert ratio < 0.9


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ax_lives_with_trials_that_are_refused(helper: SearchHelper) -> None:
    problem = mixed(8, kind="measured", max_trials=10)
    helper.start("a", 0, problem)
    said: list[Reply] = []
    while not is_over(said):
        said += wait_for(helper, bool)
        if isinstance(trial := said[-1], TrialAsked):
            refuses = trial.trial % 2 == 1
            helper.tell("a", trial.trial, float("inf") if refuses else -0.1 * trial.trial)
    assert isinstance(said[-1], Finished), said[-1]
    assert said[-1].num_trials > 5
