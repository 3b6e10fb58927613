"""Searches beside a run, without Ray: the host asks, hears, and goes on whatever becomes of the helper."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from batches import first_allocation, records, started

from rex_ray import RexConfig
from rex_ray.control.events import GroupStarted, SearchFailed, SearchFinished
from rex_ray.control.reading import Journal, read_journal
from rex_ray.control.replay import replay
from rex_ray.core.search_problem import SearchProblem
from rex_ray.core.types import Allocation
from rex_ray.hosting.control_host import ControlHost
from rex_ray.hosting.emission import Searching
from rex_ray.hosting.journal_files import JournalFolder, read_files
from rex_ray.hosting.wire import encode
from rex_ray.search.helper import HelperLimits, SearchHelper
from rex_ray.search.protocol import Finished, Reply, TrialAsked

CONFIG = RexConfig(global_batch_size=32, policy_options={"growth": "off", "trigger": "off"})


class Scripted:
    """A helper that says what a test has it say."""

    def __init__(self) -> None:
        self.started: list[tuple[str, SearchProblem]] = []
        self.told: list[tuple[str, int, float]] = []
        self.cancelled: list[str] = []
        self.says: list[Reply] = []
        self.num_closed = 0

    def start(self, search_id: str, seed: int, problem: SearchProblem) -> None:
        self.started.append((search_id, problem))

    def tell(self, search_id: str, trial: int, objective: float, own_s: Sequence[float] = ()) -> None:
        self.told.append((search_id, trial, objective))

    def cancel(self, search_id: str) -> None:
        self.cancelled.append(search_id)

    def poll(self) -> list[Reply]:
        says, self.says = self.says, []
        return says

    def close(self) -> None:
        self.num_closed += 1


class Run:
    """A host, and a group of two that follows what it publishes."""

    def __init__(self, journal_dir: Path, make_helper: Callable[[], Searching]) -> None:
        journal_dir.mkdir(exist_ok=True)
        self.journal_dir = journal_dir
        self.allocation = first_allocation()
        self.host = ControlHost(CONFIG, JournalFolder(journal_dir), self._news, make_helper)
        self.step = 0

    def _news(self, allocation: Allocation) -> None:
        self.allocation = allocation

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            allocation = self.allocation
            for rank in (0, 1):
                self.host.take(encode(rank, records(rank, [self.step], allocation)))
            self.step += 1
            self.host.hear_searches()

    def train_until(self, is_it: Callable[[], bool], num_steps: int = 400) -> None:
        for _ in range(num_steps):
            if is_it():
                return
            self.train(1)
        raise AssertionError(f"not within {num_steps} steps")

    def journal(self) -> Journal:
        return read_journal(read_files(self.journal_dir))

    def searches(self) -> tuple[str, ...]:
        return self.host._controller.controller.state.searches

    def reasons(self) -> list[str]:
        return [event.reason for event in self.journal().events if isinstance(event, SearchFailed)]


@pytest.fixture
def run(tmp_path: Path) -> tuple[Run, Scripted]:
    helper = Scripted()
    begun = Run(tmp_path / "journal", lambda: helper)
    begun.host.handle(started())
    begun.train_until(lambda: bool(helper.started))
    return begun, helper


def test_a_finished_search_is_an_event_and_the_journal_replays(run: tuple[Run, Scripted]) -> None:
    begun, helper = run
    search_id, problem = helper.started[0]
    helper.says = [
        Finished(search_id=search_id, local_batch_sizes=problem.plan, objective=-3.0, num_trials=3, cpu_s=0.1)
    ]
    begun.train(1)
    assert begun.searches() == ()
    begun.train(5)
    begun.host.end("finished")
    journal = begun.journal()
    assert any(isinstance(event, SearchFinished) for event in journal.events)
    assert replay(journal).is_identical
    assert helper.num_closed == 1


def test_a_trial_is_the_policys_to_run_and_it_is_told_of_one_way_or_the_other(run: tuple[Run, Scripted]) -> None:
    begun, helper = run
    search_id, _ = helper.started[0]
    helper.says = [TrialAsked(search_id=search_id, trial=0, local_batch_sizes=(12, 20))]
    begun.train_until(lambda: bool(helper.told))
    assert helper.told[0][:2] == (search_id, 0)


def test_a_lost_control_actors_searches_are_failed(run: tuple[Run, Scripted]) -> None:
    begun, _ = run
    assert begun.searches()
    again = Run(begun.journal_dir, Scripted)
    assert again.searches() == ()
    assert again.host.fault is None
    again.host.end("finished")
    journal = again.journal()
    assert [e.reason for e in journal.events if isinstance(e, SearchFailed)] == [
        "the helper was lost with the control actor"
    ]
    assert replay(journal).is_identical


def test_d7_another_group_calls_the_search_off(run: tuple[Run, Scripted]) -> None:
    begun, helper = run
    search_id, _ = helper.started[0]
    other = started()
    begun.host.handle(GroupStarted(generation="h", problem=other.problem, step=begun.step))
    assert helper.cancelled == [search_id]
    assert begun.searches() == ()


def test_a_failing_controller_leaves_no_helper(run: tuple[Run, Scripted]) -> None:
    begun, helper = run
    begun.host.fail(RuntimeError("no reason"))
    begun.host.hear_searches()
    assert helper.num_closed == 1


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL], ids=["silent", "killed"])
def test_d6_training_goes_on_beside_a_helper_that_gives_no_answer(tmp_path: Path, blow: signal.Signals) -> None:
    helpers: list[SearchHelper] = []

    def make() -> SearchHelper:
        helpers.append(SearchHelper(HelperLimits(answer_s=0.5, pause_s=60.0)))
        return helpers[-1]

    begun = Run(tmp_path / "journal", make)
    begun.host.handle(started())
    begun.train_until(lambda: bool(helpers))
    pid = helpers[0].pid
    assert pid is not None
    os.kill(pid, blow)
    step = begun.step
    deadline = time.monotonic() + 30
    while begun.searches():
        assert time.monotonic() < deadline
        begun.train(1)
        time.sleep(0.01)
    assert begun.step > step, "steps were taken while nobody answered"
    assert begun.host.fault is None
    begun.train(5)
    begun.host.end("finished")
    assert not Path(f"/proc/{pid}").exists()
    journal = begun.journal()
    (reason, *_) = begun.reasons()
    assert ("no answer within 0.5 s" if blow == signal.SIGSTOP else "exit status -9") in reason
    assert replay(journal).is_identical


WITHOUT_AX = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ax", "botorch", "gpytorch"}:
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Absent())
"""


def test_d7_a_journal_with_searches_replays_where_ax_is_not_installed(run: tuple[Run, Scripted]) -> None:
    begun, helper = run
    search_id, problem = helper.started[0]
    helper.says = [
        Finished(search_id=search_id, local_batch_sizes=problem.plan, objective=-3.0, num_trials=3, cpu_s=0.1)
    ]
    begun.train(20)
    begun.host.end("finished")
    run_cli = WITHOUT_AX + (
        "from rex_ray.cli import main\n"
        f"sys.argv = ['rex-ray', 'replay', {str(begun.journal_dir)!r}, '--check']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", run_cli], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
