"""The regret ledger: its parts add up to the loss, and each second is put down to what caused it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rex_ray.control.controller import Controller
from rex_ray.core.observations import StepObserved
from rex_ray.core.types import Problem
from rex_ray.policies.base import ChangeGlobalBatch, Decision, Keep, Proposal, Reallocate
from rex_ray.policies.limits import equal_shares
from rex_ray.policies.registry import make_policy
from rex_ray.scenario import Episode, NoiseModel, load_learning, load_profile, optimal_split, random_episodes
from rex_ray.sim import Charges, Scenario, SimulatedRun, TraceLearner, mixed_cluster, oracle_run, simulate
from rex_ray.sim.gradients import NoisyGradients
from rex_ray.sim.regret import Ledger, ledger

MIXED = ("T4", "T4", "V100", "V100")
PROFILES = [load_profile(device, "resnet50") for device in MIXED]
RIGHT = optimal_split(PROFILES, 256).local_batch_sizes
SLOWED = optimal_split(PROFILES, 256, [2.0, 1.0, 1.0, 1.0]).local_batch_sizes
EPISODE = Episode(rank=0, start_step=50, num_steps=None, factor=2.0)
CURVE = load_learning("resnet18")
SHORT = replace(CURVE, progress_rows=CURVE.progress_rows / 100)


@dataclass(frozen=True)
class Scripted:
    """Begins with ``first`` and publishes shares, with a learning-rate factor, after the steps that are named."""

    first: tuple[int, ...]
    asked: dict[int, tuple[tuple[int, ...], float]] = field(default_factory=dict)
    search_id: str | None = None
    name: str = "scripted"

    def init(self, problem, prior=None, current=None):
        return Proposal(local_batch_sizes=self.first), None

    def decide(self, state, observation, rng) -> tuple[Decision, None]:
        if not isinstance(observation, StepObserved) or observation.step not in self.asked:
            return Keep(reason="not now"), None
        shares, factor = self.asked[observation.step]
        proposal = Proposal(local_batch_sizes=shares, lr_factor=factor)
        if sum(shares) != sum(self.first) or factor != 1.0:
            return ChangeGlobalBatch(proposal=proposal, reason="as written"), None
        gain = None if self.search_id else 0.1
        return Reallocate(proposal=proposal, reason="as written", predicted_gain=gain, search_id=self.search_id), None


def world(*episodes, lag: int = 10, noise: NoiseModel | None = None) -> Scenario:
    scenario = mixed_cluster(
        MIXED, "resnet50", global_batch_size=256, noise=noise or NoiseModel.quiet(), episodes=episodes
    )
    return replace(scenario, switch_lag_steps=lag)


def play(scenario: Scenario, first, asked=None, num_steps: int = 200, **options) -> SimulatedRun:
    moves = {step: (shares, 1.0) for step, shares in (asked or {}).items()}
    return simulate(Controller(Scripted(first, moves, **options)), scenario, num_steps=num_steps)


def judged(scenario: Scenario, run: SimulatedRun, oracle_s: float = 0.0) -> Ledger:
    return ledger(run, scenario, oracle_s=oracle_s)


def step_s(shares, slowed: float = 1.0) -> float:
    factors = (slowed, 1.0, 1.0, 1.0)
    return max(f * float(p.own_time_s(rows)) for p, rows, f in zip(PROFILES, shares, factors, strict=True))


def near(seconds: float):
    return pytest.approx(seconds, rel=1e-9, abs=1e-9)


def trained(policy: str, per_1000: float, seed: int, **options) -> tuple[Ledger, float]:
    """A short training with a loss that is known: the ledger, and total minus oracle."""
    episodes = random_episodes(num_workers=4, num_steps=2000, per_1000_worker_steps=per_1000, seed=seed)
    base = mixed_cluster(MIXED, "resnet18", global_batch_size=256, episodes=episodes, seed=seed)
    problem = replace(base.problem, dataset_size=CURVE.dataset_size, max_global_batch_size=2048)
    scenario = replace(base, problem=problem)
    learner = TraceLearner(learning=SHORT, reference_batch_size=256, gradients=NoisyGradients(seed=seed))
    run = simulate(Controller(make_policy(policy, options)), scenario, num_steps=2000, learner=learner)
    assert learner.is_done
    oracle_s = oracle_run(scenario.timelines, scenario.network, SHORT, 256).total_s
    return ledger(run, scenario, oracle_s=oracle_s, learning=SHORT), run.total_s - oracle_s


@settings(max_examples=8)
@given(st.sampled_from(["bsp", "dlb", "rex"]), st.sampled_from([0.0, 5.0]), st.integers(0, 3))
def test_parts_add_up_to_the_loss(policy, per_1000, seed):
    parts, lost_s = trained(policy, per_1000, seed)
    assert sum(parts.parts().values()) == pytest.approx(lost_s, rel=1e-9)
    assert parts.total_s == sum(parts.parts().values())


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(-20, 20)), max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 150), st.integers(1, 60)), max_size=3),
    st.integers(1, 15),
)
def test_shares_explain_all_that_steps_take_beyond_the_exact_split(moves, slow, lag):
    """Whatever is asked for and whoever slows down: the parts of the shares are the steps minus the exact ones."""
    scenario = world(
        *(Episode(rank=rank, start_step=start, num_steps=length, factor=1.7) for rank, start, length in slow),
        lag=lag,
        noise=NoiseModel.shared(),
    )
    asked = {step: (RIGHT[0] + moved, RIGHT[1] - moved, *RIGHT[2:]) for step, moved in moves}
    run = play(scenario, (64,) * 4, asked, num_steps=160)
    parts = judged(scenario, run)
    exact = [
        max(
            line.own_time_s(step, rows)
            for line, rows in zip(
                scenario.timelines,
                optimal_split(PROFILES, 256, [line.slowdown(step) for line in scenario.timelines]).local_batch_sizes,
                strict=True,
            )
        )
        for step in range(160)
    ]
    shares_s = parts.sensing_s + parts.lag_s + parts.spline_s + parts.exploration_s + parts.unsplit_s
    assert shares_s == near(run.total_s - sum(exact))
    assert parts.growth_s == near(sum(exact))


def test_who_runs_the_exact_split_of_every_moment_loses_nothing():
    scenario = world(noise=NoiseModel.dedicated())
    run = play(scenario, RIGHT)
    assert all(part == near(0.0) for part in judged(scenario, run, run.total_s).parts().values())


def test_an_episode_is_missed_until_shares_are_published_and_waited_for_until_they_run():
    scenario = world(EPISODE)
    run = play(scenario, RIGHT, {59: SLOWED})
    late_s = step_s(RIGHT, 2.0) - step_s(SLOWED, 2.0)
    parts = judged(scenario, run)
    assert parts.sensing_s == near(10 * late_s)
    # Published after step 59, the shares run from step 69 on.
    assert parts.lag_s == near(9 * late_s)
    assert parts.spline_s == parts.exploration_s == near(0.0)


def test_the_end_of_an_episode_is_missed_just_so():
    scenario = world(replace(EPISODE, num_steps=50))
    run = play(scenario, RIGHT, {50: SLOWED, 119: RIGHT}, num_steps=200)
    late_s, back_s = step_s(RIGHT, 2.0) - step_s(SLOWED, 2.0), step_s(SLOWED) - step_s(RIGHT)
    parts = judged(scenario, run)
    assert parts.sensing_s == near(late_s + 20 * back_s)
    assert parts.lag_s == near(9 * (late_s + back_s))


@pytest.mark.parametrize("lag", [2, 6, 11])
def test_twice_the_lag_costs_twice_as_much(lag):
    once, twice = (world(EPISODE, lag=1 + steps) for steps in (lag, 2 * lag))
    parts = [judged(scenario, play(scenario, RIGHT, {59: SLOWED})) for scenario in (once, twice)]
    assert parts[1].lag_s == near(2 * parts[0].lag_s)
    assert parts[1].sensing_s == near(parts[0].sensing_s)


def test_equal_shares_for_ever_are_neither_exploration_nor_an_error():
    scenario = world()
    run = play(scenario, (64,) * 4)
    parts = judged(scenario, run)
    assert parts.unsplit_s == near(200 * (step_s((64,) * 4) - step_s(RIGHT)))
    assert parts.parts()["unsplit"] == parts.unsplit_s
    assert parts.sensing_s == parts.lag_s == parts.spline_s == parts.exploration_s == near(0.0)


def test_batches_that_grow_in_equal_shares_are_unsplit_and_their_switches_are_lag():
    scenario = world(lag=5)
    scenario = replace(scenario, problem=replace(scenario.problem, dataset_size=256 * 1000))
    parts = judged(scenario, play(scenario, (64,) * 4, {49: (80,) * 4}), 1.0)
    assert parts.unsplit_s > 100 * (step_s((80,) * 4) - step_s(optimal_split(PROFILES, 320).local_batch_sizes))
    assert parts.exploration_s == parts.spline_s == near(0.0)


def test_wrong_shares_are_an_error_once_something_was_decided_and_equal_ones_before():
    scenario = world(lag=1)
    wrong = (RIGHT[0] + 10, RIGHT[1] - 10, *RIGHT[2:])
    parts = judged(scenario, play(scenario, (64,) * 4, {99: wrong}))
    assert parts.exploration_s == near(100 * (step_s((64,) * 4) - step_s(RIGHT)))
    assert parts.spline_s == near(100 * (step_s(wrong) - step_s(RIGHT)))
    assert parts.unsplit_s == near(0.0)
    assert parts.lag_s == near(0.0)


def test_equal_shares_that_were_decided_are_no_exploration():
    scenario = world(lag=1)
    parts = judged(scenario, play(scenario, RIGHT, {99: (64,) * 4}))
    assert parts.exploration_s == near(0.0)
    assert parts.spline_s == near(100 * (step_s((64,) * 4) - step_s(RIGHT)))


def test_a_trial_is_exploration():
    scenario = world(lag=1)
    tried = (RIGHT[0] + 10, RIGHT[1] - 10, *RIGHT[2:])
    parts = judged(scenario, play(scenario, RIGHT, {99: tried}, search_id="probe"))
    assert parts.exploration_s == near(100 * (step_s(tried) - step_s(RIGHT)))
    assert parts.spline_s == near(0.0)


def test_shares_of_who_has_not_heard_of_an_episode_are_late_and_not_wrong():
    """A batch grows within an episode that nobody has noticed: its shares are right for the world before."""
    quick = world(EPISODE)
    scenario = replace(quick, problem=replace(quick.problem, dataset_size=256 * 1000))
    grown = optimal_split(PROFILES, 320).local_batch_sizes
    run = play(scenario, RIGHT, {59: grown})
    parts = judged(scenario, run)
    assert parts.spline_s == near(0.0)
    assert parts.sensing_s > 0
    known = judged(scenario, play(scenario, RIGHT, {59: optimal_split(PROFILES, 320, [2, 1, 1, 1]).local_batch_sizes}))
    assert known.spline_s == near(0.0)
    assert known.sensing_s < parts.sensing_s / 5


def test_other_batches_than_the_oracles_are_growths_and_a_low_rate_is_the_rates():
    scenario = world()
    problem: Problem = replace(scenario.problem, dataset_size=CURVE.dataset_size, max_global_batch_size=2048)
    scenario = replace(scenario, problem=problem)
    large = optimal_split(PROFILES, 1024).local_batch_sizes

    def lost(factor: float) -> Ledger:
        learner = TraceLearner(learning=SHORT, reference_batch_size=256)
        policy = Scripted(RIGHT, {0: (large, factor)})
        run = simulate(Controller(policy), scenario, num_steps=2000, learner=learner)
        oracle_s = oracle_run(scenario.timelines, scenario.network, SHORT, 256).total_s
        parts = ledger(run, scenario, oracle_s=oracle_s, learning=SHORT)
        assert parts.total_s == pytest.approx(run.total_s - oracle_s, rel=1e-9)
        return parts

    generous, mean = lost(4.0), lost(1.0)
    assert generous.rate_s == near(0.0)
    assert mean.rate_s > generous.growth_s > 0
    # What a rate withholds makes the run longer, and none of that is put down to the batch, but for the last step.
    assert mean.growth_s == pytest.approx(generous.growth_s, abs=step_s(large))


def test_without_a_curve_the_rate_is_unknown_and_the_batch_takes_the_rest():
    scenario = world()
    parts = judged(scenario, play(scenario, RIGHT), oracle_s=1.0)
    assert parts.rate_s is None
    assert "rate" not in parts.parts()
    assert parts.growth_s == near(200 * step_s(RIGHT) - 1.0)


def test_charges_are_a_part_of_their_own():
    scenario = replace(world(EPISODE), charges=Charges(measuring_factor=1.05, switch_steps=2.0))
    free, charged = (play(at, RIGHT, {59: SLOWED}) for at in (world(EPISODE), scenario))
    parts = judged(scenario, charged)
    assert parts.charged_s == charged.charged_s == near(0.05 * free.total_s + 2 * step_s(SLOWED, 2.0))
    assert {**parts.parts(), "charged": 0.0} == pytest.approx(judged(world(EPISODE), free).parts())
    assert parts.total_s == near(charged.total_s)


def test_rows_of_an_epochs_end_have_a_split_of_their_own():
    scenario = world()
    odd = replace(scenario, problem=replace(scenario.problem, dataset_size=256 * 5 + 2))
    run = play(odd, RIGHT, num_steps=60)
    parts = judged(odd, run)
    assert np.isfinite(list(parts.parts().values())).all()
    assert parts.total_s == near(run.total_s)


def test_equal_shares_are_those_of_the_group_also_where_a_memory_ends():
    scenario = world()
    workers = tuple(
        replace(worker, max_local_batch_size=40 if worker.rank < 2 else 200) for worker in scenario.problem.workers
    )
    capped = replace(scenario, problem=replace(scenario.problem, workers=workers))
    shares = equal_shares(capped.problem, 256)
    assert len(set(shares)) > 1
    parts = judged(capped, play(capped, shares))
    assert parts.unsplit_s > 0
    assert parts.spline_s == parts.exploration_s == near(0.0)
