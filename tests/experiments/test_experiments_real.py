"""The controls on real SGD: whoever knows more is faster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.lab.cells import Cell
from experiments.lab.controlled import played_by_oracle
from experiments.lab.real import play_real_oracle, seconds_to_target
from experiments.lab.worlds import scenario_of
from rex_ray.core.types import FloatArray, IntArray
from workloads.learning import make_learner

M0 = 64


def cell(disturbance: str = "none") -> Cell:
    return Cell(
        method="oracle",
        workload="resnet18",
        cluster="1xT4,1xV100",
        learner="digits",
        global_batch_size=M0,
        disturbance=disturbance,
    )


@dataclass(frozen=True)
class Run:
    rows: IntArray
    step_s: FloatArray
    tta_s: float | None
    final_metric: float | None
    total_s: float


def oracle(cache: Path, disturbance: str = "none", delay_steps: int = 0) -> Run:
    learner = make_learner("digits", seed=0, cache_dir=cache)
    scenario = scenario_of(cell(disturbance), learner.dataset_size, 2000)
    rows = play_real_oracle(scenario, learner, M0)
    played = played_by_oracle(scenario, rows, delay_steps)
    assert learner.is_done
    tta_s = seconds_to_target(learner, played.step_s)
    return Run(rows, played.step_s, tta_s, learner.final_metric, played.total_s)


def test_the_oracle_keeps_to_the_limits_and_counts_every_row(tmp_path: Path) -> None:
    run = oracle(tmp_path)
    learner = make_learner("digits", seed=0)
    assert run.rows.sum() == learner.num_epochs * learner.dataset_size
    assert len(run.rows) == len(run.step_s)
    assert run.rows.max() <= learner.dataset_size // 16
    assert (run.step_s > 0).all()
    assert run.tta_s is not None
    assert run.tta_s <= run.total_s
    again = oracle(tmp_path)
    assert run.step_s.tobytes() == again.step_s.tobytes()
    assert run.final_metric == again.final_metric


def test_knowing_late_costs_and_knowing_nothing_costs_more(tmp_path: Path) -> None:
    at_once, late = (oracle(tmp_path, "random:20", delay) for delay in (0, 10))
    never = oracle(tmp_path, "random:20", 10**6)
    assert at_once.total_s < late.total_s < never.total_s
    assert (at_once.rows == late.rows).all()
