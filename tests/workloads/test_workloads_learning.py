"""Real SGD as a learner: its way depends on rows and rates alone, and its norms are those of the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rex_ray.core.errors import ConfigError
from rex_ray.sim import StepNorms
from workloads.learning import SgdLearner, make_learner
from workloads.learning.learner import by_rank
from workloads.learning.path import TrainedPath
from workloads.learning.tasks import load_task
from workloads.learning.training import CHUNK_ROWS, ChunkNorms, Place, Training, scheduled_rate


def through(learner: SgdLearner, splits: Sequence[Sequence[int]], lr_factor: float = 1.0) -> list[StepNorms | None]:
    found = []
    for step, num_rows in enumerate(splits):
        found.append(learner.norms(step, num_rows))
        learner.advance(sum(num_rows), lr_factor)
    return found


def test_the_way_does_not_depend_on_the_split() -> None:
    ways = []
    for split in ([64], [32, 32], [1, 62, 1], [0, 64, 0]):
        learner = make_learner("digits", seed=3)
        norms = [found for found in through(learner, [split] * 20) if found is not None]
        sums = [(found.weighted_sq_norm.sum(), found.num_groups.sum(), found.global_sq_norm) for found in norms]
        ways.append((sums, learner.noise_scale, learner.evaluations))
        assert all(len(found.num_groups) == len(split) for found in norms)
    first = ways[0]
    for sums, noise_scale, evaluations in ways[1:]:
        np.testing.assert_allclose(sums, first[0], rtol=1e-12)
        assert (noise_scale, evaluations) == first[1:]


def test_equal_seeds_are_equal_bytes_and_others_are_not() -> None:
    first, second, other = (Training(load_task("digits"), seed) for seed in (1, 1, 2))
    for training in (first, second, other):
        for _ in range(5):
            training.step(48, 1.5)
    assert first.state()["parameters"].tobytes() == second.state()["parameters"].tobytes()
    assert first.state()["parameters"].tobytes() != other.state()["parameters"].tobytes()


@given(rows=st.lists(st.integers(0, 80), min_size=1, max_size=6).filter(any))
def test_each_chunk_belongs_to_the_rank_of_its_first_row(rows: list[int]) -> None:
    count = -(-sum(rows) // CHUNK_ROWS)
    chunks = ChunkNorms(sq_norms=np.arange(1, count + 1, dtype=np.float32), global_sq_norm=1.0)
    found = by_rank(chunks, rows)
    assert found.num_groups.sum() == count
    starts = np.cumsum([0, *rows[:-1]])
    for rank, (start, mine) in enumerate(zip(starts.tolist(), rows, strict=True)):
        firsts = [chunk for chunk in range(count) if start <= chunk * CHUNK_ROWS < start + mine]
        assert found.num_groups[rank] == len(firsts)
        expected = sum(min(CHUNK_ROWS, sum(rows) - chunk * CHUNK_ROWS) * (chunk + 1) for chunk in firsts)
        assert found.weighted_sq_norm[rank] == pytest.approx(expected)


@settings(max_examples=10, deadline=None)
@given(num_rows=st.integers(1, 150), lr_factor=st.floats(0.5, 4.0))
def test_a_step_is_torch_sgd_on_the_mean_loss(num_rows: int, lr_factor: float) -> None:
    task = load_task("digits")
    ours, theirs = Training(task, 5), Training(task, 5)
    norms = ours.gradient(num_rows)
    ours.step(num_rows, lr_factor)
    rate = scheduled_rate(task.recipe, Place(), task.dataset_size) * lr_factor
    optimizer = torch.optim.SGD(theirs.model.parameters(), lr=rate, momentum=0.9, weight_decay=task.recipe.weight_decay)
    task.loss(theirs.model, *task.batch(5, 0, theirs.next_rows(num_rows))).backward()
    squares = sum(float(p.grad.square().sum()) for p in theirs.model.parameters() if p.grad is not None)
    optimizer.step()
    assert norms.global_sq_norm == pytest.approx(squares, rel=1e-4)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_an_epoch_has_every_row_once_whatever_the_batches() -> None:
    training = Training(load_task("digits"), 0)
    seen = []
    for num_rows in (700, 1, 300, 436):
        seen.append(training.next_rows(num_rows))
        training.step(num_rows, 1.0)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(1437))
    assert training.place == Place(epoch=1, cursor=0, step=4, num_rows=1437)


def test_the_rate_ticks_by_rows_and_ends_at_nothing() -> None:
    recipe = replace(load_task("digits").recipe, warm_up_epochs=0.5, num_epochs=2, reference_batch_size=10)
    rates = [
        scheduled_rate(recipe, Place(epoch=epoch, cursor=cursor), 100) for epoch in (0, 1) for cursor in range(100)
    ]
    assert max(rates) == pytest.approx(recipe.learning_rate)
    assert rates[1] == rates[10] > rates[0]
    assert rates[-1] < 0.02 * recipe.learning_rate
    assert scheduled_rate(recipe, Place(epoch=2), 100) == pytest.approx(0.0)
    assert sorted(rates[50:], reverse=True) == rates[50:]


def test_it_learns_and_ends_with_its_epochs() -> None:
    learner = make_learner("digits", seed=0)
    step = 0
    while not learner.is_done:
        rows = min(64, learner.num_rows_left)
        assert learner.norms(step, [rows]).global_sq_norm > 0
        learner.advance(rows, 1.0)
        step += 1
    assert step == learner.num_epochs * -(-learner.dataset_size // 64)
    assert len(learner.evaluations) == learner.num_epochs * load_task("digits").recipe.evaluations_per_epoch
    assert learner.evaluations[-1].num_rows == learner.num_epochs * learner.dataset_size
    assert learner.final_metric is not None
    assert learner.final_metric >= learner.target
    reached = learner.steps_to_target()
    assert reached is not None
    first = next(found for found in learner.evaluations if found.metric >= learner.target)
    assert reached == first.num_steps
    assert learner.noise_scale is not None
    assert learner.noise_scale > 0


def test_norms_do_not_change_the_way() -> None:
    task = load_task("digits")
    asked, silent = TrainedPath(task, 0), TrainedPath(task, 0)
    for _ in range(6):
        before = asked.norms(40)
        taken, _ = asked.step(40, 2.0)
        assert before is taken
        assert silent.step(40, 2.0)[0].sq_norms.tobytes() == taken.sq_norms.tobytes()


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no task of real SGD is called 'digit'.*digits"):
        make_learner("digit", seed=0)
    with pytest.raises(ConfigError, match="reference batch of 5000 rows"):
        make_learner("digits", seed=0, reference_batch_size=5000)
    learner = make_learner("digits", seed=0)
    with pytest.raises(ConfigError, match="1438 rows does not fit an epoch with 1437 left"):
        learner.advance(1438, 1.0)
