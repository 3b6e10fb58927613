"""What an experiment's command line cannot mean is refused before the run, in one line, with exit code 2."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from types import SimpleNamespace

import pytest

from experiments import _harness, _page, bench, live_sweep
from experiments._harness import Findings, Settings
from experiments.calibration.__main__ import main as calibrate
from experiments.lab import command
from experiments.lab.study import Study
from rex_ray.core.errors import ConfigError
from workloads.learning import pilot


def measure(settings: Settings) -> Findings:
    """Measure nothing."""
    raise AssertionError(f"it ran with {settings}")


def study(settings: Settings, run: command.Runner) -> Study:
    """Study nothing."""
    raise AssertionError(f"it ran with {settings} and {run}")


def refused(capsys, run, *arguments) -> str:
    """Return the one line that a command says."""
    with pytest.raises(SystemExit) as left:
        run([str(argument) for argument in arguments])
    assert left.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("error: ")
    return line


HARNESS = [
    pytest.param(lambda argv: _harness.main("x", measure, argv), id="harness"),
    pytest.param(lambda argv: _page.main("x", measure, argv), id="page"),
    pytest.param(lambda argv: command.main("x", study, argv), id="lab"),
    pytest.param(calibrate, id="calibration"),
]


@pytest.mark.parametrize("run", HARNESS)
def test_a_file_that_cannot_be_written_and_a_seed_below_0_are_refused(run, tmp_path, capsys):
    (tmp_path / "file").touch()
    good = tmp_path / "new" / "out.json"
    assert "--json: " in refused(capsys, run, "--json", tmp_path)
    assert "is a file, not a folder" in refused(capsys, run, "--json", tmp_path / "file" / "out.json")
    assert "cannot be used" in refused(capsys, run, "--json", "/proc/out.json")
    assert "got '-1'" in refused(capsys, run, "--json", good, "--seed", "-1")
    assert "--json" in refused(capsys, run)
    assert "unrecognized" in refused(capsys, run, "--json", good, "--nonsense")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("run", HARNESS[1:3])
def test_a_page_must_be_there(run, tmp_path, capsys):
    good = tmp_path / "out.json"
    assert "--page: " in refused(capsys, run, "--json", good, "--page", tmp_path / "missing.md")
    assert "--page: " in refused(capsys, run, "--json", good, "--page", tmp_path)


def test_a_study_refuses_folders_that_are_none_and_jobs_below_0(tmp_path, capsys):
    def run(argv):
        command.main("x", study, argv)

    (tmp_path / "file").touch()
    for option in ("--record", "--out"):
        line = refused(capsys, run, "--json", tmp_path / "out.json", option, tmp_path / "file")
        assert f"{option}: " in line
        assert "is a file, not a folder" in line
    assert "--jobs: " in refused(capsys, run, "--json", tmp_path / "out.json", "--jobs", "-1")


def test_other_folders_are_tried_too(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert "--out: " in refused(capsys, bench.main, "--out", tmp_path / "file")
    assert "--runs: " in refused(capsys, live_sweep._main, "--json", tmp_path / "out.json", "--runs", tmp_path / "file")


@pytest.mark.parametrize("name", ["ablation", "imagenet", "sensitivity", "static", "transient", "wikitext"])
def test_every_option_of_a_study_is_in_its_help(name, capsys):
    module = importlib.import_module(f"experiments.{name}")
    with pytest.raises(SystemExit) as left:
        command.main(name, module.study, ["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert module.study.__doc__.split()[:4] == shown.partition("\n\n")[2].split()[:4]
    for option in ("--json", "--quick", "--seed", "--page", "--record", "--jobs", "--out"):
        assert f"\n  {option}" in shown


def test_what_works_reaches_the_run(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- begin t -->\n<!-- end t -->\n")
    target = tmp_path / "new" / "out.json"

    def found(settings, run):
        return SimpleNamespace(findings=Findings(figures={"seed": settings.seed}, tables={"t": [{"a": 1}]}))

    arguments = ["--page", str(page), "--seed", "3", "--out", str(tmp_path / "lab"), "--json", str(target)]
    command.main("x", found, [*arguments, "--jobs", "0"])
    document = json.loads(target.read_text())
    assert document["figures"] == {"seed": 3.0}
    assert "| 1 |" in page.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "page.md"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batches", "0"], "--batches: must be a whole number of at least 1, got '0'"),
        (["--batches", "64,"], "--batches: .*got ''"),
        (["--seeds", "-1"], "--seeds: .*got '-1'"),
        (["--learning-rates", "0.1,nan"], "--learning-rates: .*got 'nan'"),
        (["--num-epochs", "0"], "--num-epochs: .*got '0'"),
        (["--json", "/proc/out.json"], "--json: .*cannot be used"),
        (["--cache", __file__], "--cache: .*is a file"),
    ],
)
def test_a_pilot_refuses_what_it_cannot_run(options, said):
    with pytest.raises(ConfigError, match=said):
        pilot.main(["digits", *options])


def test_a_pilot_says_one_line(capsys, monkeypatch):
    def run(argv):
        monkeypatch.setattr(sys, "argv", ["pilot", *argv])
        monkeypatch.delitem(sys.modules, "workloads.learning.pilot")
        runpy.run_module("workloads.learning.pilot", run_name="__main__")

    assert "--batches: " in refused(capsys, run, "digits", "--batches", "0")
