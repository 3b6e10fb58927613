"""Standard output that is closed, full, narrow or spells little: one line and code 2, or an answer all the same."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.table import Table

from rex_ray.cli import streams

CALL = f"{sys.executable} -c 'from rex_ray.cli import main; main()'"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)


def test_a_closed_stdout_is_said_before_anything_is_done() -> None:
    done = shell(f"{CALL} config init -b 64 never-written.yaml >&-")
    assert (done.returncode, done.stderr) == (2, "error: cannot write the answer: standard output is closed\n")


def test_a_full_device_is_one_line() -> None:
    done = shell(f"{CALL} --version >/dev/full")
    assert done.returncode == 2
    assert done.stderr == "error: cannot write: No space left on device; send the output elsewhere\n"


def test_a_closed_stderr_takes_no_file_of_ours_and_the_code_stays() -> None:
    program = (
        "import os, sys; from rex_ray.cli.streams import made_usable; made_usable(); "
        "print(os.open(os.devnull, os.O_RDONLY)); sys.stderr.write(chr(8211))"
    )
    done = shell(f"{sys.executable} -c '{program}' 2>&- <&-")
    assert done.returncode == 0
    assert int(done.stdout) > 2


def test_a_character_that_stdout_cannot_spell_is_shown_as_its_number() -> None:
    program = "from rex_ray.cli.streams import made_usable; made_usable(); print(chr(8211), chr(0xDCFF))"
    done = shell(f"PYTHONUTF8=0 PYTHONIOENCODING=ascii {sys.executable} -c '{program}'")
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\u2013 \\udcff\n", "")


def test_a_table_in_a_pipe_is_not_cut_and_one_on_a_terminal_is_as_wide_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(*(f"{number:020d}" for number in range(12)), box=None)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    streams.answer_console().print(table)
    assert all(f"{number:020d}" in sys.stdout.getvalue() for number in range(12))  # type: ignore[attr-defined]
    monkeypatch.setenv("COLUMNS", "60")
    assert streams.answer_console().width == 60
