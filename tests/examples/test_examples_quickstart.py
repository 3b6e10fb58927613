"""The script that the quick start prints is a whole one, and runs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rex_ray.control.events import MetricReported, StepObserved
from rex_ray.control.reading import read_journal
from rex_ray.hosting.journal_files import read_files

ROOT = Path(__file__).parents[2]


def the_script() -> str:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    blocks: list[str] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (script,) = (block for block in blocks if "launch(main" in block)
    return script


def test_five_lines_of_it_are_marked_as_new() -> None:
    script = the_script()
    ast.parse(script)
    assert len(re.findall(r"  # new$", script, flags=re.MULTILINE)) == 5


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(360)
def test_it_trains_every_row_once_an_epoch(tmp_path: Path) -> None:
    script = tmp_path / "digits.py"
    script.write_text(the_script())
    command = [
        sys.executable,
        str(Path(__file__).with_name("on_local_cluster.py")),
        str(script),
        str(tmp_path / "runs"),
    ]
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = read_journal(read_files(tmp_path / "runs" / "digits" / "rex_ray" / "journal")).events
    rows = sum(int(event.num_rows.sum()) for event in events if isinstance(event, StepObserved))
    assert rows == 20 * 1437
    reported = [event.metrics["accuracy"] for event in events if isinstance(event, MetricReported)]
    assert len(reported) == 20
    assert reported[-1] > 0.9
