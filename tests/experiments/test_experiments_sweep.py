"""A sweep plays what is missing and nothing else, whether it was killed, failed, or is asked for something new."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.lab import sweep
from experiments.lab.cells import Cell
from experiments.lab.fixed import BATCH_OPTION, PILOT_SEEDS
from experiments.lab.play import play
from experiments.lab.sweep import matrix_folder, run_cells

ROOT = Path(__file__).parents[2]
CELL = Cell(method="oracle", workload="resnet18", cluster="2xT4,2xV100-gavel")
CELLS = [replace(CELL, seed=seed, method=method) for seed in (0, 1) for method in ("oracle", "oracle_delayed")]


@pytest.fixture
def played(monkeypatch):
    """The cells that were really played, in order."""
    cells = []

    def playing(cell):
        cells.append(cell)
        return play(cell)

    monkeypatch.setattr(sweep, "play", playing)
    return cells


def test_results_come_in_the_order_of_the_cells_and_equal_cells_are_played_once(tmp_path, played):
    asked = [CELLS[2], CELLS[0], CELLS[2]]
    results = run_cells("try", asked, out=tmp_path, jobs=0)
    assert results == [play(cell) for cell in asked]
    assert played == [CELLS[2], CELLS[0]]


def test_only_what_is_missing_is_played_and_another_matrix_begins_anew(tmp_path, played):
    run_cells("try", CELLS, out=tmp_path, jobs=0)
    folder = matrix_folder("try", CELLS, tmp_path)
    lost = folder / "cells" / f"{CELLS[1].key}.json"
    before = lost.read_text()
    lost.unlink()
    played.clear()
    run_cells("try", list(reversed(CELLS)), out=tmp_path, jobs=0)
    assert played == [CELLS[1]]
    assert lost.read_text() == before
    played.clear()
    run_cells("try", CELLS[:2], out=tmp_path, jobs=0)
    assert played == CELLS[:2]
    assert {cell["seed"] for cell in json.loads((folder / "matrix.json").read_text())["cells"]} == {0, 1}


def test_other_code_begins_anew(tmp_path, monkeypatch):
    before = matrix_folder("try", CELLS, tmp_path)
    monkeypatch.setattr(sweep, "code_digest", lambda: "other")
    assert matrix_folder("try", CELLS, tmp_path) != before


def test_the_digest_is_of_who_plays_not_of_who_shows(tmp_path, monkeypatch):
    lab = tmp_path / "experiments" / "lab"
    lab.mkdir(parents=True)
    digests = []
    for name, text in [("trace.py", "1"), ("charts.py", "1"), ("trace.py", "2")]:
        (lab / name).write_text(text)
        monkeypatch.setattr(sweep, "_ROOT", tmp_path)
        sweep.code_digest.cache_clear()
        digests.append(sweep.code_digest())
    sweep.code_digest.cache_clear()
    assert digests[0] == digests[1] != digests[2]
    assert {path.stem for path in (ROOT / "experiments" / "lab").glob("*.py")} >= set(sweep._ASKING)


def test_the_digest_is_of_all_that_plays_a_cell():
    script = """
