"""The control plane under random faults breaks no invariant; and each of them can be broken, by what it forbids."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from experiments.chaos.__main__ import command
from experiments.chaos.mishaps import FAULTS
from experiments.chaos.seeds import run_all, shrunk
from experiments.chaos.world import Outcome, run_seed
from rex_ray.control import controller, decisions, handlers
from rex_ray.control.assembly import StepAssembler
from rex_ray.control.outcome import Rules
from rex_ray.hosting.control_host import ControlHost
from rex_ray.hosting.listener import Listener
from rex_ray.worker.data.schedule import Schedule
from rex_ray.worker.group.asked_saves import AskedSaves
from rex_ray.worker.group.protocol import SwitchProtocol
from rex_ray.worker.link import SaveRequest


@pytest.fixture(autouse=True)
def quiet():
    logger = logging.getLogger("rex_ray")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(before)


def test_50_000_events_break_no_invariant():
    outcomes = run_all(range(10), 5000, frozenset(), num_processes=1)
    assert [outcome.broken for outcome in outcomes] == [None] * 10
    assert sum(outcome.num_events for outcome in outcomes) >= 50_000
    struck = {fault for outcome in outcomes for fault in outcome.struck}
    assert struck == set(FAULTS), "a fault that never strikes is none"
    assert min(outcome.num_restarts for outcome in outcomes) > 0
    assert min(outcome.num_groups for outcome in outcomes) > 1


def test_a_seed_repeats_to_the_last_event_in_whatever_process():
    here = run_all([3, 5], 1500, frozenset(), num_processes=1)
    assert run_all([3, 5], 1500, frozenset(), num_processes=2) == here


# --- each mutation is caught, by the invariant that it violates -------------------------------------------------------


def no_lead_check(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 forgets what loaders have drawn ahead, and nobody looks."""

    def hear(self: SwitchProtocol, message: Any, step: int) -> None:
        self._next_undrawn = lambda: 0
        true_hear(self, message, step)

    def say(self: SwitchProtocol, step: int, step_s: float | None) -> tuple[float, ...]:
        self._ahead = 0
        return true_say(self, step, step_s)

    true_hear, true_say = SwitchProtocol.hear, SwitchProtocol.say
    patch.setattr(SwitchProtocol, "hear", hear)
    patch.setattr(SwitchProtocol, "say", say)


def lead_too_small(patch: pytest.MonkeyPatch) -> None:
    """The same, with the look: a rank refuses before a row is seen twice."""

    def say(self: SwitchProtocol, step: int, step_s: float | None) -> tuple[float, ...]:
        self._ahead = 0
        return true_say(self, step, step_s)

    true_say = SwitchProtocol.say
    patch.setattr(SwitchProtocol, "say", say)


def switches_at_once(patch: pytest.MonkeyPatch) -> None:
    """A rank takes new shares when it hears of them, whenever that is."""

    def add(self: Schedule, effective_step: int, allocation: Any) -> None:
        true_add(self, effective_step - allocation.version % 2, allocation)

    true_add = Schedule.add
    patch.setattr(Schedule, "add", add)


