"""The command line: quick to help, one line for an error, exit codes that scripts can use."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rex_ray.cli import main
from rex_ray.control.notes import Decided
from rex_ray.report.reading.load import load_journal


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    out, err = capsys.readouterr()
    code = stopped.value.code
    return code if isinstance(code, int) else 0, out, err


@pytest.mark.parametrize("entry", ["T4", "T4=", "=2", "T4=two", "T4=0"])
def test_workers_are_kinds_and_counts(capsys: pytest.CaptureFixture[str], entry: str) -> None:
    code, _, err = run_cli(capsys, "demo", "--workers", entry)
    assert code == 2
    assert f"--workers {entry!r} is not KIND=COUNT" in err


def test_an_unknown_scenario_is_refused_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run_cli(capsys, "demo", "--scenario", "growht")
    assert code == 2
    assert "did you mean 'growth'" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", "-1"], "seed must be a whole number of at least 0, got -1"),
        (["--data-dir", "."], "trains on digits, not on .: leave out --data-dir"),
        (["--output", "FILE/out"], "Not a directory; choose another --output"),
        (["--output", "FILE"], "File exists; choose another --output"),
    ],
)
def test_a_demo_that_cannot_work_is_one_line_before_anything_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "file").touch()
    code, out, err = run_cli(capsys, "demo", *(word.replace("FILE", str(tmp_path / "file")) for word in arguments))
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert said in err


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from rex_ray.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "print(sorted({'torch', 'ray', 'pandas', 'numpy', 'scipy', 'ax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_env_as_json_names_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(capsys, "env", "--json")
    assert code == 0
    found = json.loads(out)
    assert {"rex-ray", "torch", "ray", "numpy", "scipy", "ax-platform"} <= found["packages"].keys()
    assert found["memory_bytes"] > 2**28
    assert isinstance(found["devices"], list)


def test_env_is_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(capsys, "env")
    assert code == 0
    assert re.search(r"rex-ray +\d", out)
    assert "CUDA device" in out


@pytest.mark.parametrize("command", ["replay", "report"])
def test_an_error_of_the_users_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    code, out, err = run_cli(capsys, command, str(tmp_path))
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert "holds no journal" in err
    assert "Traceback" not in err


def test_a_journal_that_was_cut_by_hand_is_an_error_not_a_traceback(
    capsys: pytest.CaptureFixture[str], recorded_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(recorded_run, tmp_path / "run")
    steps = next((tmp_path / "run").rglob("steps-*.bin"))
    data = bytearray(steps.read_bytes())
    data[len(data) // 2] ^= 0xFF
    steps.write_bytes(bytes(data))
    code, _, err = run_cli(capsys, "replay", str(tmp_path / "run"))
    assert code == 2
    assert "checksum" in err


def test_replay_of_a_true_journal_is_identical(capsys: pytest.CaptureFixture[str], recorded_run: Path) -> None:
    code, out, _ = run_cli(capsys, "replay", str(recorded_run), "--check")
    assert code == 0
    assert "identical" in out
    assert "16" in out


def test_a_replay_shows_every_reason_whole_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], recorded_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run_cli(capsys, "replay", str(recorded_run))
    notes = [note for note in load_journal(recorded_run).notes if isinstance(note, Decided)]
    assert len(notes) > 1
    assert all(note.reason in out for note in notes)


def forge(recorded_run: Path, copy: Path) -> None:
    """Claim another split than the controller published, in a line without a checksum, as older versions wrote."""
    shutil.copytree(recorded_run, copy)
    events = copy / "rex_ray" / "journal" / "events.jsonl"
    lines = events.read_text().splitlines()
    for index, line in enumerate(lines):
        record = json.loads(line)
        if record.get("commands") and "event" not in record:
            sizes = record["commands"][0]["allocation"]["local_batch_sizes"]
            sizes[0], sizes[1] = sizes[0] + 1, sizes[1] - 1
            del record["crc"]
            lines[index] = json.dumps(record)
            break
    else:
        pytest.fail("the recorded run holds no decision to forge")
    events.write_text("\n".join(lines) + "\n")


def test_replay_of_a_forged_journal_names_the_event_and_fails_the_check(
    capsys: pytest.CaptureFixture[str], recorded_run: Path, tmp_path: Path
) -> None:
    forge(recorded_run, tmp_path / "forged")
    code, out, _ = run_cli(capsys, "replay", str(tmp_path / "forged"), "--check")
    assert code == 1
    assert "different" in out
    assert re.search(r"event \d+: commands", out)
    assert run_cli(capsys, "replay", str(tmp_path / "forged"))[0] == 0  # without --check it only tells


def test_report_writes_one_page_where_it_is_told(
    capsys: pytest.CaptureFixture[str], recorded_run: Path, tmp_path: Path
) -> None:
    target = tmp_path / "pages" / "run.html"
    code, out, _ = run_cli(capsys, "report", str(recorded_run), "--output", str(target))
    assert code == 0
    assert out.strip() == str(target)
    assert "mixed-rex" in target.read_text()
    shutil.copytree(recorded_run, tmp_path / "run")
    run_cli(capsys, "report", str(tmp_path / "run"))
    assert (tmp_path / "run" / "report.html").is_file()


def test_report_compares_several_runs_and_prints_their_figures_as_json(
    capsys: pytest.CaptureFixture[str], recorded_run: Path, tmp_path: Path
) -> None:
    target = tmp_path / "compare.html"
    arguments = ("report", str(recorded_run), str(recorded_run), "--no-estimates", "--json")
    code, out, _ = run_cli(capsys, *arguments, "--output", str(target))
    assert code == 0
    first, second = json.loads(out)["runs"]
    assert first == second
    assert first["figures"]["num_steps"] == 44
    assert first["estimates"] == []
    assert "mixed-rex (2)" in target.read_text()
    target.unlink()
    assert run_cli(capsys, *arguments)[0] == 0
    assert not target.exists()
    assert not (recorded_run / "report.html").exists()


def test_a_page_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], recorded_run: Path, tmp_path: Path
) -> None:
    code, out, err = run_cli(capsys, "report", str(recorded_run), "--output", str(tmp_path))
    assert code == 2
    assert out == ""
    assert f"cannot write {tmp_path}: Is a directory; choose another file with --output" in err
    (tmp_path / "file").touch()
    _, _, err = run_cli(capsys, "report", str(recorded_run), "--output", str(tmp_path / "file" / "page.html"))
    assert f"{tmp_path / 'file'} is no folder; choose another file with --output" in err


@pytest.mark.parametrize("arguments", [["replay", "RUN", "--check"], ["env", "--json"], ["plan", "--help"]])
def test_a_reader_that_stops_early_is_no_finding(recorded_run: Path, arguments: list[str]) -> None:
    program = "from rex_ray.cli import main; main()"
    words = [word.replace("RUN", str(recorded_run)) for word in arguments]
    command = [sys.executable, "-c", program, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.wait(timeout=60) == 141
        assert running.stderr.read() == ""
