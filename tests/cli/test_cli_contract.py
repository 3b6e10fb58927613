"""What every command keeps: an example in its help, JSON alone on stdout, exit codes; and its place on the page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from cli_calls import called
from hypothesis import given, settings
from hypothesis import strategies as st

from rex_ray import __version__
from rex_ray.cli import app, completing
from rex_ray.cli.output import write_json

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
TREE = typer.main.get_command(app)
GROUPS = ("config",)


def commands() -> dict[str, set[str]]:
    """Every command by its words, with its options and their short forms."""
    found: dict[str, set[str]] = {}
    for name, command in TREE.commands.items():  # type: ignore[attr-defined]
        inner = {f"{name} {word}": one for word, one in getattr(command, "commands", {}).items()} or {name: command}
        for words, one in inner.items():
            options = {option for parameter in one.params for option in (*parameter.opts, *parameter.secondary_opts)}
            found[words] = {option for option in options if option.startswith("-")} | {"--help", "-h"}
    return found


COMMANDS = commands()


def test_the_commands_are_these() -> None:
    assert set(COMMANDS) == {
        *("demo", "plan", "simulate", "replay", "report", "audit", "doctor", "env"),
        *("config init", "config validate", "config show"),
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_and_json(command: str) -> None:
    shown = called(*command.split(), "--help")
    assert shown.code == 0
    body = shown.out.partition("Options")[0]
    assert re.search(rf"Examples?:.*rex-ray {command}", body, flags=re.DOTALL)
    assert "--json" in COMMANDS[command]


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_in_help_name_options_that_there_are(command: str) -> None:
    body = called(*command.split(), "--help").out.partition("Options")[0].partition("Example")[2]
    assert set(re.findall(r"(?<=\s)--?[a-z][\w-]*", body)) <= COMMANDS[command]


def test_the_page_names_every_command_and_no_option_that_there_is_not() -> None:
    page = PAGE.read_text()
    calls = re.findall(r"rex-ray ((?:config )?[a-z]+)([^`\n]*)", page)
    assert {words for words, _ in calls if words in COMMANDS} == set(COMMANDS)
    for words, rest in calls:
        if words in COMMANDS:
            given_options = set(re.findall(r"(?<=\s)--?[a-z][\w-]*", rest))
            assert given_options <= COMMANDS[words], f"rex-ray {words}{rest}"
    every = {option for options in COMMANDS.values() for option in options}
    every |= {option for parameter in TREE.params for option in parameter.opts}
    assert set(re.findall(r"`(--[a-z][\w-]*)", page)) <= every


def test_the_exit_codes_stand_in_the_help_and_on_the_page() -> None:
    shown = " ".join(called("--help").out.split())
    page = PAGE.read_text()
    for code in ("0", "1", "2", "130", "141"):
        assert re.search(rf"\b{code}\b", shown.partition("Exit codes")[2])
        assert re.search(rf"^\| {code} \|", page, flags=re.MULTILINE)


def test_the_version_is_the_packages() -> None:
    assert called("--version").out == f"rex-ray {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "-c", "T4,V100", "-w", "resnet50", "--json"],
        ["plan", "-c", "2xT4,2xV100", "-w", "resnet50", "--limits", "--json"],
        ["replay", "RUN", "--json"],
        ["env", "--json"],
    ],
)
def test_json_is_one_document(recorded_run: Path, arguments: list[str]) -> None:
    done = called(*(word.replace("RUN", str(recorded_run)) for word in arguments))
    assert done.code == 0
    assert isinstance(json.loads(done.out), dict)


def test_json_has_no_word_for_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"a": [float("nan"), 1.5], "b": {1: float("inf")}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"1": None}}


def test_what_a_library_prints_never_reaches_the_document() -> None:
    program = (
        "import os, sys\n"
        "from rex_ray.cli.output import answering, write_json\n"
        "with answering(True):\n    print('python says')\n    os.write(1, b'a process says\\n')\n"
        "write_json({'a': 1})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {"a": 1}
    assert "python says" in done.stderr
    assert "a process says" in done.stderr


def test_ctrl_c_is_one_line_and_its_own_code() -> None:
    program = (
        "import os, signal\n"
        "from rex_ray.cli import main\n"
        "import rex_ray.cli.environment as there\n"
        # A shell's background jobs inherit that it is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def interrupted(): os.kill(os.getpid(), signal.SIGINT); signal.pause()\n"
        "there.describe_environment = interrupted\n"
        "main(['env'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "interrupted\n")


def completed(line: str) -> list[str]:
    """What bash is offered for the last word of a line."""
    words = line.split(" ")
    environ = {"_REX_RAY_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    program = "from rex_ray.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_the_shell_completes_commands_and_names() -> None:
    assert set(completed("rex-ray config ")) == {"init", "validate", "show"}
    assert completed("rex-ray simulate -p om") == ["omnilearn"]


def test_names_after_a_tab_are_those_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rex_ray.demo.scenarios import scenario_names
    from rex_ray.policies.registry import policy_names

    assert completing.policies("") == list(policy_names())
    assert completing.scenarios("") == list(scenario_names())
    assert {"rex-no-trigger", "rex"} <= set(completing.contestants("re"))
    assert "4xT4,2xV100" in completing.clusters("4xT4,2xV1")
    assert "resnet50" in completing.workloads("res")
    assert completing.noises("q") == ["quiet"]
    assert completing.disturbances("") == ["none", "random:1", "lbb"]
    (tmp_path / "runs" / "one" / "rex_ray" / "journal").mkdir(parents=True)
    (tmp_path / "runs" / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    assert completing.runs("") == completing.runs("ru") == completing.runs("runs/") == ["runs/one"]
    assert completing.runs(f"{tmp_path}/ru") == [f"{tmp_path}/runs/one"]
    assert completing.runs("nowhere/at/all") == []


odd = st.sampled_from(
    ["", "T4", "4xT4", "0xT4", "999999xT4", "T4,,V100", "4*V100", "x", "-1", "\u00bd", "resnet50", "rex", "a=b"]
)
names = odd | st.text(max_size=8)
numbers = st.sampled_from(["0", "-1", "1", "64", "10**9", "1e3", "999999999999", ""]) | st.integers().map(str)


@settings(max_examples=12, deadline=None)
@given(cluster=names, workload=names, batch=numbers, network=names, price=names)
def test_plan_takes_or_refuses_anything_in_words(
    cluster: str, workload: str, batch: str, network: str, price: str
) -> None:
    for words in (
        ["-c", cluster, "-w", "resnet50"],
        ["-c", "T4,V100", "-w", workload],
        ["-c", "T4,V100", "-w", "resnet50", "-b", batch],
        ["-c", "T4,V100", "-w", "resnet50", "--network", network],
        ["-c", "T4", "-w", "resnet50", "--price", price],
    ):
        judged(called("plan", *words))


@settings(max_examples=25, deadline=None)
@given(policy=names, disturbance=names, noise=names, option=names, batch=numbers)
def test_simulate_refuses_anything_odd_in_words(
    policy: str, disturbance: str, noise: str, option: str, batch: str
) -> None:
    # A cluster that is refused last of all: what is judged before it is what is tried here.
    for words in (
        ["-p", policy],
        ["--disturbance", disturbance],
        ["--noise", noise],
        ["--option", option],
        ["-b", batch],
    ):
        done = called("simulate", "-c", "0xT4", "-w", "resnet18", *words)
        assert done.code == 2
        judged(done)


def judged(done: object) -> None:
    """Code 0 with words on stdout, or code 2 with words on stderr and nothing else."""
    code, out, err = done.code, done.out, done.err  # type: ignore[attr-defined]
    assert code in {0, 2}
    assert "Traceback" not in err
    if code == 2:
        assert out == ""
        assert err.strip()
