"""``rex-ray simulate``: the production controller to a target, the oracle beside it, and a journal like any other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rex_ray.cli import main

SMALL = ("-c", "T4,2xV100", "-w", "deepspeech2", "-b", "320")


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    out, err = capsys.readouterr()
    code = stopped.value.code
    return code if isinstance(code, int) else 0, out, err


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    code, out, _ = run_cli(capsys, "simulate", *SMALL, *arguments, "--json")
    assert code == 0
    return json.loads(out)


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    with pytest.raises(SystemExit):
        main(["simulate", *SMALL, "--policy", "bsp", "--policy", "rex", "--journal", str(folder), "--json"])
    return folder


def test_nobody_beats_the_oracle_and_rex_beats_equal_shares(capsys):
    found = simulated(capsys, "-p", "bsp", "-p", "rex", "--noise", "quiet")
    bsp, rex = found["runs"]
    (oracle,) = found["controls"]
    assert oracle["ratio_to_oracle"] == 1.0
    assert bsp["ratio_to_oracle"] > rex["ratio_to_oracle"] >= 0.999
    assert rex["time_to_target_s"] == pytest.approx(rex["ratio_to_oracle"] * oracle["time_to_target_s"])
    assert bsp["num_changes"] == 0
    assert bsp["decisions"] == []
    assert bsp["smallest_batch"] == bsp["largest_batch"] == 320
    assert rex["num_changes"] > 0
    moves = [decision["local_batch_sizes"] for decision in rex["decisions"] if decision["local_batch_sizes"]]
    assert rex["num_changes"] + rex["num_rate_changes"] <= len(moves)
    assert 0 < rex["rii"] < bsp["rii"] < 1


def test_decisions_come_in_order_with_their_reasons(capsys):
    (rex,) = simulated(capsys, "--decisions")["runs"]
    steps = [decision["step"] for decision in rex["decisions"]]
    assert steps == sorted(steps)
    assert all(decision["reason"] for decision in rex["decisions"])
    code, out, _ = run_cli(capsys, "simulate", *SMALL, "--decisions")
    assert code == 0
    assert all(decision["reason"] in out for decision in rex["decisions"])


def test_a_new_learning_rate_for_the_same_batch_is_called_one(capsys):
    code, out, _ = run_cli(capsys, "simulate", "-c", "2xT4,2xV100", "-w", "resnet18", "-b", "1024", "--decisions")
    assert code == 0
    assert out.count(": change learning rate;") == out.count("the batch stays at") > 0
    assert out.count(": change global batch;") == len(re.findall(r"\d+ -> \d+ rows: ", out)) > 0


def test_the_same_seed_gives_the_same_run_and_another_one_does_not(capsys):
    once, several = simulated(capsys, "--seed", "3"), simulated(capsys, "--seed", "3", "--seeds", "2")
    assert several["runs"][0] == once["runs"][0]
    assert [run["seed"] for run in several["runs"]] == [3, 4]
    assert several["runs"][1]["total_s"] != several["runs"][0]["total_s"]


def test_a_disturbed_world_has_a_late_oracle_beside_the_first(capsys):
    found = simulated(capsys, "--disturbance", "random:5", "--noise", "quiet")
    oracle, late = found["controls"]
    assert oracle["policy"] == "oracle"
    assert late["policy"] == "oracle_delayed"
    assert late["ratio_to_oracle"] >= 1.0
    assert oracle["total_s"] > simulated(capsys, "--noise", "quiet")["controls"][0]["total_s"]


def test_an_option_goes_to_the_policies_that_have_it(capsys):
    found = simulated(capsys, "-p", "bsp", "-p", "rex", "-o", "split=off", "-o", "growth=off")
    assert [run["num_changes"] for run in found["runs"]] == [0, 0]
    bsp, rex = found["runs"]
    assert bsp["total_s"] == rex["total_s"]


def test_the_table_names_policies_and_assumptions(capsys):
    code, out, _ = run_cli(capsys, "simulate", *SMALL, "-p", "rex", "--seeds", "2")
    assert code == 0
    for said in ("word error rate 25 %", "reference batch 320 rows", "seeds 0 to 1", "oracle", "all-reduce", "medians"):
        assert said in out


def test_a_simulated_journal_is_one_like_any_other(capsys, journals):
    for policy in ("bsp", "rex"):
        run = journals / f"{policy}-0"
        code, out, _ = run_cli(capsys, "replay", str(run), "--check")
        assert code == 0
        assert "identical" in out
        assert run_cli(capsys, "report", str(run))[0] == 0
        assert "simulated: deepspeech2 on T4,2xV100" in (run / "report.html").read_text()
    code, _, err = run_cli(capsys, "plan", "-c", "T4,2xV100", "-w", "resnet50", "--profile", str(journals / "rex-0"))
    assert code == 2
    assert "rex-0 measured deepspeech2, not resnet50" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-p", "rexx"], "unknown policy 'rexx' (did you mean 'rex'?)"),
        (["-o", "min_gain=[1"], "--option 'min_gain=[1' has no value that can be read: line 1: "),
        (["-o", "min_gain="], "--option 'min_gain=' is empty"),
        (["-o", "min_gain=.1", "-o", "min_gain=.2"], "--option min_gain is given twice, as 0.1 and as 0.2"),
        (["-o", "min_gain=2026-01-01"], "must be a number, got '2026-01-01'"),
        (["-o", "trigge=off"], "no option 'trigge' of rex (did you mean 'trigger'?)"),
        (["-o", "trigger"], "is not NAME=VALUE; write for example --option trigger=off"),
        (["-o", "trigger=maybe"], "must be 'auto', 'advise' or 'off', got 'maybe'"),
        (["-o", "min_steps=6.5"], "must be a whole number, got 6.5"),
        (["--noise", "sharde"], "did you mean 'shared'?"),
        (["--network", "T5"], "known: 2080Ti, A100, T4, V100, none"),
        (["--disturbance", "rand:1"], "unknown disturbance 'rand:1' (did you mean 'random'?)"),
        (["--disturbance", "random:often"], "write for example random:1"),
        (["--disturbance", "random:-1"], "write for example random:1"),
        (["-b", "1"], "3 workers take at least a row each"),
        (["-b", "99999"], "give another --global-batch-size"),
        (["-c", "T4,V10"], "did you mean 'V100'?"),
        (["-w", "lstm"], "no public source measured"),
        (["--journal", "FILE"], "choose another --journal"),
    ],
)
def test_what_cannot_be_is_one_clear_line(capsys, tmp_path, arguments, said):
    (tmp_path / "file").touch()
    words = [word.replace("FILE", str(tmp_path / "file")) for word in arguments]
    code, out, err = run_cli(capsys, "simulate", *SMALL, *words)
    assert code == 2
    assert out == ""
    assert said in err
    assert "Traceback" not in err
