"""Whether the simulator tells the truth about a live run: the same decisions, at the same steps, in the same time.

    python -m experiments.live_vs_sim --json FILE [--page docs/results.md] [--quick]

Four real workers on an emulated 2xT4 + 2xV100 cluster (see ``rex-ray demo``) train under ``bsp`` first, which measures
one number, the fixed cost that a live step has on top of its emulated times on this machine. Then they train under
``rex`` while two workers slow down. Two comparisons follow.

a. *Fed*: a fresh controller is fed with the live run's recorded times and norms, in virtual time. Its decisions must
   be the recorded ones, in order, with their shares, reasons and figures.
b. *Independent*: the simulator plays the same world (profiles, noise, script, all-reduce, that fixed cost, and the
   median number of steps that a switch took to arrive) and sees nothing else of the live run. It must come to the same
   kinds of decisions with about the same shares at about the same steps, and to the same step times.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments._harness import Findings, Row, Settings
from experiments._page import main
from experiments._searcher import HelperSearcher
from rex_ray.control.events import GroupStarted
from rex_ray.control.journal import Journal
from rex_ray.control.notes import Applied, Decided, Note
from rex_ray.control.replay import controller_for
from rex_ray.core.observations import StepObserved
from rex_ray.core.types import FloatArray, StepFlag
from rex_ray.demo.comparison import run_demo
from rex_ray.demo.script import ScriptedEvent
from rex_ray.demo.settings import DemoSettings
from rex_ray.report.reading.load import load_journal
from rex_ray.scenario import NetworkModel
from rex_ray.sim import Scenario, SimulatedRun, compare_decisions, feed_recorded, simulate

__all__ = ["MAX_ONSET_STEPS", "MAX_SHARE_ERROR", "Match", "changes", "match_changes", "measure"]

MAX_ONSET_STEPS = 5
"""A change counts as the same if it was decided within so many steps."""

MAX_SHARE_ERROR = 0.03
"""... and no rank's rows differ by more than this part of them (or by one row)."""

# 150 ms and more per step, so that four workers on two cores keep to their times.
_TIME_SCALE = 0.65
_BSP_REPEATS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How two runs' changes of shares agree, pair by pair in their order.

    Attributes:
        num_live: changes of the live run.
        num_simulated: of the simulated one.
        same_kinds: whether both lists name the same kinds.
        worst_onset_steps: largest distance of two decisions' steps; 0 without pairs.
        worst_share_error: largest relative difference of a rank's rows beyond one row; 0 without pairs.
    """

    num_live: int
    num_simulated: int
    same_kinds: bool
    worst_onset_steps: int
    worst_share_error: float

    @property
    def holds(self) -> bool:
        """Whether the runs agree as closely as asked."""
        return (
            self.same_kinds and self.worst_onset_steps <= MAX_ONSET_STEPS and self.worst_share_error <= MAX_SHARE_ERROR
        )


def changes(notes: Sequence[Note]) -> list[Decided]:
    """Return the published changes of shares or batch after the first allocation, in order."""
    return [
        note
        for note in notes
        if isinstance(note, Decided) and note.version is not None and note.kind in ("reallocate", "change_global_batch")
    ]


def match_changes(live: Sequence[Decided], simulated: Sequence[Decided]) -> Match:
    """Compare two runs' changes in their order."""
    pairs = list(zip(live, simulated, strict=False))
    return Match(
        num_live=len(live),
        num_simulated=len(simulated),
        same_kinds=[one.kind for one in live] == [other.kind for other in simulated],
        worst_onset_steps=max((abs(one.step - other.step) for one, other in pairs), default=0),
        worst_share_error=max((_share_error(one, other) for one, other in pairs), default=0.0),
    )