def no_republication(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(controller, "Rules", partial(Rules, republish_after_us=10**15))


def no_withdrawal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(controller, "Rules", partial(Rules, withdraw_after_us=10**15))


def stale_generations_pass(patch: pytest.MonkeyPatch) -> None:
    """Records of groups that are gone are taken for the running one's, versions and all: either alone gives it away."""

    def take(self: StepAssembler, record: Any) -> None:
        if record.generation != self.generation and self._versions is not None:
            record = replace(record, generation=self.generation, allocation_version=self._versions[1])
        true_take(self, record)

    true_take = StepAssembler._take
    patch.setattr(StepAssembler, "_take", take)


def emits_before_writing(patch: pytest.MonkeyPatch) -> None:
    def carry_out(self: ControlHost, turn: Any) -> None:
        for told in turn.commands:
            self._emission.emit(told)
        self._append(turn.chunks)

    patch.setattr(ControlHost, "_carry_out", carry_out)


def losses_name_no_group(patch: pytest.MonkeyPatch) -> None:
    """A loss that is told late is taken for one of the next group: it is never heard again."""

    def lose(self: ControlHost, generation: str | None, ranks: dict[int, str]) -> None:
        true_lose(self, self.generation, ranks)

    true_lose = ControlHost.lose
    patch.setattr(ControlHost, "lose", lose)


def proposals_pass_for_facts(patch: pytest.MonkeyPatch) -> None:
    """The policy's memory takes for applied what was only published."""

    def publish(state: Any, phase: Any, proposal: Any, **rest: Any) -> Any:
        outcome = true_publish(state, phase, proposal, **rest)
        if not isinstance(state.policy_state, tuple):
            return outcome
        believed = (proposal.local_batch_sizes, *state.policy_state[1:])
        return replace(outcome, state=replace(outcome.state, policy_state=believed))

    true_publish = decisions.publish
    patch.setattr(decisions, "publish", publish)
    patch.setattr(handlers, "publish", publish)


def an_odd_batch_is_fatal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("rex_ray.hosting.intake.checked", lambda batch: batch)


def a_rank_hears_of_no_save(patch: pytest.MonkeyPatch) -> None:
    """Every other word about a save is lost on whoever hears it."""

    def hear(self: AskedSaves, told: float) -> None:
        heard[0] += told != 0.0
        true_hear(self, 0.0 if heard[0] % 3 == 2 else told)

    heard, true_hear = [0], AskedSaves.hear
    patch.setattr(AskedSaves, "hear", hear)


def requests_for_saves_are_not_listened_to(patch: pytest.MonkeyPatch) -> None:
    true_hear = Listener.hear
    patch.setattr(Listener, "hear", lambda self, news: None if isinstance(news, SaveRequest) else true_hear(self, news))


MUTATIONS: dict[Callable[[pytest.MonkeyPatch], None], set[str]] = {
    no_lead_check: {"one step, one plan", "rows exactly once"},
    lead_too_small: {"no crash"},
    switches_at_once: {"one step, one plan", "rows exactly once", "no crash"},
    no_republication: {"published again"},
    no_withdrawal: {"withdrawn in time"},
    stale_generations_pass: {"no stale evidence"},
    emits_before_writing: {"journal before emit", "versions rise", "versions keep their meaning"},
    losses_name_no_group: {"never wedged"},
    proposals_pass_for_facts: {"a decision is a proposal"},
    an_odd_batch_is_fatal: {"no crash", "no fault of its own"},
    a_rank_hears_of_no_save: {"one save, all ranks"},
    requests_for_saves_are_not_listened_to: {"asked for and saved"},
}


def first_broken(num_seeds: int, num_events: int = 4000) -> Outcome:
    for seed in (3, *range(num_seeds)):  # most mutations are found by it
        outcome = run_seed(seed, num_events)
        if outcome.broken is not None:
            return outcome
    raise AssertionError(f"{num_seeds} seeds did not notice")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_every_mutation_breaks_the_invariant_that_forbids_it(mutation, monkeypatch):
    mutation(monkeypatch)
    broken = first_broken(12).broken
    assert broken is not None
    assert broken.partition(": ")[0] in MUTATIONS[mutation], broken


def test_a_broken_seed_is_shrunk_to_the_faults_that_it_needs(monkeypatch):
    stale_generations_pass(monkeypatch)
    outcome = next(outcome for seed in range(1, 12) if (outcome := run_seed(seed, 1000)).broken is not None)
    least, without = shrunk(outcome, 1000, frozenset())
    assert least.broken is not None
    kept = set(FAULTS) - without
    assert kept & {"group lost", "group resized"}, "no other fault leaves a group that is gone"
    assert len(kept) < len(FAULTS) / 2
    assert least.trace


def test_the_command_counts_events_seeds_and_what_broke(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    command(["--events", "600", "--seeds", "2", "--seed", "7", "--json", str(tmp_path / "chaos.json")])
    figures = json.loads((tmp_path / "chaos.json").read_text())["figures"]
    assert figures["events"] >= 600
    assert (figures["seeds"], figures["invariants_broken"]) == (2, 0)

    proposals_pass_for_facts(monkeypatch)
    command(["--events", "300", "--seeds", "1", "--seed", "0", "--json", str(tmp_path / "broken.json")])
    assert json.loads((tmp_path / "broken.json").read_text())["figures"]["invariants_broken"] == 1
    told = capsys.readouterr().err
    assert "again: python -m experiments.chaos --events 300 --seeds 1 --seed 0 --json FILE\n" in told
    assert "no other faults than none" in told
    assert "--without 'actor killed" in told
