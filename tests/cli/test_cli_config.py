"""``rex-ray config``: a file that explains itself, is checked whole, and says what counts in the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_calls import called
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rex_ray import RexConfig


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_is_written_once_and_can_be_used_at_once(in_folder: Path) -> None:
    assert called("config", "init", "-b", "512", "-p", "dlb").out == "rex.yaml\n"
    assert RexConfig.from_yaml(in_folder / "rex.yaml") == RexConfig(global_batch_size=512, policy="dlb")
    again = called("config", "init")
    assert again.code == 2
    assert "rex.yaml is there already; choose another FILE, or --force to replace it" in again.err
    assert called("config", "init", "--force").code == 0
    assert RexConfig.from_yaml(in_folder / "rex.yaml") == RexConfig(global_batch_size=256)


def test_a_file_can_go_to_standard_output_and_be_told_as_json(in_folder: Path) -> None:
    text = called("config", "init", "-").out
    assert not list(in_folder.iterdir())
    document = json.loads(called("config", "init", "deep/rex.yaml", "--json").out)
    assert document["file"] == "deep/rex.yaml"
    assert document["text"] == text == Path("deep/rex.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-b", "0"], "global_batch_size must be a whole number of at least 1, got 0"),
        (["-p", "rx"], "did you mean 'rex'?"),
        (["file/rex.yaml"], "choose another FILE"),
    ],
)
def test_a_file_that_cannot_be_made_is_one_line(in_folder: Path, arguments: list[str], said: str) -> None:
    (in_folder / "file").touch()
    done = called("config", "init", *arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_validate_tells_all_of_every_file(in_folder: Path) -> None:
    Path("good.yaml").write_text("global_batch_size: 64\n")
    Path("bad.yaml").write_text("polcy: rex\nseed: -1\n")
    done = called("config", "validate", "good.yaml", "bad.yaml", "none.yaml")
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[0] == "good.yaml: fine"
    assert any(line.startswith("bad.yaml:1: unknown key 'polcy'") for line in lines)
    assert any(line.startswith("bad.yaml:2: seed must be") for line in lines)
    assert any("bad.yaml: the configuration lacks global_batch_size" in line for line in lines)
    assert any("none.yaml" in line and "No such file" in line for line in lines)
    document = json.loads(called("config", "validate", "good.yaml", "bad.yaml", "--json").out)
    assert [one["is_valid"] for one in document["files"]] == [True, False]
    assert len(document["files"][1]["problems"]) == 3
    assert called("config", "validate", "good.yaml").code == 0


def test_show_tells_the_value_and_its_origin(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("rex.yaml").write_text("global_batch_size: 64\npolicy_options: {min_gain: 0.1}\n")
    monkeypatch.setenv("REX_RAY_SEED", "4")
    shown = called("config", "show", "rex.yaml").out
    assert RexConfig.from_mapping({"global_batch_size": 64, "policy_options": {"min_gain": 0.1}, "seed": 4}) == (
        RexConfig.load(_written(shown), environ={})
    )
    origins = {line.partition(":")[0].strip(): line.rpartition("# ")[2] for line in shown.splitlines() if "# " in line}
    assert origins["global_batch_size"] == "rex.yaml:1"
    assert origins["min_gain"] == "rex.yaml:2"
    assert origins["seed"] == "REX_RAY_SEED"
    assert origins["policy"] == "default"
    document = json.loads(called("config", "show", "rex.yaml", "--json").out)
    assert document["values"]["seed"] == 4
    assert document["origins"]["seed"] == "REX_RAY_SEED"
    assert document["policy_options_origins"] == {"min_gain": "rex.yaml:2"}


def _written(text: str) -> Path:
    Path("shown.yaml").write_text(text)
    return Path("shown.yaml")


def test_show_without_a_file_needs_the_batch_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    done = called("config", "show")
    assert done.code == 2
    assert "lacks global_batch_size" in done.err
    monkeypatch.setenv("REX_RAY_GLOBAL_BATCH_SIZE", "512")
    assert "# REX_RAY_GLOBAL_BATCH_SIZE" in called("config", "show").out


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary() | st.text() | st.sampled_from(["a: &a [*a]", "? [1]: 2", "!!python/none x: 1", "\ufeffseed: 1"])
)
def test_any_file_is_judged_without_a_traceback(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "any.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    assert called("config", "validate", str(path)).code in {0, 1}
    assert called("config", "show", str(path)).code in {0, 2}