def measure(settings: Settings) -> Findings:
    """Compare a live run with the simulator: fed with its record, and on its own."""
    demo = _demo(quick=settings.quick, seed=settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        alone = replace(demo, script=(), repeats=_BSP_REPEATS)
        bsp = _live(alone, "bsp", Path(folder) / "bsp")
        rex = _live(demo, "rex", Path(folder) / "rex")
    fixed_s = _fixed_cost_s(bsp, alone)
    fed = feed_recorded(controller_for(rex.header), rex.events)
    difference = compare_decisions(rex.notes, fed.notes)
    simulated = _simulated(rex, demo, fixed_s)
    live_s, simulated_s = _step_s(rex), simulated.step_s
    clean = _clean(rex)[: len(simulated_s)]
    error = float(simulated_s[clean].sum() / live_s[clean].sum() - 1)
    live, told = changes(rex.notes), changes(simulated.notes)
    match = match_changes(live, told)
    figures = {
        "decisions_equal": float(difference is None and not fed.differences),
        "num_decisions_fed": float(len(fed.decisions)),
        "independent_agrees": float(match.holds),
        "changes_live": float(match.num_live),
        "changes_simulated": float(match.num_simulated),
        "same_kinds": float(match.same_kinds),
        "worst_onset_steps": float(match.worst_onset_steps),
        "worst_share_error_pct": 100 * match.worst_share_error,
        "step_time_error_pct": 100 * abs(error),
        "median_step_error_pct": 100 * float(np.median(np.abs(simulated_s[clean] / live_s[clean] - 1))),
        "fixed_cost_ms": 1000 * fixed_s,
        "switch_lag_steps": float(_switch_lag_steps(rex)),
        "live_median_step_ms": 1000 * float(np.median(live_s)),
        "live_shortest_step_ms": 1000 * float(live_s[clean].min()),
    }
    shown: list[Row] = [{"figure": name, "value": round(value, 3)} for name, value in figures.items()]
    told_by = {
        "fed": difference or "the same decisions",
        "script": "; ".join(event.sentence() for event in demo.script),
    }
    return Findings(
        figures=figures, tables={"live_vs_sim": shown, "live_vs_sim_changes": _rows(live, told)}, settings=told_by
    )


def _demo(*, quick: bool, seed: int) -> DemoSettings:
    first = ScriptedEvent(rank=2, factor=2.0, onset_step=60, num_steps=60)
    second = ScriptedEvent(rank=0, factor=3.0, onset_step=180, num_steps=60)
    return DemoSettings(
        scenario="transient",
        num_epochs=1,
        repeats=28 if quick else 54,  # one epoch of so many passes over the digits, without an evaluation inside
        time_scale=_TIME_SCALE,
        script=(first,) if quick else (first, second),
        seed=seed,
    )


def _live(demo: DemoSettings, policy: str, output: Path) -> Journal:
    document = run_demo(demo, [policy], output)
    return load_journal(Path(document["runs"][0]["run_dir"]))


def _scenario(journal: Journal, demo: DemoSettings, fixed_s: float, switch_lag_steps: int = 1) -> Scenario:
    """Return the emulated world of a live run, as its workers found themselves in it."""
    started = next(event for event in journal.events if isinstance(event, GroupStarted))
    emulation = demo.emulation()
    problem = started.problem
    return Scenario(
        problem=problem,
        timelines=tuple(emulation.timeline(worker.device, worker.rank) for worker in problem.workers),
        network=NetworkModel(base_s=emulation.all_reduce_s(problem.num_workers) + fixed_s),
        switch_lag_steps=switch_lag_steps,
    )


def _switch_lag_steps(journal: Journal) -> int:
    lags = [note.lag_steps for note in journal.notes if isinstance(note, Applied) and note.version > 1]
    return max(1, round(float(np.median(lags)))) if lags else 1


def _fixed_cost_s(journal: Journal, demo: DemoSettings) -> float:
    """Return what a live step takes beyond its emulated times: the median over the clean steps of a run of ``bsp``."""
    plain = simulate(controller_for(journal.header), _scenario(journal, demo, 0.0), num_steps=len(_steps(journal)))
    clean = _clean(journal)
    return max(0.0, float(np.median((_step_s(journal) - plain.step_s)[clean])))


def _simulated(journal: Journal, demo: DemoSettings, fixed_s: float) -> SimulatedRun:
    with HelperSearcher() as searcher:
        return simulate(
            controller_for(journal.header),
            _scenario(journal, demo, fixed_s, _switch_lag_steps(journal)),
            num_steps=len(_steps(journal)),
            searcher=searcher,
        )


def _steps(journal: Journal) -> list[StepObserved]:
    return [event for event in journal.events if isinstance(event, StepObserved)]


def _step_s(journal: Journal) -> FloatArray:
    return np.array([float(step.step_us.mean()) * 1e-6 for step in _steps(journal)])


def _clean(journal: Journal) -> np.typing.NDArray[np.bool_]:
    """Leave out the steps whose times the workers themselves do not vouch for."""
    return np.array(
        [StepFlag.WARM_UP not in step.flags and StepFlag.PARTIAL not in step.flags for step in _steps(journal)]
    )


def _share_error(one: Decided, other: Decided) -> float:
    if one.proposal is None or other.proposal is None:
        return 0.0 if one.proposal == other.proposal else float("inf")
    pairs = zip(one.proposal.local_batch_sizes, other.proposal.local_batch_sizes, strict=True)
    return max(0.0 if abs(mine - theirs) <= 1 else abs(mine - theirs) / max(mine, 1) for mine, theirs in pairs)


def _rows(live: Sequence[Decided], simulated: Sequence[Decided]) -> list[Row]:
    rows: list[Row] = []
    for index in range(max(len(live), len(simulated))):
        one = live[index] if index < len(live) else None
        other = simulated[index] if index < len(simulated) else None
        rows.append(
            {
                "change": index + 1,
                "kind_live": one.kind if one else None,
                "kind_simulated": other.kind if other else None,
                "step_live": one.step if one else None,
                "step_simulated": other.step if other else None,
                "shares_live": _shares(one),
                "shares_simulated": _shares(other),
            }
        )
    return rows


def _shares(decided: Decided | None) -> str | None:
    if decided is None or decided.proposal is None:
        return None
    return "/".join(str(rows) for rows in decided.proposal.local_batch_sizes)


if __name__ == "__main__":
    main("live_vs_sim", measure, sys.argv[1:])