import sys
from pathlib import Path
import experiments.lab.controlled, experiments.lab.sgd, experiments.lab.play
files = [Path(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
print(*(file.relative_to(Path.cwd()) for file in files if file.is_relative_to(Path.cwd())))
"""
    said = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # Packages that only re-export, and the types of rows.
    known = {"experiments/_harness.py"}
    files = [file for file in said.split() if file.split("/")[0] in {"rex_ray", "workloads", "experiments"}]
    outside = [file for file in files if not any(file == room or file.startswith(f"{room}/") for room in sweep._CODE)]
    assert {file for file in outside if not file.endswith("__init__.py")} <= known
    assert "rex_ray/worker/data/sampler.py" in files
    assert all((ROOT / room).exists() for room in sweep._CODE)


def test_a_fixed_control_is_swept_on_pilot_seeds_first(tmp_path, played):
    cell = Cell(method="best_fixed_balanced", workload="bert", cluster="2xT4,2xV100", global_batch_size=48)
    (result,) = run_cells("try", [cell], out=tmp_path, jobs=0)
    assert {pilot.seed for pilot in played[:-1]} == set(PILOT_SEEDS)
    assert played[-1].seed == 0
    assert result == replace(play(played[-1]), swept_s=result.swept_s)
    assert result.largest_batch == played[-1].options[BATCH_OPTION]
    assert result.swept_s > 2 * result.total_s
    assert result == play(cell)


_DRIVER = """
import sys
from pathlib import Path
from experiments.lab.cells import Cell
from experiments.lab.sweep import run_cells
cells = [
    Cell(method=method, workload="resnet18", cluster="2xT4,2xV100-gavel", seed=seed)
    for seed in range(4)
    for method in ("bsp", "oracle")
]
if len(sys.argv) > 2:
    cells.append(Cell(method="rexx", workload="resnet18", cluster="2xT4,2xV100-gavel"))
run_cells("killed", cells, out=Path(sys.argv[1]), jobs=2)
"""


def _start(*arguments):
    return subprocess.Popen([sys.executable, "-c", _DRIVER, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def _kill_tree(pid):
    """SIGKILL a process that we started and all that came of it, Ray's daemons and workers among them."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(child): int(parent) for child, parent in (line.split() for line in listed.splitlines())}
    members = [pid]
    for member in members:
        members += [child for child, parent in parents.items() if parent == member]
    sessions = set()
    for member in members:
        with contextlib.suppress(OSError):
            sessions |= set(re.findall(rb"RAY_TMPDIR=(/tmp/rex-[^\0]+)", Path(f"/proc/{member}/environ").read_bytes()))
    for member in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
    for session in sessions:
        shutil.rmtree(session.decode(), ignore_errors=True)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)  # three clusters are started, one after the other
def test_a_sweep_killed_halfway_goes_on_where_it_was(tmp_path):
    driver = _start(str(tmp_path))
    deadline = time.monotonic() + 100
    while len(list(tmp_path.glob("killed-*/cells/*.json"))) < 3:
        assert driver.poll() is None, driver.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    _kill_tree(driver.pid)
    driver.communicate()
    (folder,) = tmp_path.glob("killed-*")
    done = {file.name: file.stat().st_mtime_ns for file in folder.glob("cells/*.json")}
    assert 3 <= len(done) < 8

    again = _start(str(tmp_path))
    _, said = again.communicate(timeout=200)
    assert again.returncode == 0, said
    assert "8 of 8 cells" in said
    now = {file.name: file.stat().st_mtime_ns for file in folder.glob("cells/*.json")}
    assert len(now) == 8
    assert {name: now[name] for name in done} == done
    assert list(tmp_path.glob("killed-*")) == [folder]
    # A result that was lost since is played again, whatever Tune's own record says.
    lost = folder / "cells" / next(iter(done))
    lost.unlink()
    _, said = _start(str(tmp_path)).communicate(timeout=200)
    assert lost.exists(), said
    assert {file.name for file in folder.glob("cells/*.json") if file.stat().st_mtime_ns != now[file.name]} == {
        lost.name
    }
    # The same bytes as without Ray.
    cells = [Cell(**fields) for fields in json.loads((folder / "matrix.json").read_text())["cells"]]
    run_cells("killed", cells, out=tmp_path / "serial", jobs=0)
    for file in (tmp_path / "serial").glob("*/cells/*.json"):
        assert file.read_bytes() == (folder / "cells" / file.name).read_bytes()


def test_a_record_that_was_killed_at_birth_is_not_gone_on_from(tmp_path):
    from experiments.lab.tune import is_whole

    assert not is_whole(tmp_path)
    (tmp_path / "tuner.pkl").write_bytes(b"whole")
    assert not is_whole(tmp_path)
    (tmp_path / "experiment_state-1.json").write_text('{"trials": [')
    assert not is_whole(tmp_path)


def test_a_matrix_is_played_by_one_process_at_a_time(tmp_path):
    from experiments.lab.tune import _alone, tune_cells

    with _alone(tmp_path), pytest.raises(RuntimeError, match="is being played by another process: wait for it"):
        tune_cells("try", CELLS, tmp_path, jobs=1)
    with _alone(tmp_path):
        pass


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.slow
def test_a_cell_that_fails_is_tried_twice_and_named_with_its_own_error(tmp_path):
    driver = _start(str(tmp_path), "with a wrong name")
    _, said = driver.communicate(timeout=200)
    assert driver.returncode == 1
    assert "1 of 9 cells of 'killed' failed twice" in said
    assert "unknown method 'rexx'" in said
    assert len(list(tmp_path.glob("killed-*/cells/*.json"))) == 8
