"""The controller in virtual time: what each policy makes of a mixed cluster, and a run that is fed back to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rex_ray.control.commands import ApplyAllocation
from rex_ray.control.controller import Controller
from rex_ray.control.events import GroupStarted, StepObserved
from rex_ray.control.journalled import JournalledController
from rex_ray.control.notes import Applied, Decided, Measured
from rex_ray.control.reading import read_journal
from rex_ray.control.replay import controller_for, replay
from rex_ray.control.vocabulary import CODEC
from rex_ray.core.errors import ConfigError
from rex_ray.core.types import Allocation, StepFlag
from rex_ray.policies.registry import make_policy, policy_names
from rex_ray.scenario import Episode, NoiseModel, load_network, load_profile, optimal_split
from rex_ray.sim import Scenario, SimulatedRun, compare_decisions, feed_recorded, mixed_cluster, simulate

MIXED = ("T4", "T4", "V100", "V100")
PROFILES = [load_profile(device, "resnet50") for device in MIXED]
OPTIMUM_S = optimal_split(PROFILES, 256).step_time_s
NOISE = {"1 %": NoiseModel.dedicated(), "4 %": NoiseModel.shared()}


def resnet50(seed: int = 0, noise: str = "1 %", **changes) -> Scenario:
    return mixed_cluster(MIXED, "resnet50", global_batch_size=256, noise=NOISE[noise], seed=seed, **changes)


def play(policy: str, scenario: Scenario, num_steps: int, **options) -> SimulatedRun:
    return simulate(Controller(make_policy(policy, options)), scenario, num_steps=num_steps)


def distance(allocation: Allocation) -> float:
    """The true step time of an allocation over that of the true optimum."""
    sizes = allocation.local_batch_sizes
    return max(float(p.own_time_s(rows)) for p, rows in zip(PROFILES, sizes, strict=True)) / OPTIMUM_S


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", NOISE)
def test_rex_is_within_a_tenth_of_the_optimum_in_forty_steps_and_then_rests(noise, seed):
    run = play("rex", resnet50(seed, noise), 1500)
    at_40 = [allocation for step, allocation in run.allocations if step <= 40][-1]
    assert distance(at_40) <= 1.10
    assert distance(run.allocations[-1][1]) <= 1.03
    assert len(run.allocations) - 1 <= 3
    assert all(step < 300 for step, _ in run.allocations), "no oscillation once it is found"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("rank", [0, 3])
def test_rex_follows_a_lasting_slowdown_and_comes_back_after_it(rank, noise, seed):
    episode = Episode(rank=rank, start_step=300, num_steps=400, factor=2.0)
    run = play("rex", resnet50(seed, noise, episodes=(episode,)), 1100)

    def median_s(first: int, last: int) -> float:
        return float(np.median(run.own_s[first:last].max(axis=1)))

    slow_s = optimal_split(PROFILES, 256, [2.0 if r == rank else 1.0 for r in range(4)]).step_time_s
    healthy_s = median_s(200, 300)
    assert median_s(500, 700) < 1.12 * slow_s * healthy_s / OPTIMUM_S
    assert median_s(900, 1100) < 1.05 * healthy_s
    assert len(run.allocations) - 1 <= 8


def test_rex_measures_the_gain_that_the_public_curves_promise():
    run = play("rex", resnet50(), 200)
    equal_s = max(float(profile.own_time_s(64)) for profile in PROFILES)
    assert 1 - OPTIMUM_S / equal_s == pytest.approx(0.35, abs=0.01)
    before, after = (np.median(run.own_s[part].max(axis=1)) for part in (slice(3, 18), slice(60, 200)))
    assert 1 - after / before == pytest.approx(0.35, abs=0.02)
    decided = [note for note in run.notes if isinstance(note, Decided) and note.kind == "reallocate"]
    applied = [note for note in run.notes if isinstance(note, Applied)]
    assert [note.version for note in decided] == [note.version for note in applied[1:]]
    assert all(note.lag_steps == 10 for note in applied[1:])
    assert any(isinstance(note, Measured) and note.gain > 0.02 for note in run.notes)


def test_dlb_moves_once_per_epoch_and_gets_there_in_a_few():
    run = play("dlb", resnet50(steps_per_epoch=60), 600)
    steps = [step for step, _ in run.allocations[1:]]
    assert steps[0] == 60 + 10
    assert all(step % 60 == 10 for step in steps)
    distances = [distance(allocation) for _, allocation in run.allocations]
    assert distances == sorted(distances, reverse=True)
    assert distances[1] > 1.10, "proportional shares misjudge a curve with a fixed part"
    assert distances[-1] < 1.03


def test_bsp_stays_equal_and_pays_for_it():
    run = play("bsp", resnet50(), 300)
    assert [allocation.local_batch_sizes for _, allocation in run.allocations] == [(64,) * 4]
    assert run.total_s > 1.3 * play("rex", resnet50(), 300).total_s


def test_time_is_own_time_of_the_slowest_plus_the_all_reduce():
    scenario = resnet50()
    network = load_network("resnet50")
    slower = Scenario(problem=scenario.problem, timelines=scenario.timelines, network=network)
    quick, slow = play("bsp", scenario, 50), play("bsp", slower, 50)
    assert quick.total_s == pytest.approx(quick.own_s.max(axis=1).sum())
    assert slow.total_s - quick.total_s == pytest.approx(50 * network.all_reduce_s(4))


def test_epochs_end_in_partial_steps_that_are_no_evidence():
    scenario = resnet50(steps_per_epoch=10)
    problem = scenario.problem
    odd = Scenario(
        problem=type(problem)(
            workers=problem.workers, global_batch_size=256, max_global_batch_size=256, dataset_size=256 * 10 + 40
        ),
        timelines=scenario.timelines,
    )
    run = play("rex", odd, 110)
    partial = [step for step in run.steps if step.flags & StepFlag.PARTIAL]
    assert [step.step % 11 for step in partial] == [10] * 10
    assert all(step.num_rows.sum() == 40 for step in partial)
    assert [step.epoch for step in run.steps] == [k // 11 for k in range(110)]


@pytest.mark.parametrize("policy", policy_names())
def test_in_multiples_every_share_that_runs_is_one_and_rex_gets_near_the_best_of_them(policy):
    scenario = resnet50(noise="4 %", steps_per_epoch=50)
    in_multiples = replace(scenario, problem=replace(scenario.problem, local_batch_multiple=16))
    run = play(policy, in_multiples, 260)
    assert all(rows % 16 == 0 for _, allocation in run.allocations for rows in allocation.local_batch_sizes)
    if policy == "rex":
        sizes = run.allocations[-1][1].local_batch_sizes
        slowest_s = max(float(p.own_time_s(rows)) for p, rows in zip(PROFILES, sizes, strict=True))
        assert slowest_s <= 1.03 * optimal_split(PROFILES, 256, multiple=16).step_time_s


@pytest.mark.parametrize("policy", policy_names())
def test_the_same_scenario_gives_the_same_run_and_its_journal_replays(policy):
    first, second = (play(policy, resnet50(noise="4 %", steps_per_epoch=50), 260) for _ in range(2))
    assert first.events[1].own_us.tolist() == second.events[1].own_us.tolist()
    assert first.notes == second.notes
    journalled, chunks = JournalledController.begin(policy=policy)
    files: dict[str, bytes] = {}
    for event in first.events:
        for name, data in (*chunks, *journalled.handle(event).chunks):
            files[name] = files.get(name, b"") + data
        chunks = ()
    journal = read_journal(files)
    assert replay(journal).is_identical
    assert CODEC.encode(journal.notes) == CODEC.encode(first.notes)


@pytest.mark.parametrize("policy", policy_names())
def test_a_recorded_run_fed_to_the_engine_decides_the_same_in_the_same_order(policy):
    episodes = (Episode(rank=2, start_step=120, num_steps=80, factor=1.4),)
    run = play(policy, resnet50(noise="4 %", steps_per_epoch=50, episodes=episodes), 300)
    fed = feed_recorded(Controller(make_policy(policy)), run.events)
    assert fed.differences == ()
    assert compare_decisions(run.notes, fed.notes) is None
    assert fed.notes == run.notes
    # No norms are seen here, so those that keep equal shares have nothing to decide.
    assert policy in ("bsp", "growth10", "pollux") or len(fed.decisions) > 1


def test_a_journal_alone_is_enough_to_feed_the_engine():
    journalled, chunks = JournalledController.begin(policy="rex", policy_options={"min_steps": 8}, seed=5)
    run = play("rex", resnet50(), 120, min_steps=8)
    files: dict[str, bytes] = {}
    for chunk in (*chunks, *(c for event in run.events for c in journalled.handle(event).chunks), *journalled.flush()):
        files[chunk[0]] = files.get(chunk[0], b"") + chunk[1]
    journal = read_journal(files)
    fed = feed_recorded(controller_for(journal.header), journal.events)
    assert fed.differences == ()
    assert compare_decisions(journal.notes, fed.notes) is None


def test_a_controller_that_decides_otherwise_is_found_out():
    run = play("rex", resnet50(), 150)
    other = feed_recorded(Controller(make_policy("bsp")), run.events)
    assert compare_decisions(run.notes, other.notes) == "4 decisions were recorded, 1 were made"
    assert other.differences[0] == "step 18 ran under version 2, which was not published"
    later = feed_recorded(Controller(make_policy("rex", {"min_steps": 5})), run.events)
    assert "decisions[1]" in (compare_decisions(run.notes, later.notes) or "")


def test_dropped_steps_and_restarts_in_a_recording_are_followed():
    first = play("rex", resnet50(), 60)
    events = [event for event in first.events[:-1] if not (isinstance(event, StepObserved) and event.step in (5, 30))]
    live = Controller(make_policy("rex"))
    again = GroupStarted(generation="again", problem=resnet50().problem, step=61)
    steps = [
        StepObserved(
            generation="again",
            epoch=0,
            step=61 + k,
            allocation_version=live_version,
            num_rows=np.array([34, 34, 94, 94]),
            **dict.fromkeys(("data_us", "sync_us"), np.zeros(4, dtype=np.int64)),
            **dict.fromkeys(("compute_us", "step_us"), np.full(4, 230_000)),
        )
        for live_version in [4]
        for k in range(20)
    ]
    recording = [*events, again, *steps]
    for event in recording:
        live.handle(event)
    fed = feed_recorded(Controller(make_policy("rex")), recording)
    assert fed.notes == live.take_notes()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_e12_two_hundred_thousand_steps_leave_bounded_memory_and_few_messages():
    group = mixed_cluster(("T4", "V100"), "resnet18", global_batch_size=256).problem
    controller = Controller(make_policy("rex"))
    noise = 1 + 0.01 * np.random.default_rng(0).standard_normal((1000, 2))
    commands = controller.handle(GroupStarted(generation="g", problem=group))
    zeros = np.zeros(2, dtype=np.int64)
    sizes, messages = [], 0
    for step in range(200_000):
        messages += len(commands)
        for command in commands:
            if isinstance(command, ApplyAllocation):
                version, rows = command.allocation.version, np.array(command.allocation.local_batch_sizes)
        own = ((20_000 + rows * (300, 100)) * noise[step % 1000]).astype(np.int64)
        commands = controller.handle(
            StepObserved(
                generation="g",
                epoch=step // 1000,
                step=step,
                allocation_version=version,
                num_rows=rows,
                data_us=zeros,
                compute_us=own,
                sync_us=zeros,
                step_us=own,
            )
        )
        if step % 50_000 == 49_999:
            sizes.append(len(str(CODEC.encode(controller.state))))
    assert max(sizes) <= min(sizes) + 64, "figures grow in digits, histories do not"
    assert 1 < messages <= 6, "shares, and one search, which nobody answers here"
    assert len(controller.take_notes()) < 50


def test_impossible_scenarios_are_refused():
    scenario = resnet50()
    with pytest.raises(ConfigError, match="3 timelines for 4 workers"):
        Scenario(problem=scenario.problem, timelines=scenario.timelines[:3])
    with pytest.raises(ConfigError, match="switch_lag_steps"):
        Scenario(problem=scenario.problem, timelines=scenario.timelines, switch_lag_steps=0)
    with pytest.raises(ConfigError, match="did you mean 'V100'"):
        mixed_cluster(("V10",), "resnet50", global_batch_size=8)


@pytest.mark.parametrize("policy", ["bsp", "rex"])
def test_a_run_of_which_only_figures_are_kept_is_the_same_run(policy):
    scenario = resnet50(noise="4 %", steps_per_epoch=37)
    whole, lean = (
        simulate(Controller(make_policy(policy)), scenario, num_steps=200, keep=keep) for keep in ("all", "figures")
    )
    assert lean.notes == whole.notes
    assert lean.allocations == whole.allocations
    assert (lean.steps, lean.events, lean.own_s.shape) == ((), (), (0, 4))
    for name in ("step_s", "slowest_s", "mean_own_s", "num_rows"):
        assert getattr(lean, name).tolist() == getattr(whole, name).tolist()
    assert whole.slowest_s.tolist() == whole.own_s.max(axis=1).tolist()
    assert whole.mean_own_s == pytest.approx(whole.own_s.mean(axis=1))
    assert whole.num_rows.tolist() == [int(step.num_rows.sum()) for step in whole.steps]
