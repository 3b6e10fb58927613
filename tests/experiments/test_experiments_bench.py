from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from experiments import bench


def test_one_that_fails_is_said_and_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    asked = []

    def running(name, out):
        asked.append(name)
        state = "ok" if name != "limits" else "exit 1, see log"
        return {"experiment": name, "state": state, "wall_s": 0.1, "figures": ""}

    monkeypatch.setattr(bench, "run_one", running)
    (tmp_path / "new" / "lab").mkdir(parents=True)
    (tmp_path / "new" / "static.json").touch()
    (tmp_path / "new" / "thesis.tex").touch()
    assert bench.main(["--out", str(tmp_path / "new"), "--only", "limits,lbb"]) == 1
    assert {file.name for file in (tmp_path / "new").iterdir()} == {"bench.json", "thesis.tex"}
    assert asked == ["limits", "lbb"]
    assert "exit 1" in capsys.readouterr().out
    assert [row["state"] for row in json.loads((tmp_path / "new" / "bench.json").read_text())][1] == "ok"
    with pytest.raises(SystemExit):
        bench.main(["--out", str(tmp_path / "new"), "--only", "nothing"])
    assert "no experiment is called nothing" in capsys.readouterr().err


def test_a_process_that_ends_badly_leaves_a_log(tmp_path):
    row = bench.run_one("no_such_experiment", tmp_path)
    assert row["state"].startswith("exit 1")
    assert "no_such_experiment" in (tmp_path / "no_such_experiment.log").read_text()
    assert row["figures"] == ""


@pytest.mark.parametrize("name", ["static", "live_sweep"])
def test_what_is_played_is_kept_with_the_bench_and_not_read_from_an_earlier_one(tmp_path, monkeypatch, name):
    asked = []
    monkeypatch.setattr(
        bench.subprocess, "run", lambda command, **_: asked.append(command) or SimpleNamespace(returncode=1)
    )
    bench.run_one(name, tmp_path)
    (command,) = asked
    assert any(str(argument).startswith(f"{tmp_path}/l") for argument in command[command.index("--json") + 2 :])


def test_every_experiment_of_the_bench_that_is_there_can_be_asked_for():
    assert set(bench.EXPERIMENTS) >= {"overhead", "calibration", "static", "transient"}
