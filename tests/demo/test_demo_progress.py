from __future__ import annotations

import io
import json
import time

from rich.console import Console

from rex_ray.control.events import MetricReported
from rex_ray.control.notes import Applied
from rex_ray.control.vocabulary import CODEC
from rex_ray.demo.progress import JournalFollower, Progress, follow

METRIC = MetricReported(generation="g", epoch=4, step=30, elapsed_us=2_500_000, metrics={"accuracy": 0.75})
APPLIED = Applied(step=12, version=2, local_batch_sizes=(33, 95), lag_steps=3)


def line(**parts) -> bytes:
    return json.dumps({"k": 1, **{name: CODEC.encode(value) for name, value in parts.items()}}).encode() + b"\n"


def test_a_run_that_has_not_begun_is_starting(tmp_path):
    assert JournalFollower(tmp_path / "none").poll() == Progress()
    assert "starting" in Progress().line("rex", 45)


def test_lines_are_taken_in_once_and_a_torn_one_when_it_is_whole(tmp_path):
    follower = JournalFollower(tmp_path)
    events = tmp_path / "events.jsonl"
    metric = line(event=METRIC)
    events.write_bytes(b'{"header": {}}\n' + line(notes=(APPLIED,)) + metric[:20])
    assert follower.poll() == Progress(local_batch_sizes=(33, 95))
    with events.open("ab") as file:
        file.write(metric[20:])
    assert follower.poll() == Progress(local_batch_sizes=(33, 95), epoch=4, accuracy=0.75, elapsed_s=2.5)


def test_a_line_cut_short_by_a_dead_driver_is_passed_over(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b'{"k": 3, "eve\n' + line(event=METRIC))
    assert JournalFollower(tmp_path).poll().epoch == 4


def test_elsewhere_than_on_a_terminal_progress_is_plain_lines(tmp_path):
    out = io.StringIO()
    (tmp_path / "events.jsonl").write_bytes(line(event=METRIC))
    with follow(tmp_path, Console(file=out, width=100), policy="rex", num_epochs=45):
        deadline = time.monotonic() + 10
        while not out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    lines = out.getvalue().splitlines()
    assert lines == ["rex    epoch   5/45     2.5 s   accuracy 0.750"]


def test_on_a_terminal_progress_is_one_living_line_and_a_last_one_that_stays(tmp_path):
    out = io.StringIO()
    (tmp_path / "events.jsonl").write_bytes(line(event=METRIC))
    with follow(tmp_path, Console(file=out, width=100, force_terminal=True), policy="rex", num_epochs=45):
        deadline = time.monotonic() + 10
        while "epoch" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    shown = out.getvalue()
    assert "starting workers" in shown
    assert shown.splitlines()[-1].endswith("rex    epoch   5/45     2.5 s   accuracy 0.750")
