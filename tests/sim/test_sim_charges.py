"""What control costs beside the steps: each method pays for what it does, and no step's times know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from rex_ray.control.commands import CancelSearch, StartSearch, TellTrial
from rex_ray.control.controller import Controller
from rex_ray.control.events import Event, SearchFailed
from rex_ray.core.errors import ConfigError
from rex_ray.policies.registry import make_policy
from rex_ray.scenario import load_learning
from rex_ray.sim import FREE, Charges, SimulatedRun, TraceLearner, charges_of, mixed_cluster, simulate
from rex_ray.sim.gradients import NoisyGradients

SCENARIO = mixed_cluster(("T4", "T4", "V100", "V100"), "resnet50", global_batch_size=256)


class Thinker:
    """A helper that works for 20 steps on every search and finds nothing."""

    latency_steps = 20

    def __init__(self) -> None:
        self.num_searches = 0

    def carry_out(self, command: StartSearch | TellTrial | CancelSearch) -> Sequence[Event]:
        if not isinstance(command, StartSearch):
            return []
        self.num_searches += 1
        return [SearchFailed(search_id=command.search_id, reason="nothing found")]


def play(policy: str, charges: Charges, searcher: Thinker | None = None) -> SimulatedRun:
    controller = Controller(make_policy(policy))
    return simulate(controller, replace(SCENARIO, charges=charges), num_steps=200, searcher=searcher)


def test_nothing_is_charged_by_default():
    run = play("rex", FREE)
    assert run.charged_s == 0.0
    assert run.total_s == pytest.approx(run.step_s.sum())


def test_a_method_that_never_switches_nor_searches_pays_neither():
    run = play("bsp", Charges(search_factor=3.0, switch_s=100.0, switch_steps=9.0), Thinker())
    assert run.charged_s == 0.0


def test_every_switch_is_charged_once_at_its_first_step_and_the_first_allocation_is_none():
    run = play("rex", Charges(switch_s=2.0, switch_steps=8.0))
    first_steps = [step for step, _ in run.allocations[1:]]
    assert len(first_steps) >= 2
    expected = np.zeros(200)
    expected[first_steps] = 2.0 + 8.0 * run.step_s[first_steps]
    assert run.step_charges_s == pytest.approx(expected)
    assert run.total_s == pytest.approx(run.step_s.sum() + run.charged_s)


def test_another_learning_rate_is_no_switch():
    """Only shares are shapes: a rate that follows the noise scale has no kernel tuned anew."""
    learning = load_learning("resnet50")
    world = mixed_cluster(("T4", "T4", "V100", "V100"), "resnet50", global_batch_size=256, steps_per_epoch=400)
    learner = TraceLearner(learning=learning, reference_batch_size=256, gradients=NoisyGradients(seed=1))
    run = simulate(
        Controller(make_policy("rex")),
        replace(world, charges=Charges(switch_s=1.0)),
        num_steps=1500,
        learner=learner,
    )
    moves = [(old, new) for (_, old), (_, new) in pairwise(run.allocations)]
    reshaped = [old.local_batch_sizes != new.local_batch_sizes for old, new in moves]
    assert not all(reshaped), "a run without a change of the rate alone shows nothing"
    assert run.charged_s == pytest.approx(sum(reshaped))


def test_the_helper_is_charged_for_while_it_works():
    thinker = Thinker()
    run = play("rex", Charges(search_factor=1.08), thinker)
    working = run.step_charges_s > 0
    assert thinker.num_searches >= 1
    assert 0 < working.sum() <= thinker.latency_steps * thinker.num_searches
    assert run.step_charges_s[working] == pytest.approx(0.08 * run.step_s[working])


def test_measuring_is_charged_at_every_step_and_seen_by_none():
    charged, free = play("rex", Charges(measuring_factor=1.5)), play("rex", FREE)
    assert charged.charged_s == pytest.approx(0.5 * charged.step_s.sum())
    assert charged.step_s.tolist() == free.step_s.tolist()
    assert [step.step_us.tolist() for step in charged.steps] == [step.step_us.tolist() for step in free.steps]


def test_charges_have_names_and_senseless_ones_are_refused():
    assert charges_of("none") == FREE
    assert charges_of("autotuned").switch_steps > charges_of("measured").switch_steps
    with pytest.raises(ConfigError, match="one of none, measured, host, autotuned, got 'free'"):
        charges_of("free")
    with pytest.raises(ConfigError, match="at least 1"):
        Charges(measuring_factor=0.9)
    with pytest.raises(ConfigError, match="at least 0"):
        Charges(switch_s=-1.0)


def test_what_measuring_takes_of_the_host_is_the_same_for_every_step():
    run = play("dlb", Charges(measuring_s=0.5))
    assert run.step_charges_s == pytest.approx(np.full(200, 0.5))
    with pytest.raises(ConfigError, match="measuring_s"):
        Charges(measuring_s=-0.1)
