"""The soak's command line, its plan of faults, and what it makes of its samples; the soak itself is outside CI."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from experiments import soak
from experiments._harness import Findings
from experiments._soak_loop import slowdown
from experiments._soak_summary import FAULTS, Sample, Soaked, faults_in_turn, growth_mib, laws, slope_mib_per_hour


def samples(mib_per_hour: float = 0.0, bytes_per_step: int = 50) -> list[Sample]:
    return [
        Sample(
            at_s=2.0 * k,
            rss_mib={"driver": 200.0, "worker": 400.0 + mib_per_hour * 2.0 * k / 3600.0},
            num_steps=20 * k,
            journal_bytes=1000 + 20 * k * bytes_per_step,
        )
        for k in range(901)
    ]


SOUND = Soaked(
    samples=samples(),
    faults=("worker", "queue", "worker"),
    num_restarts=2,
    epochs=90,
    fewest=90.0,
    most=90.0,
    replica_differences=0,
)


def broken(soaked: Soaked) -> list[str]:
    return [law.name for law in laws(soaked) if not law.holds]


def test_a_sound_run_breaks_no_law_and_each_fault_breaks_its_own() -> None:
    assert broken(SOUND) == []
    assert broken(dataclasses.replace(SOUND, fewest=89.0)) == ["every row once an epoch"]
    assert broken(dataclasses.replace(SOUND, most=91.0)) == ["every row once an epoch"]
    assert broken(dataclasses.replace(SOUND, replica_differences=1)) == ["no drift between replicas"]
    assert broken(dataclasses.replace(SOUND, num_restarts=3)) == ["a restart per killed worker, and no other"]
    assert broken(dataclasses.replace(SOUND, left=("ControlActor",))) == ["nothing left behind"]
    assert broken(dataclasses.replace(SOUND, samples=samples(mib_per_hour=300.0))) == ["memory of worker is flat"]
    assert broken(dataclasses.replace(SOUND, samples=samples(bytes_per_step=5000))) == [
        "the journal is bounded per step"
    ]


def test_growth_and_slope_are_of_the_time_after_the_first_quarter() -> None:
    steady = samples(mib_per_hour=120.0)
    assert slope_mib_per_hour(steady, "worker") == pytest.approx(120.0)
    assert growth_mib(steady, "worker") == pytest.approx(120.0 * 0.25, rel=0.02)  # mid-quarters lie 15 minutes apart
    early = [dataclasses.replace(s, rss_mib={"worker": 100.0 if s.at_s < 400.0 else 300.0}) for s in steady]
    assert growth_mib(early, "worker") == 0.0
    assert slope_mib_per_hour(early, "worker") == pytest.approx(0.0, abs=1e-6)


def test_every_kind_of_fault_comes_once_before_any_comes_again_in_an_order_by_seed() -> None:
    plan = faults_in_turn(0, 30)
    assert plan == faults_in_turn(0, 30)
    assert plan != faults_in_turn(1, 30)
    assert all(sorted(plan[k : k + 3]) == sorted(FAULTS) for k in range(0, 30, 3))
    assert faults_in_turn(0, 0) == []


def test_slowdowns_are_the_same_in_every_process_and_hit_a_fifth() -> None:
    factors = [slowdown(3, 1, step) for step in range(0, 40_000, 40)]
    assert factors == [slowdown(3, 1, step + 39) for step in range(0, 40_000, 40)]
    assert 0.15 < sum(factor > 1 for factor in factors) / len(factors) < 0.25
    assert max(factors) <= 3.0


def test_the_command_line_takes_minutes_and_a_broken_law_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def pretend(minutes: float, seed: int) -> Findings:
        asked.append((minutes, seed))
        soaked = dataclasses.replace(SOUND, fewest=89.0) if seed == 9 else SOUND
        return soak._findings(soaked, [12.0], minutes)

    monkeypatch.setattr(soak, "soak", pretend)
    file = tmp_path / "soak.json"
    soak.main(["--minutes", "3", "--seed", "4", "--json", str(file)])
    figures = json.loads(file.read_text())["figures"]
    assert figures["laws_broken"] == figures["lost_rows"] == 0.0
    assert figures["recovery_s"] == 12.0
    soak.main(["--json", str(file)])
    soak.main(["--quick", "--json", str(file)])
    with pytest.raises(SystemExit) as ended:
        soak.main(["--seed", "9", "--json", str(file)])
    assert ended.value.code == 1
    assert "broken: every row once an epoch" in capsys.readouterr().err
    assert asked == [(3.0, 4), (30.0, 0), (2.0, 0), (30.0, 9)]
    with pytest.raises(SystemExit):
        soak.main(["--minutes", "0", "--json", str(file)])
