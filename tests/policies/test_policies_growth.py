"""What growth promises: when it changes the batch, when it does not, what it says, and what it never forgets."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from growth_worlds import PROBLEM, AffineModel, World
from policy_worlds import group

from rex_ray.control.decisions import fault_of
from rex_ray.control.vocabulary import CODEC
from rex_ray.core.errors import ConfigError
from rex_ray.core.goodput import goodput
from rex_ray.core.lr_scaling import adascale_gain
from rex_ray.core.observations import AllocationApplied
from rex_ray.core.types import Allocation, StepFlag
from rex_ray.policies.base import Finding
from rex_ray.policies.growth.blocks import block_statistic, rows_text
from rex_ray.policies.growth.by_noise_scale import NoiseScaleGrowth
from rex_ray.policies.growth.egmd import Egmd
from rex_ray.policies.growth.limits import largest_batch, smallest_batch
from rex_ray.policies.growth.rules import GoodputOptimal, GrowTenPercent
from rex_ray.policies.registry import make_policy
from rex_ray.policies.seams import BatchPlan

DOUBLING = NoiseScaleGrowth(rule=Egmd(jump=False))
JUMPING = NoiseScaleGrowth(rule=Egmd(jump=True))
BOTH = pytest.mark.parametrize("growth", [DOUBLING, JUMPING], ids=["doubling", "jumping"])


def constant(phi):
    return lambda step, rows: phi


@BOTH
def test_a_noisy_gradient_grows_the_batch_to_the_cap_and_no_further(growth):
    world = World(growth, constant(20_000.0)).run(300)
    assert world.sizes[0] == 128
    assert world.sizes[-1] == 8 * 128
    assert world.findings[-1].verdict == "at the cap"


@BOTH
def test_a_clear_gradient_leaves_the_batch_alone(growth):
    world = World(growth, constant(20.0), model=AffineModel(row_s=1e-3), truth=AffineModel(row_s=1e-3)).run(400)
    assert world.sizes == [128]
    assert {finding.verdict for finding in world.findings[8:]} == {"keep: noise scale too small"}


def test_doubling_doubles():
    assert World(DOUBLING, constant(20_000.0)).run(300).sizes == [128, 256, 512, 1024]


def test_a_jump_goes_straight_to_the_best_goodput():
    assert World(JUMPING, constant(20_000.0)).run(300).sizes == [128, 1024]


SOBER = [NoiseScaleGrowth(rule=Egmd(jump=jump, optimism=0.0)) for jump in (False, True)]


@pytest.mark.parametrize("growth", SOBER, ids=["doubling", "jumping"])
def test_the_goodput_gate_holds_where_steps_take_as_long_as_their_rows(growth):
    linear = AffineModel(fixed_s=0.001, row_s=1e-3)
    world = World(growth, constant(20_000.0), model=linear, truth=linear).run(300)
    assert world.sizes == [128]
    assert world.findings[-1].verdict == "keep: goodput gate"
    assert world.findings[-1].evidence["goodput_gain"] < 0.05


def test_without_a_gate_the_noise_scale_alone_decides():
    linear = AffineModel(fixed_s=0.001, row_s=1e-3)
    ungated = NoiseScaleGrowth(rule=Egmd(gate=False))
    assert World(ungated, constant(20_000.0), model=linear, truth=linear).run(300).sizes == [128, 256, 512, 1024]
    assert World(ungated, constant(20.0), model=linear, truth=linear).run(300).sizes == [128]


@BOTH
def test_where_steps_take_as_long_as_their_rows_hope_costs_one_trial(growth):
    linear = AffineModel(fixed_s=0.001, row_s=1e-3)
    assert World(growth, constant(2000.0), model=linear, truth=linear).run(1500).sizes == [128, 256, 128]


def test_the_reduction_counts_into_the_step_time_that_the_gate_asks_for():
    """Own times alone say that a double batch takes double; with a dear reduction it does not."""
    linear = AffineModel(fixed_s=0.0, row_s=1e-3)
    sync_us = np.full(4, 300_000)
    assert World(SOBER[0], constant(20_000.0), model=linear, truth=linear).run(100).sizes == [128]
    assert World(SOBER[0], constant(20_000.0), model=linear, truth=linear).run(100, sync_us=sync_us).sizes[-1] > 128


@BOTH
def test_every_plan_says_test_effect_noise_gain_and_the_learning_rate_with_its_rule(growth):
    plan = World(growth, constant(20_000.0)).run(100).plans[0]
    for word in ("Wilcoxon p = ", "effect ", "noise scale ", "8 blocks", "goodput", "learning rate x", "'adascale'"):
        assert word in plan.reason
    assert {"p_value", "effect", "noise_scale", "num_blocks", "goodput_gain", "lr_factor"} <= set(plan.evidence)
    assert plan.evidence["p_value"] < 0.05
    assert plan.predicted_gain == pytest.approx(1 - 1 / (1 + plan.evidence["goodput_gain"]))


@pytest.mark.parametrize("rule", [Egmd(jump=True), GrowTenPercent(), GoodputOptimal()])
def test_rows_are_written_without_an_exponent(rule):
    plans = World(NoiseScaleGrowth(rule=rule), constant(20_000.0)).run(300).plans
    assert plans
    assert any(re.search(r"\d\d,\d{3} rows", plan.reason) for plan in plans)
    assert not any(re.search(r"\de[+-]\d+ rows", plan.reason) for plan in plans)
    written = [rows_text(rows) for rows in (0.25, 9999.4, 9999.6, 12_784.0, 1e9, math.inf, 1e-7)]
    assert written == ["0.25", "9999", "10,000", "12,780", "1,000,000,000", "inf", "0"]


def test_the_gain_that_is_predicted_is_the_goodputs_on_the_models_times():
    world = World(SOBER[0], constant(20_000.0)).run(100)
    plan, phi, model = world.plans[0], world.plans[0].evidence["noise_scale"], AffineModel()
    then, now = (goodput(rows, model.step_time_s(rows), 128, phi) for rows in (256, 128))
    assert plan.evidence["goodput_gain"] == pytest.approx(then / now - 1)


def test_a_noise_that_hides_the_gradient_is_used_as_the_bound_that_was_shown():
    """With the gradient hidden the ratio has no value; goodput and learning rate take what the test has shown."""
    for seed in range(20):
        world = World(DOUBLING, constant(1e7), seed=seed, num_dims=16).run(40)
        unknown = [plan for plan in world.plans if "beyond measure" in plan.reason]
        if unknown:
            assert "noise_scale" not in unknown[0].evidence
            assert unknown[0].lr_factor == pytest.approx(adascale_gain(2.0, 256.0, 128))
            assert math.isfinite(unknown[0].predicted_gain)
            return
    pytest.fail("the noise never hid the gradient")


class Skewed(World):
    """Three workers in the proportion 1:1:6."""

    def shares(self, rows):
        eighth = rows // 8
        return (eighth, eighth, rows - 2 * eighth)


@pytest.mark.parametrize("seed", range(3))
def test_c1_skewed_shares_do_not_feign_a_larger_noise_scale(seed):
    """The formula for equal shares reads 1.9 to 2.4 times as much, which would be above twice the batch."""
    problem = group(["T4"] * 3, 64, steps_per_epoch=400)
    world = Skewed(DOUBLING, constant(80.0), problem=problem, seed=seed).run(200)
    assert world.sizes == [64]
    assert world.state.blocks.noise_scale == pytest.approx(80.0, rel=0.1)
    assert Skewed(DOUBLING, constant(240.0), problem=problem, seed=seed).run(60).sizes[-1] > 64


@pytest.mark.parametrize("seed", range(5))
def test_c4_a_noise_scale_wobbling_round_the_batch_changes_nothing(seed):
    wobble = lambda step, rows: 128 * (1 + 0.05 * math.sin(step / 3))  # noqa: E731
    assert World(DOUBLING, wobble, seed=seed).run(200).sizes == [128]
    moves = World(NoiseScaleGrowth(rule=GrowTenPercent()), wobble, seed=seed).run(200).sizes
    assert len(moves) <= 6, "even the rule without a test is bounded by the noise scale that it follows"


@pytest.mark.parametrize("window", [1, 3, 4])
def test_c5_a_window_that_can_never_fire_is_refused(window):
    with pytest.raises(ConfigError, match=r"growth_window=\d blocks can never show .* at least 5 blocks"):
        make_policy("rex", {"growth_window": window})


def test_c5_the_level_decides_which_windows_can():
    with pytest.raises(ConfigError, match="at least 10 blocks"):
        make_policy("rex", {"growth_alpha": 0.001})
    assert make_policy("rex", {"growth_window": 5})
    assert make_policy("rex", {"growth_alpha": 0.001, "growth_window": 10})


@BOTH
def test_c6_a_gradient_without_any_noise_or_signal_is_no_evidence(growth):
    world = World(growth, constant(1000.0))
    nothing = {"weighted_sq_norm": np.zeros(4), "global_sq_norm": 0.0}
    world.run(100, **nothing)
    assert world.sizes == [128]
    assert world.findings[-1].verdict == "noise scale unknown"


def test_c3_one_worker_without_micro_batches_is_unknown_not_a_division_by_nothing():
    lone = group(["T4"], 64)
    world = World(DOUBLING, constant(20_000.0), problem=lone).run(100)
    assert world.sizes == [64]
    assert {finding.verdict for finding in world.findings} == {"noise scale unknown"}
    assert "one group" in world.findings[-1].reason


def test_c3_estimates_over_two_steps_are_used_and_flagged():
    lone = group(["T4"], 64)
    world = World(DOUBLING, constant(20_000.0), problem=lone)
    pair = {"num_groups": np.array([2]), "num_norm_steps": 2}
    rng = np.random.default_rng(0)
    for _ in range(60):
        # Two gradients of 64 rows each: G = 1 in the first of 32 dimensions, tr(S) = 20,000.
        both = rng.standard_normal((2, 32)) * math.sqrt(20_000 / 32 / 64)
        both[:, 0] += 1.0
        mean = both.mean(axis=0)
        world.run(1, weighted_sq_norm=np.array([64 * (both**2).sum()]), global_sq_norm=float(mean @ mean), **pair)
    assert world.findings[0].verdict == "noise scale unknown (one-worker estimate)"
    assert world.sizes[-1] > 64


@BOTH
@pytest.mark.parametrize("bad", [{"global_sq_norm": None}, {"global_sq_norm": math.inf}, {"weighted_sq_norm": None}])
def test_c8_norms_that_are_not_finite_are_dropped_counted_and_decide_nothing(growth, bad):
    world = World(growth, constant(20_000.0)).run(60, **bad)
    assert world.sizes == [128]
    assert world.state.blocks.num_dropped == 60
    assert world.findings[-1].evidence["num_dropped"] > 0
    world.run(200)
    assert world.sizes[-1] == 1024, "clean steps afterwards are evidence as ever"


def test_c8_a_few_bad_steps_among_good_ones_only_delay():
    world = World(DOUBLING, constant(20_000.0))
    for step in range(400):
        world.run(1, **({"global_sq_norm": math.nan} if step % 3 == 0 else {}))
    assert world.sizes == [128, 256, 512, 1024]


def test_a_lossy_reduction_makes_the_noise_scale_unavailable():
    world = World(DOUBLING, constant(20_000.0)).run(30)
    for step in range(400):
        step_seen = world.observe()
        lossy = float(step_seen.weighted_sq_norm.sum() / 128 * 1.01)
        world.run(1, **({"global_sq_norm": lossy} if step % 9 == 0 else {}))
    assert world.sizes == [128]
    assert world.findings[-1].verdict in {"noise scale unavailable", "noise scale unknown"}
    assert any(finding.verdict == "noise scale unavailable" for finding in world.findings)


def test_partial_and_skipped_steps_are_no_evidence_and_warm_up_steps_are():
    for flag, num_blocks in ((StepFlag.PARTIAL, 0), (StepFlag.SKIPPED, 0), (StepFlag.WARM_UP, 5)):
        world = World(DOUBLING, constant(64.0), flags=lambda step, rows, flag=flag: flag).run(20)
        assert world.state.blocks.num_blocks == num_blocks
        assert world.state.pace.own_us == (), "their times never are"


def test_norms_of_other_parameters_begin_a_new_window():
    world = World(DOUBLING, constant(20_000.0)).run(31)
    world.run(1, flags=StepFlag.OTHER_PARAMETERS)
    assert (world.state.blocks.num_pooled, world.state.blocks.num_open) == (0, 1)
    assert world.sizes == [128]
    assert World(DOUBLING, constant(20_000.0)).run(34).sizes == [128, 256], "it would have grown"


def test_norms_on_every_fourth_step_only_take_four_times_as_long():
    prompt = World(DOUBLING, constant(20_000.0)).run(200)
    sparse = World(DOUBLING, constant(20_000.0), every=4).run(800)
    assert prompt.sizes == sparse.sizes
    assert sparse.batches[1][0] == pytest.approx(4 * prompt.batches[1][0], abs=4)


def test_without_norms_it_says_so_and_changes_nothing():
    world = World(DOUBLING, constant(20_000.0)).run(300, weighted_sq_norm=None, global_sq_norm=None)
    assert world.sizes == [128]
    assert [finding.reason for finding in world.findings] == ["gradient norms are not measured"] * 5
    assert world.answers[0][0] == 0


@BOTH
def test_a_delayed_application_only_delays(growth):
    """State presumes nothing: what is applied late leads to the same batches in the same order."""
    prompt = World(growth, constant(20_000.0), lag_steps=1).run(400)
    late = World(growth, constant(20_000.0), lag_steps=30).run(500)
    assert late.sizes == prompt.sizes


@BOTH
def test_what_is_never_applied_is_asked_for_again_and_again(growth):
    world = World(growth, constant(20_000.0), lag_steps=10**6).run(200)
    assert world.sizes == [128]
    asked = {plan.global_batch_size for plan in world.plans}
    assert len(world.plans) > 150
    assert min(asked) > 128
    assert growth is JUMPING or len(asked) == 1


def test_a_batch_that_measures_worse_is_left_again_and_banned_for_longer_every_time():
    """The curves promise that a double batch takes hardly longer; in truth it takes three times as long."""

    class Worse(AffineModel):
        def step_time_s(self, global_batch_size):
            return 0.2 if global_batch_size <= 128 else 0.6

    world = World(DOUBLING, constant(20_000.0), truth=Worse()).run(1500)
    assert world.sizes[:4] == [128, 256, 128, 256]
    assert max(world.sizes) == 256
    back = [plan for plan in world.plans if plan.global_batch_size == 128]
    assert "measured goodput is" in back[0].reason
    assert any(finding.verdict == "keep: batch was left before" for finding in world.findings)
    rows = [128, *(rows for _, rows, _ in world.batches)]
    grown = [step for (step, now, _), before in zip(world.batches, rows, strict=False) if now == 256 != before]
    waits = np.diff(grown)
    assert (waits[1:] > 1.5 * waits[:-1]).all()
    assert len(grown) <= 6


def test_a_batch_between_two_doublings_is_found_where_a_memory_ends():
    """Up to 170 rows more of them take hardly longer; beyond, every row does: no doubling is worth it."""

    class Kinked(AffineModel):
        def step_time_s(self, global_batch_size):
            return 0.2 + 1e-4 * global_batch_size + 4e-3 * max(global_batch_size - 170, 0)

    world = World(JUMPING, constant(2000.0), model=Kinked(), truth=Kinked()).run(400)
    assert world.sizes[0] == 128
    assert 0.93 * 170 < world.rows <= 1.07 * 170
    doubling = World(DOUBLING, constant(2000.0), model=Kinked(), truth=Kinked()).run(400)
    assert doubling.rows == 128


def test_a_batch_that_was_never_run_is_hoped_for_once_and_then_known():
    """Curves that say "a little worse" of what nobody has run are put to the test, and believed after it."""
    wary = AffineModel(fixed_s=0.1, row_s=1.0e-3)
    better = World(DOUBLING, constant(20_000.0), model=wary, truth=AffineModel()).run(60)
    assert better.sizes[1] == 256
    sober = NoiseScaleGrowth(rule=Egmd(jump=False, optimism=0.0, min_gain=0.5))
    keen = NoiseScaleGrowth(rule=Egmd(jump=False, optimism=0.5, min_gain=0.5))
    assert World(sober, constant(20_000.0), model=wary, truth=wary).run(60).sizes == [128]
    tried = World(keen, constant(20_000.0), model=wary, truth=wary).run(60)
    assert tried.sizes[1] == 256
    state = replace(tried.state, largest_run=10_000)
    assert keen.init(PROBLEM, state, None)[1].largest_run == 10_000
    known = World(keen, constant(20_000.0), model=wary, truth=wary, prior=state).run(60)
    assert known.sizes == [128]


def test_a_batch_that_measures_as_promised_stays():
    world = World(DOUBLING, constant(20_000.0)).run(600)
    assert world.sizes == [128, 256, 512, 1024]
    assert world.state.trial is None
    assert world.state.num_bans == 0


def test_a_noise_scale_that_falls_shrinks_the_batch_but_never_below_the_reference():
    fall = lambda step, rows: 20_000.0 if step < 200 else 10.0  # noqa: E731
    dear = AffineModel(fixed_s=0.2, row_s=2e-3)
    world = World(DOUBLING, fall, model=dear, truth=dear).run(1500)
    assert max(world.sizes) >= 512
    assert world.sizes[-1] < max(world.sizes)
    assert min(world.sizes) == 128
    shrunk = [plan for plan in world.plans if "a quarter of the batch" in plan.reason]
    assert shrunk
    assert shrunk[0].evidence["p_value"] < 0.05


def test_a_steady_noise_scale_hardly_ever_shrinks_and_never_where_it_would_not_pay():
    """Far below a quarter of the batch from the beginning, but not below its anchor: nothing has changed."""
    current = Allocation(version=5, local_batch_sizes=(256,) * 4, lr_factor=2.0)
    flat = AffineModel(row_s=0.0)
    for seed in range(5):
        assert World(DOUBLING, constant(100.0), current=current, seed=seed, model=flat, truth=flat).run(200).sizes == [
            1024
        ]
    dear = AffineModel(row_s=1e-2)
    moves = [World(DOUBLING, constant(100.0), current=current, seed=s, model=dear).run(76).sizes for s in range(20)]
    assert sum(len(sizes) > 1 for sizes in moves) <= 3
    fallen = lambda step, rows: 100.0 if step < 40 else 10.0  # noqa: E731
    moves = [World(DOUBLING, fallen, current=current, seed=s, model=dear).run(76).sizes for s in range(20)]
    assert sum(len(sizes) > 1 for sizes in moves) >= 18


@pytest.mark.parametrize("shape", ["leap", "skipped"])
def test_a_batch_at_which_training_suffers_is_left_and_not_tried_again_soon(shape):
    sick = lambda rows: rows >= 512  # noqa: E731
    loss = lambda step, rows: 2.0 + 0.05 * math.sin(step) + (20.0 if shape == "leap" and sick(rows) else 0.0)  # noqa: E731
    flags = lambda step, rows: StepFlag.SKIPPED if shape == "skipped" and sick(rows) else StepFlag.NONE  # noqa: E731
    world = World(DOUBLING, constant(20_000.0), loss=loss, flags=flags).run(300)
    assert world.sizes[:4] == [128, 256, 512, 256]
    assert world.sizes.count(512) <= 3
    reason = next(plan.reason for plan in world.plans if plan.global_batch_size < 512 and plan is not world.plans[0])
    assert reason
    backwards = [plan for plan in world.plans if plan.reason.startswith("512 -> 256")]
    assert ("leapt" if shape == "leap" else "no finite gradient") in backwards[0].reason


def test_two_skipped_steps_are_a_gradient_scalers_business():
    flags = lambda step, rows: StepFlag.SKIPPED if step % 50 in (7, 8) else StepFlag.NONE  # noqa: E731
    assert World(DOUBLING, constant(20_000.0), flags=flags).run(400).sizes == [128, 256, 512, 1024]


@pytest.mark.parametrize(("optimizer", "rule"), [("sgd", "adascale"), ("adam", "adam")])
def test_c9_the_rule_of_the_learning_rate_follows_the_optimizer_and_is_stated(optimizer, rule):
    plan = World(DOUBLING, constant(20_000.0), problem=replace(PROBLEM, optimizer=optimizer)).run(60).plans[0]
    gain = adascale_gain(2.0, plan.evidence["noise_scale"], 128)
    assert plan.lr_factor == pytest.approx(gain if rule == "adascale" else math.sqrt(gain))
    assert f"by the rule {rule!r}" in plan.reason
    assert plan.evidence["lr_factor"] == plan.lr_factor


@pytest.mark.parametrize(("rule", "factor"), [("linear", 2.0), ("sqrt", math.sqrt(2)), ("none", 1.0)])
def test_c9_a_chosen_rule_beats_the_optimizers(rule, factor):
    plan = World(NoiseScaleGrowth(rule=Egmd(jump=False), lr_rule=rule), constant(20_000.0)).run(60).plans[0]
    assert plan.lr_factor == pytest.approx(factor)
    assert f"{rule!r}" in plan.reason


def test_the_learning_rate_follows_a_noise_scale_that_moves_while_the_batch_stays():
    rising = lambda step, rows: 600.0 * min(40.0, 1.0 + step / 20)  # noqa: E731
    problem = replace(PROBLEM, max_global_batch_size=256)
    world = World(DOUBLING, rising, problem=problem).run(1000)
    assert world.sizes == [128, 256]
    factors = [factor for _, rows, factor in world.batches if rows == 256]
    assert factors[0] < factors[-1]
    assert factors[-1] == pytest.approx(2.0, rel=0.1)
    assert 2 <= len(factors) <= 6, "set afresh when it matters, and not at every look"
    fixed = World(NoiseScaleGrowth(rule=Egmd(jump=False), lr_rule="sqrt"), rising, problem=problem).run(1000)
    assert len([rows for _, rows, _ in fixed.batches if rows == 256]) == 1


def test_c11_a_resumed_run_keeps_batch_rate_and_what_was_learnt():
    before = World(DOUBLING, constant(20_000.0)).run(300)
    rows, factor = before.batches[-1][1:]
    stored = CODEC.decode(json.loads(json.dumps(CODEC.encode(before.state))))
    current = Allocation(version=4, local_batch_sizes=before.shares(rows), lr_factor=factor)
    smaller = replace(PROBLEM, workers=PROBLEM.workers[:3])
    for problem in (PROBLEM, smaller):
        plan, state = DOUBLING.init(problem, stored, current)
        assert (plan.global_batch_size, plan.lr_factor) == (rows, factor)
        assert state.blocks.noise_scale == before.state.blocks.noise_scale
        assert state.plan is None
    plan, state = DOUBLING.init(PROBLEM, None, current)
    assert (plan.global_batch_size, plan.lr_factor) == (rows, factor)
    assert state.blocks.noise_scale is None


def test_c11_a_resumed_run_goes_on_from_where_it_was():
    current = Allocation(version=4, local_batch_sizes=(64,) * 4, lr_factor=1.5)
    assert World(DOUBLING, constant(20_000.0), current=current).run(300).sizes == [256, 512, 1024]
    assert World(DOUBLING, constant(200.0), current=current).run(100).batches[0][2] == 1.5


def test_limits_memory_data_set_and_reference():
    assert largest_batch(PROBLEM) == 1024
    assert largest_batch(replace(PROBLEM, dataset_size=16 * 300)) == 300
    assert largest_batch(replace(PROBLEM, dataset_size=200)) == 128
    held = tuple(replace(worker, max_local_batch_size=100) for worker in PROBLEM.workers)
    assert largest_batch(replace(PROBLEM, workers=held)) == 400
    partly = (*held[:3], replace(held[3], max_local_batch_size=None))
    assert largest_batch(replace(PROBLEM, workers=partly)) == 1024
    assert smallest_batch(PROBLEM) == 128
    least = tuple(replace(worker, min_local_batch_size=50) for worker in PROBLEM.workers)
    assert smallest_batch(replace(PROBLEM, workers=least)) == 200


def test_growth_stops_at_what_memories_hold():
    held = tuple(replace(worker, max_local_batch_size=100) for worker in PROBLEM.workers)
    world = World(DOUBLING, constant(20_000.0), problem=replace(PROBLEM, workers=held)).run(300)
    assert world.sizes == [128, 256, 400]


def test_a_batch_beyond_the_curves_reach_is_approached():
    class Short(AffineModel):
        def step_time_s(self, global_batch_size):
            return super().step_time_s(global_batch_size) if global_batch_size <= 245 else None

    world = World(DOUBLING, constant(20_000.0), model=Short()).run(60)
    assert 230 <= world.sizes[1] <= 245


def test_unknown_times_hold_the_batch():
    class Blank(AffineModel):
        def step_time_s(self, global_batch_size):
            return None

    world = World(DOUBLING, constant(20_000.0), model=Blank()).run(100)
    assert world.sizes == [128]
    assert world.findings[-1].verdict == "keep: step time unknown"


def test_without_curves_the_first_guess_serves_and_the_trial_corrects_it():
    assert World(DOUBLING, constant(20_000.0), model=None).run(300).sizes == [128, 256, 512, 1024]

    class Steep(AffineModel):
        def step_time_s(self, global_batch_size):
            return 0.01 * global_batch_size**1.2

    world = World(DOUBLING, constant(20_000.0), model=None, truth=Steep()).run(200)
    assert world.sizes[:3] == [128, 256, 128], "the guess says it pays, the clock that it does not"


@pytest.mark.parametrize("statistic", ["log", "both"])
def test_the_papers_statistics_are_members(statistic):
    rising = lambda step, rows: 300.0 * 1.01**step  # noqa: E731
    world = World(NoiseScaleGrowth(rule=Egmd(jump=False, statistic=statistic)), rising).run(500)
    assert world.sizes[-1] > 128
    still = World(NoiseScaleGrowth(rule=Egmd(jump=False, statistic=statistic)), constant(5000.0)).run(66)
    assert (still.sizes[-1] > 128) == (statistic == "log"), "above its anchor means that the noise scale rises"


def test_the_bet_is_a_member_and_begins_anew_at_each_batch():
    growth = NoiseScaleGrowth(rule=Egmd(test="eprocess"))
    world = World(growth, constant(20_000.0)).run(400)
    assert world.sizes == [128, 256, 512, 1024]
    assert "anytime-valid p = " in world.plans[0].reason
    assert World(growth, constant(100.0)).run(500).sizes == [128]


def test_ten_per_cent_at_a_time_while_the_noise_scale_is_above_the_batch():
    world = World(NoiseScaleGrowth(rule=GrowTenPercent()), constant(500.0)).run(2000)
    ratios = np.divide(world.sizes[1:], world.sizes[:-1])
    assert (ratios < 1.11).all()
    assert 400 < world.sizes[-1] < 900


def test_the_best_goodput_is_asked_for_once_per_epoch_and_may_shrink():
    fall = lambda step, rows: 5000.0 if step < 200 else 30.0  # noqa: E731
    model = AffineModel(fixed_s=0.05, row_s=1e-3)
    growth = NoiseScaleGrowth(rule=GoodputOptimal())
    world = World(growth, fall, model=model, truth=model, steps_per_epoch=100).run(1500)
    assert max(world.sizes) > 128
    assert world.sizes[-1] < max(world.sizes)
    before = [rows for _, rows, _ in world.batches]
    changes = [step // 100 for (step, rows, _), old in zip(world.batches[1:], before, strict=False) if rows != old]
    assert len(changes) == len(set(changes)), "one change an epoch at most"


@BOTH
def test_states_survive_the_journal_and_hold_nothing_that_is_not_finite(growth):
    world = World(growth, lambda step, rows: 10.0 ** (1 + step % 7), num_dims=4)
    for _ in range(150):
        world.run(1)
        written = json.dumps(CODEC.encode(world.state))
        assert '"float"' not in written
        revived = CODEC.decode(json.loads(written))
        step = world.observe()
        again, before = growth.observe(revived, step, world.model), growth.observe(world.state, step, world.model)
        assert again[0] == before[0]
        assert json.dumps(CODEC.encode(again[1])) == json.dumps(CODEC.encode(before[1]))


def test_memory_is_bounded():
    world = World(DOUBLING, constant(100.0)).run(200)
    early = len(json.dumps(CODEC.encode(world.state)))
    assert len(json.dumps(CODEC.encode(world.run(800).state))) < 1.1 * early


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"growth_rule": "tripling"}, "growth_rule"),
        ({"growth_test": "t"}, "growth_test"),
        ({"growth_statistic": "mean"}, "growth_statistic"),
        ({"lr_rule": "cubic"}, "lr_rule"),
        ({"growth_alpha": 0.7}, "growth_alpha"),
        ({"growth_min_gain": -0.1}, "growth_min_gain"),
        ({"growth_window": 0}, "growth_window"),
        ({"growth_optimism": 1.5}, "growth_optimism"),
        ({"lr_tolerance": 0.0}, "lr_tolerance"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_policy("rex", options)


def test_a_change_that_is_not_its_own_is_taken_as_it_is():
    world = World(DOUBLING, constant(20_000.0)).run(20)
    allocation = Allocation(version=9, local_batch_sizes=(50,) * 4, lr_factor=1.2)
    state = DOUBLING.applied(world.state, AllocationApplied(allocation=allocation, step=20))
    assert (state.num_rows, state.lr_factor, state.plan) == (200, 1.2, None)


def test_findings_are_growths_and_their_figures_finite():
    for _, answer in World(JUMPING, constant(300.0)).run(300).answers:
        if isinstance(answer, Finding):
            assert answer.part == "growth"
        figures = answer.evidence.values()
        assert all(math.isfinite(figure) for figure in figures)
        assert isinstance(answer, Finding | BatchPlan)


@pytest.mark.parametrize("limits", [{"upper": 128}, {"max_global_batch_size": 256}])
def test_a_batch_grown_on_more_workers_or_under_a_higher_cap_is_cut_to_what_the_group_can_run(limits):
    before = World(DOUBLING, constant(20_000.0)).run(300)
    rows, factor = before.batches[-1][1:]
    assert (rows, factor > 4) == (1024, True)
    upper = limits.pop("upper", None)
    problem = replace(group(["T4"] * 2, 128, upper=upper, steps_per_epoch=400), **limits)
    current = Allocation(version=4, local_batch_sizes=before.shares(rows), lr_factor=factor)
    plan, _ = DOUBLING.init(problem, before.state, current)
    assert plan.global_batch_size == 256
    assert 1 < plan.lr_factor < 2
    assert DOUBLING.init(problem, None, current)[0].lr_factor == 1.0, "nothing is known of the noise"
    proposal, _ = make_policy("rex").init(problem, None, current)
    assert fault_of(proposal, problem) is None


def test_what_a_bet_has_won_on_other_parameters_is_no_evidence():
    betting = NoiseScaleGrowth(rule=Egmd(test="eprocess", optimism=0.0))
    problem = replace(PROBLEM, max_global_batch_size=256)
    held = AffineModel(fixed_s=0.0, row_s=1e-3)  # growth does not pay, so that wealth piles up
    world = World(betting, lambda step, rows: 20_000.0 if step < 400 else 10.0, problem=problem, model=held, truth=held)
    world.run(400)
    assert world.state.wealth.max() > 1e6
    world.run(1, flags=StepFlag.OTHER_PARAMETERS)
    assert world.state.wealth.max() == 0
    world.model = world.truth = AffineModel()
    assert world.run(200).sizes == [128]


def test_a_lossy_reduction_takes_back_what_a_bet_has_won():
    world = World(NoiseScaleGrowth(rule=Egmd(test="eprocess")), constant(20_000.0)).run(30)
    assert world.state.wealth.max() > 0
    world.run(1, global_sq_norm=1e9)
    assert world.state.blocks.fault == "lossy reduction"
    assert world.state.wealth.max() == 0


@pytest.mark.parametrize("also", [StepFlag.PARTIAL, StepFlag.SKIPPED])
def test_other_parameters_are_not_missed_on_a_step_that_is_no_evidence(also):
    world = World(DOUBLING, constant(20_000.0)).run(31)
    world.run(1, flags=StepFlag.OTHER_PARAMETERS | also)
    assert (world.state.blocks.num_pooled, world.state.blocks.num_open) == (0, 0)


def test_steps_between_measured_ones_end_a_row_of_skipped_steps():
    skips = lambda step, rows: StepFlag.SKIPPED if step > 200 and step % 4 in (1, 3) else StepFlag.NONE  # noqa: E731
    grown = Allocation(version=4, local_batch_sizes=(128,) * 4, lr_factor=3.0)
    world = World(DOUBLING, constant(20_000.0), flags=skips, every=64, current=grown).run(500)
    assert world.state.num_bans == 0
    assert world.sizes == [512]


def test_a_slowdown_while_a_batch_is_on_trial_is_not_held_against_it():
    slow = AffineModel(fixed_s=0.4, row_s=2e-4)
    problem = replace(PROBLEM, max_global_batch_size=256)
    world = World(DOUBLING, constant(20_000.0), problem=problem).run(33)
    assert world.sizes == [128, 256]
    assert world.state.trial.predicted_gain > 0.05
    world.model = world.truth = slow
    world.run(80)
    assert world.state.num_bans == 0
    assert world.state.trial is None
    assert world.sizes == [128, 256]


def test_a_batch_is_tried_even_where_other_shares_had_just_begun():
    model = AffineModel(fixed_s=0.2, row_s=1e-4)
    world = World(DOUBLING, constant(20_000.0), model=model, truth=AffineModel(fixed_s=0.0, row_s=2e-3))
    world.run(29)
    shares = (30, 34, 32, 32)
    applied = Allocation(version=9, local_batch_sizes=shares, lr_factor=1.0)
    world.state = DOUBLING.applied(world.state, AllocationApplied(allocation=applied, step=29))
    world.run(6)
    assert world.sizes == [128, 256]
    assert world.state.trial is not None


def test_rules_that_never_look_back_are_not_made_to():
    class Squared(AffineModel):
        def step_time_s(self, global_batch_size: int) -> float:
            return 1e-5 * global_batch_size**2

    world = World(NoiseScaleGrowth(rule=GrowTenPercent()), constant(20_000.0), truth=Squared()).run(800)
    assert world.sizes == sorted(world.sizes)
    assert world.sizes[-1] == 1024
    assert world.state.num_bans == 0


def test_the_best_goodput_is_asked_for_in_a_run_of_one_epoch_as_well_and_until_it_comes():
    growth = NoiseScaleGrowth(rule=GoodputOptimal())
    assert World(growth, constant(20_000.0), steps_per_epoch=10_000).run(100).sizes == [128, 1024]
    assert World(growth, constant(20_000.0), steps_per_epoch=10_000, lag_steps=10_000).run(200).state.plan is not None


def test_a_batch_that_pays_without_any_noise_is_shown_to_by_either_statistic():
    noise, signal = np.array([3.0, 1.0]), np.array([1.0, 2.0])
    assert (block_statistic(noise, signal, 0.0, "linear") > 0).all()
    assert (block_statistic(noise, signal, 0.0, "log") > 0).all()
    assert np.isfinite(block_statistic(noise, signal, 0.0, "log")).all()
