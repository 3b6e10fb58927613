"""What searching costs: ``python -m experiments.search_cost --json FILE``.

Two questions:

- Are training steps slower while Ax runs? Two gloo workers train under plain DDP; blocks of steps with the helper
  searching without pause alternate in ABBA order with blocks with the helper idle. Twice: GPU-like steps that sleep
  50 ms in backward, as a host does while its device computes, and CPU-bound steps, where every core that the workers
  want is one that the helper wants too (a live run searches for seconds in an hour; this is the worst of them). The
  last once more with the helper at the lowest priority, to see what its own choice costs.
- How long does a decision take, from question to answer, and what does it take of the helper's processor time? At 4, 8
  and 16 workers of two and of four speeds, with the helper warm; the first one, with the import of Ax, apart. And what
  memory does the helper hold afterwards (Linux alone says so)?
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments._harness import Findings, Row, Settings, bootstrap_median, main
from experiments._search_cost_workers import Workers
from experiments._search_problems import SPEEDS, search_problem
from experiments._searcher import Decision, decide, wait_for_reply
from rex_ray.core.types import FloatArray
from rex_ray.search.helper import HelperLimits, SearchHelper
from rex_ray.search.protocol import Finished

__all__ = ["DECISION_GOAL_S", "DecisionCost", "measure", "measure_decisions"]

DECISION_GOAL_S = 3.0
NUM_WORKERS = (4, 8, 16)
SLEEP_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionCost:
    """What decisions cost.

    Attributes:
        rows: per number of workers and speeds: median and largest wall and processor seconds, trials.
        decision_s: the slowest median over the rows, wall seconds.
        decision_cpu_s: the dearest median over the rows, the helper's processor seconds.
        first_s: the first decision of a new process, the import of Ax included, wall seconds.
    """

    rows: list[Row]
    decision_s: float
    decision_cpu_s: float
    first_s: float


def measure_decisions(helper: SearchHelper, num_seeds: int, seed: int = 0) -> DecisionCost:
    """Time whole decisions on curves.

    Args:
        helper: a fresh one.
        num_seeds: decisions per number of workers and speeds.
        seed: the first of the searches' seeds.
    """
    first_s = decide(helper, search_problem(4, "two speeds"), seed).wall_s
    rows: list[Row] = []
    for num_workers in NUM_WORKERS:
        for speeds in SPEEDS:
            problem = search_problem(num_workers, speeds)
            costs = [decide(helper, problem, seed + k) for k in range(num_seeds)]
            rows.append(_row(num_workers, speeds, costs))
    return DecisionCost(
        rows=rows,
        decision_s=max(float(row["wall_s"] or 0.0) for row in rows),
        decision_cpu_s=max(float(row["cpu_s"] or 0.0) for row in rows),
        first_s=first_s,
    )


def _row(num_workers: int, speeds: str, costs: list[Decision]) -> Row:
    wall_s, cpu_s = [cost.wall_s for cost in costs], [cost.cpu_s for cost in costs]
    return {
        "num_workers": num_workers,
        "speeds": speeds,
        "wall_s": float(np.median(wall_s)),
        "max_wall_s": max(wall_s),
        "cpu_s": float(np.median(cpu_s)),
        "max_cpu_s": max(cpu_s),
        "trials": float(np.mean([cost.reply.num_trials for cost in costs])),
        "decisions": len(costs),
    }


def measure(settings: Settings) -> Findings:
    """Measure what searching costs beside training, and what a decision costs."""
    num_pairs, block_steps, num_seeds = (4, 20, 3) if settings.quick else (20, 40, 10)
    with _helper() as helper:
        cost = measure_decisions(helper, num_seeds, settings.seed)
        assert helper.pid is not None
        resident_mb = _resident_mb(helper.pid)
        gpu_like = _beside(helper, num_pairs, block_steps, SLEEP_S)
        cpu_bound = _beside(helper, num_pairs, 4 * block_steps, 0.0)
        _at_lowest_priority(helper.pid)
        lowest = _beside(helper, num_pairs, 4 * block_steps, 0.0)
    figures = {
        "ax_decision_s": cost.decision_s,
        "ax_decision_cpu_s": cost.decision_cpu_s,
        "ax_first_decision_s": cost.first_s,
        "ax_decision_goal_s": DECISION_GOAL_S,
        "ax_helper_resident_mb": resident_mb,
    }
    beside: list[Row] = []
    sides = {"gpu_like": gpu_like, "cpu_bound": cpu_bound, "cpu_bound_nice_19": lowest}
    for kind, pairs in sides.items():
        median, low, high = bootstrap_median(pairs.step_s[:, 1] / pairs.step_s[:, 0], seed=settings.seed)
        figures |= {
            f"{kind}_ratio_median": median,
            f"{kind}_ratio_lo": low,
            f"{kind}_ratio_hi": high,
        }
        beside.append(
            {
                "steps": kind,
                "idle_ms": 1e3 * float(np.median(pairs.step_s[:, 0])),
                "searching_ms": 1e3 * float(np.median(pairs.step_s[:, 1])),
                "ratio": median,
                "lo": low,
                "hi": high,
                "pairs": len(pairs.step_s),
                "searches": pairs.num_searches,
            }
        )
    return Findings(
        figures=figures,
        tables={"decisions": cost.rows, "steps beside a search": beside},
        settings={"num_pairs": num_pairs, "block_steps": block_steps, "num_seeds": num_seeds, "sleep_s": SLEEP_S},
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pairs:
    """Median step per pair in seconds, ``(idle, searching)``, shape ``[pairs, 2]``."""

    step_s: FloatArray
    num_searches: int


def _beside(helper: SearchHelper, num_pairs: int, block_steps: int, sleep_s: float) -> _Pairs:
    """Alternate blocks without and with searches: idle searching, searching idle, ..."""
    step_s = np.empty((num_pairs, 2))
    endless = _Endless(helper)
    with tempfile.TemporaryDirectory() as folder, Workers(Path(folder) / "store", sleep_s) as workers:
        workers.run(block_steps, lambda: None)
        for pair in range(num_pairs):
            for searching in (False, True) if pair % 2 == 0 else (True, False):
                if searching:
                    endless.go_on()
                step_s[pair, int(searching)] = workers.run(block_steps, endless.go_on if searching else lambda: None)
                if searching:
                    endless.pause()
    return _Pairs(step_s=step_s, num_searches=endless.num_finished)


class _Endless:
    """Keeps a helper searching: a new question as soon as the last one is answered."""

    def __init__(self, helper: SearchHelper) -> None:
        self._helper = helper
        self._problem = search_problem(16, "four speeds")
        self._is_busy = False
        self._num_started = 0
        self.num_finished = 0

    def go_on(self) -> None:
        """See to it that a search is under way."""
        done = self._helper.poll()
        if done and not isinstance(done[0], Finished):
            raise RuntimeError(f"the search gave no answer: {done[0]}")
        self.num_finished += len(done)
        if done or not self._is_busy:
            self._num_started += 1
            self._helper.start("endless", self._num_started, self._problem)
            self._is_busy = True

    def pause(self) -> None:
        """Have the helper idle: it is, once it has answered the next, small question."""
        self._helper.cancel("endless")
        self._is_busy = False
        self._helper.start("small", 0, search_problem(2, "two speeds", max_trials=1))
        wait_for_reply(self._helper)


def _at_lowest_priority(pid: int) -> None:
    """Put a process, and the group that Linux makes of its session, behind everything else."""
    os.setpriority(os.PRIO_PROCESS, pid, 19)
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("19", encoding="ascii")


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def _helper() -> Iterator[SearchHelper]:
    helper = SearchHelper(HelperLimits(cpu_s=60.0, answer_s=300.0))
    try:
        yield helper
    finally:
        helper.close()


if __name__ == "__main__":
    main("search_cost", measure)
