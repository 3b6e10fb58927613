"""A sweep of live trials: what it makes of their rows, and that a kill costs the trial under way and no other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from experiments._harness import Settings, to_document
from experiments._live_trials import LivePlan
from experiments.lab.tune import is_whole
from experiments.live_sweep import findings_of, plan_of, sweep_folder

ROOT = Path(__file__).parents[2]
PLAN = LivePlan(policies=("bsp", "rex"), seeds=(0, 1, 2))


def row(policy: str, seed: int, **changes: Any) -> dict[str, Any]:
    times = {"bsp": (30.0, 40.0, 80.0), "rex": (10.0, 30.0, 20.0)}[policy]
    figures = {
        "tta_s": times[seed],
        "time_s": 2 * times[seed],
        "step_ms": 5 * times[seed],
        "accuracy": 0.9 + 0.01 * seed,
    }
    checks = {"changes": 0, "shares_gap_pct": 1.0, "emulation_error_pct": -0.5 * seed, "rows_once": True}
    return {"policy": policy, "seed": seed, **figures, **checks, **changes}


def test_a_policys_times_are_compared_by_their_medians() -> None:
    findings = findings_of(PLAN, [row(*trial) for trial in PLAN.trials()])
    assert findings.figures["tta_ratio_rex_bsp"] == pytest.approx(20 / 40)
    assert findings.figures["time_ratio_rex_bsp"] == pytest.approx(20 / 40)
    assert findings.figures["accuracy_delta_points_rex_bsp"] == pytest.approx(0.0)
    assert findings.figures["rows_once"] == 1.0
    assert findings.figures["emulation_error_pct"] == 1.0
    assert [each["policy"] for each in findings.tables["live_sweep"]] == ["bsp", "rex"]
    to_document("live_sweep", "python", Settings(), findings)  # finite figures, tables of one shape


def test_a_target_that_a_run_never_reached_gives_no_ratio() -> None:
    rows = [
        row(policy, seed, **({"tta_s": None} if (policy, seed) == ("bsp", 1) else {})) for policy, seed in PLAN.trials()
    ]
    figures = findings_of(PLAN, rows).figures
    assert "tta_ratio_rex_bsp" not in figures
    assert "time_ratio_rex_bsp" in figures


def test_a_row_that_was_not_seen_once_is_told() -> None:
    rows = [row(policy, seed, rows_once=(policy, seed) != ("rex", 2)) for policy, seed in PLAN.trials()]
    assert findings_of(PLAN, rows).figures["rows_once"] == 0.0


def test_the_seed_of_the_command_line_is_the_first_of_all_policies_alike() -> None:
    plan = plan_of(Settings(seed=7))
    assert plan.seeds == (7, 8, 9, 10, 11)
    assert plan.trials()[:3] == [("bsp", 7), ("dlb", 7), ("rex", 7)]
    assert plan_of(Settings(quick=True, seed=7)).seeds == (7,)


def test_a_plan_finds_its_folder_again_and_another_plan_another(tmp_path: Path) -> None:
    assert sweep_folder(PLAN, tmp_path) == sweep_folder(LivePlan(**asdict(PLAN)), tmp_path)
    assert sweep_folder(PLAN, tmp_path) != sweep_folder(replace(PLAN, num_epochs=41), tmp_path)


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert process.poll() is None, process.communicate()[1][-4000:]
        assert time.monotonic() < deadline, f"not within {limit_s:g} s"
        time.sleep(0.2)


def tunes_record(folder: Path) -> dict[str, int | None]:
    """Return by each trial's name for Tune, in order, the process that its newest result came from."""
    results = tune.ExperimentAnalysis(str(folder)).results
    return {name: results[name].get("pid") for name in sorted(results)}


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(300)  # two clusters are started, and two Ray Train runs in the first
def test_a_sweep_that_was_killed_runs_only_what_is_missing(tmp_path: Path) -> None:
    plan = {**asdict(PLAN), "policies": ("bsp",), "seeds": (0, 1), "workers": {"T4": 1, "V100": 1}}
    plan |= {"num_epochs": 2, "global_batch_size": 128, "target_accuracy": 0.3}
    script = f"""
import json
from pathlib import Path
from experiments._live_trials import LivePlan, run_sweep
print(json.dumps(run_sweep(LivePlan(**{plan!r}), Path({str(tmp_path)!r}))))
"""
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def begin() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=pipe, stderr=pipe, start_new_session=True
        )

    killed = begin()
    try:
        wait_for(lambda: list(tmp_path.glob("runs/bsp-seed1-*/rex_ray/journal")), killed, 150.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate()
    first_row = tmp_path / "results" / "bsp-seed0.json"
    before = (first_row.read_bytes(), first_row.stat().st_mtime_ns)
    assert not (tmp_path / "results" / "bsp-seed1.json").exists()
    # A kill may tear Tune's record as it is written; then all that is known are the results beside it.
    known = tunes_record(tmp_path / "tune") if is_whole(tmp_path / "tune") else None

    again = begin()
    output, errors = again.communicate(timeout=150.0)
    assert again.returncode == 0, errors[-4000:]
    assert (first_row.read_bytes(), first_row.stat().st_mtime_ns) == before
    now = tunes_record(tmp_path / "tune")
    if known is not None:
        assert now.keys() == known.keys()  # the same two trials, not two more
        first, second = now
        assert now[first] == known[first] != now[second]  # the first was not so much as looked at again
    assert len(list(tmp_path.glob("runs/bsp-seed0-*"))) == 1
    assert len(list(tmp_path.glob("runs/bsp-seed1-*"))) == 2
    rows = json.loads(output.strip().splitlines()[-1])
    assert [(each["seed"], each["rows_once"]) for each in rows] == [(0, True), (1, True)]
