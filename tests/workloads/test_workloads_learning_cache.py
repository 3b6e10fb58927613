"""What was trained once is read the next time, bit by bit the same, wherever a schedule leaves the known way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rex_ray.core.errors import ConfigError
from workloads.learning import SgdLearner, make_learner
from workloads.learning import path as path_module

Schedule = list[tuple[int, float]]

FIXED: Schedule = [(64, 1.0)] * 200
GROWN: Schedule = [(64, 1.0)] * 70 + [(96, 1.25)] * 20 + [(96, 1.5)] * 60
LATER: Schedule = [(64, 1.0)] * 80 + [(96, 1.25)] * 25 + [(80, 1.5)] * 40


def witnessed(learner: SgdLearner, schedule: Schedule) -> Iterator[object]:
    """Yield every bit that a learner shows on its way."""
    for step, (rows, lr_factor) in enumerate(schedule):
        num_rows = min(rows, learner.num_rows_left)
        found = learner.norms(step, [num_rows // 2, num_rows - num_rows // 2])
        learner.advance(num_rows, lr_factor)
        seen = None if found is None else (found.weighted_sq_norm.tobytes(), found.global_sq_norm.hex())
        yield seen, learner.noise_scale
    learner.save()
    yield learner.evaluations


@pytest.fixture
def steps_trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the steps that are really trained."""
    counted: list[int] = []

    class Counting(path_module.Training):
        def step(self, num_rows: int, lr_factor: float) -> object:  # type: ignore[override]
            counted.append(num_rows)
            return super().step(num_rows, lr_factor)

    monkeypatch.setattr(path_module, "Training", Counting)
    return counted


def test_kept_ways_are_the_trained_ones_bit_by_bit(tmp_path: Path, steps_trained: list[int]) -> None:
    for schedule in (FIXED, GROWN, LATER, FIXED, GROWN[:100], [(64, 1.0)] * 90, LATER):
        uncached = list(witnessed(make_learner("digits", seed=4), schedule))
        kept = list(witnessed(make_learner("digits", seed=4, cache_dir=tmp_path), schedule))
        assert kept == uncached


def test_a_known_way_is_read_and_a_new_one_leaves_it_from_the_nearest_state(
    tmp_path: Path, steps_trained: list[int]
) -> None:
    def trained(schedule: Schedule) -> int:
        steps_trained.clear()
        list(witnessed(make_learner("digits", seed=4, cache_dir=tmp_path), schedule))
        return len(steps_trained)

    assert trained(FIXED) == len(FIXED)
    assert trained(FIXED) == 0
    # 70 steps are known; an epoch has 23, so a state was kept after 69.
    assert trained(GROWN) == len(GROWN) - 69
    assert trained(GROWN) == trained(FIXED) == trained(GROWN[:100]) == 0
    # Within what is known of 96 rows at another rate: the first norms are, the rest is not.
    assert 0 < trained(LATER) <= len(LATER) - 69
    assert trained(LATER) == 0


def test_a_long_way_is_read_in_no_time(tmp_path: Path, steps_trained: list[int]) -> None:
    schedule: Schedule = [(64, 1.0)] * (24 * 23)
    list(witnessed(make_learner("digits", seed=0, cache_dir=tmp_path), schedule))
    steps_trained.clear()
    started = time.process_time()
    learner = make_learner("digits", seed=0, cache_dir=tmp_path)
    list(witnessed(learner, schedule))
    assert learner.is_done
    assert not steps_trained
    assert time.process_time() - started < 1.0


def test_seeds_are_kept_apart(tmp_path: Path) -> None:
    ways = [list(witnessed(make_learner("digits", seed=seed, cache_dir=tmp_path), FIXED[:30])) for seed in (0, 1, 0, 1)]
    assert ways[0] == ways[2] != ways[1] == ways[3]


def test_a_run_cut_short_by_another_process_is_not_lost(tmp_path: Path) -> None:
    """Two write the same run: the longer stays, whoever was last."""
    long, short = (make_learner("digits", seed=0, cache_dir=tmp_path) for _ in range(2))
    list(witnessed(long, FIXED[:20]))
    list(witnessed(short, FIXED[:10]))
    files = list(tmp_path.rglob("*.npz"))
    assert len(files) == 1
    assert not list(tmp_path.rglob("*.part"))
    uncached = list(witnessed(make_learner("digits", seed=0), FIXED[:20]))
    assert list(witnessed(make_learner("digits", seed=0, cache_dir=tmp_path), FIXED[:20])) == uncached


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    list(witnessed(make_learner("digits", seed=0, cache_dir=tmp_path), FIXED[:10]))
    (file,) = tmp_path.rglob("*.npz")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"is damaged .* trained again"):
        list(witnessed(make_learner("digits", seed=0, cache_dir=tmp_path), FIXED[:10]))
