"""What a command line cannot mean is refused before anything starts: one line, exit code 2."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from rex_ray.core.errors import ConfigError
from workloads import base
from workloads.arguments import Parser, filled_page, number, output_file, output_folder, refusing, several, whole

ROOT = Path(__file__).parents[2]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the trainers that were made; none is."""
    made: list[str] = []
    monkeypatch.setattr(base, "RexTrainer", lambda *_, **options: made.append(options["run_config"].name))
    return made


@pytest.mark.parametrize("name", ["cifar", "fashion_mnist", "imagenet", "wikitext"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--learning-rate", "nan"], "--learning-rate: must be a finite number above 0, got 'nan'"),
        (["--learning-rate", "inf"], "got 'inf'"),
        (["--learning-rate", "0"], "got '0'"),
        (["--learning-rate", "-0.1"], "got '-0.1'"),
        (["--policy", "rexx"], r"unknown policy 'rexx' \(did you mean 'rex'\?\)"),
        (["--num-workers", "0"], "--num-workers: must be a whole number of at least 1, got '0'"),
        (["--num-epochs", "0"], "--num-epochs: must be a whole number of at least 1, got '0'"),
        (["--num-epochs", "1.5"], "--num-epochs: .*got '1.5'"),
        (["--loader-processes", "-1"], "--loader-processes: .*at least 0, got '-1'"),
        (["--seed", "-1"], "--seed: .*at least 0, got '-1'"),
        (["--global-batch-size", "1"], "global_batch_size=1 is below num_workers=2"),
        (["--global-batch-size", "8", "--max-global-batch-size", "4"], "max_global_batch_size=4 is below"),
        (["--storage", __file__], "--storage: .*is a file, not a folder"),
        (["--nonsense"], "unrecognized arguments: --nonsense .--help lists"),
        ([], "data_dir .* holds no "),
    ],
)
def test_a_workload_refuses_it_before_a_trainer_is_made(
    name: str, options: list[str], said: str, started: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        importlib.import_module(f"workloads.{name}").main(["--data-dir", str(tmp_path / "nowhere"), *options])
    assert started == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dropout", "1"], "--dropout: must be a finite number at least 0 and below 1, got '1'"),
        (["--length", "0"], "--length: .*at least 1"),
        (["--model", "transformer", "--width", "30"], "--width: must be a multiple of 4 for a transformer, got 30"),
    ],
)
def test_a_language_model_that_cannot_be_built_is_refused(
    options: list[str], said: str, started: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        importlib.import_module("workloads.wikitext").main(["--data-dir", str(tmp_path), *options])
    assert started == []


def test_damaged_data_and_data_below_one_batch_are_refused_before_a_trainer_is_made(
    started: list[str], tmp_path: Path
) -> None:
    wikitext = importlib.import_module("workloads.wikitext")
    for part in ("train", "valid"):
        (tmp_path / f"wiki.{part}.tokens").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no UTF-8 text"):
        wikitext.main(["--data-dir", str(tmp_path)])
    for part in ("train", "valid"):
        (tmp_path / f"wiki.{part}.tokens").write_text("one two three\n" * 20)
    with pytest.raises(ConfigError, match="global_batch_size=40 is above the 3 rows"):
        wikitext.main(["--data-dir", str(tmp_path)])
    assert started == []


@pytest.mark.parametrize("name", ["cifar", "fashion_mnist"])
def test_the_command_says_one_line_and_ends_with_2(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"workloads.{name}", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: data_dir {tmp_path} holds no ")


def test_values_are_read_one_by_one() -> None:
    assert several(whole(1))("1,20") == [1, 20]
    assert several(number(above=0.0))("0.1,1e-3") == [0.1, 0.001]
    for text in ("", "1,", "0", "1,-2", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a whole number of at least 1"):
            several(whole(1))(text)


def test_places_to_write_to_are_tried_and_left_as_they_were(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n")
    assert output_file(str(tmp_path / "new" / "out.json")) == tmp_path / "new" / "out.json"
    assert output_file(str(page)) == filled_page(str(page)) == page
    assert output_folder(str(tmp_path)) == tmp_path
    assert output_folder(str(tmp_path / "new" / "folder")) == tmp_path / "new" / "folder"
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
    assert page.read_text() == "# Page\n"
    (tmp_path / "bytes.md").write_bytes(b"\xff")
    for read, bad in [
        (output_file, tmp_path),
        (output_file, page / "out.json"),
        (output_file, "/proc/out.json"),
        (output_file, "x" * 300),
        (output_folder, page),
        (output_folder, "/proc/out"),
        (filled_page, tmp_path),
        (filled_page, tmp_path / "missing.md"),
        (filled_page, tmp_path / "bytes.md"),
    ]:
        with pytest.raises(argparse.ArgumentTypeError, match="name a"):
            read(str(bad))


def test_a_refusal_of_several_lines_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser()
    parser.add_argument("--seed", type=whole(0))
    with pytest.raises(SystemExit) as left, refusing():
        parser.parse_args(["--seed", "-1"])
    assert left.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit), refusing():
        raise ConfigError("first\nsecond")
    assert capsys.readouterr().err == "error: first second\n"
