"""The progress line and the decision log: what stands on a terminal, and what in a file."""

from __future__ import annotations

import io
import logging

import pytest

from rex_ray.loggers.decision_log import DecisionLog
from rex_ray.loggers.progress_line import ProgressLine, progress_text
from rex_ray.loggers.terminal import CLEAR_LINE, line_handler
from rex_ray.watch.seams import Ended, Happened, Progress, RunInfo, WorkerView

RUN = RunInfo(name="cifar10", run_id="abc", policy="rex", settings={})


def progress(step: int = 7, **other: object) -> Progress:
    workers = tuple(
        WorkerView(rank=rank, device=device, node="n", local_batch_size=rows, own_s=0.1)
        for rank, (device, rows) in enumerate([("T4", 33), ("V100", 95)])
    )
    values: dict[str, object] = {
        "elapsed_s": 3.0,
        "epoch": 0,
        "step": step,
        "rows_per_s": 1020.4,
        "step_s": 0.125,
        "global_batch_size": 128,
        "lr_factor": 1.0,
        "workers": workers,
        "slowest_rank": 1,
        "slowest_why": "larger share: 95 of 128 rows",
        "imbalance": 0.02,
    }
    return Progress(**{**values, **other})  # type: ignore[arg-type]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_says_all_that_is_known():
    text = progress_text(progress(1234, num_epochs=30, learning_rate=0.1, lr_factor=1.41, left_s=750.0))
    assert text == (
        "step 1,234 | epoch 1/30 | 1,020 rows/s | batch 128 = 33/95 | slowest rank 1 (V100): larger share: 95 of 128 "
        "rows | lr 0.1 x1.41 | 12 min left"
    )


def test_what_is_not_known_is_left_out():
    bare = progress(3, epoch=-1, rows_per_s=float("nan"), slowest_rank=None)
    assert progress_text(bare) == "step 3 | batch 128 = 33/95"
    assert progress_text(progress(-1, workers=())) == "waiting for workers"


def test_a_controller_that_failed_is_part_of_the_line():
    assert progress_text(progress(fault="OSError: disk full")).endswith(
        "nothing is decided any more: OSError: disk full"
    )


def test_on_a_terminal_one_line_is_rewritten_and_the_last_one_stays(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal()
    line = ProgressLine(terminal)
    line.begin(RUN)
    for step in range(5):
        line.see(progress(step))
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().count(CLEAR_LINE) == 5
    line.close()
    drawn = terminal.getvalue().split(CLEAR_LINE)[1:]
    assert all(len(row.rstrip("\n")) <= 59 for row in drawn)
    assert terminal.getvalue().endswith("\n")


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_elsewhere_there_are_no_bars_and_few_lines(monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    file = Terminal() if term == "dumb" else io.StringIO()
    line = ProgressLine(file, interval_s=3600.0)
    line.begin(RUN)
    line.see(progress(-1))
    for step in range(100):
        line.see(progress(step))
    line.see(progress(99, elapsed_s=4.0))
    line.see(Ended(elapsed_s=9.0, reason="finished"))
    line.close()
    written = file.getvalue()
    assert not {"\r", "\x1b"} & set(written)
    first, last = written.splitlines()
    assert first.startswith("cifar10: step 0 |")
    assert last.startswith("cifar10: step 99 |")


def test_a_last_line_that_stands_already_is_not_written_again():
    file = io.StringIO()
    line = ProgressLine(file)
    line.begin(RUN)
    line.see(progress(7, elapsed_s=3.0))
    line.see(progress(7, elapsed_s=4.0))
    line.close()
    assert len(file.getvalue().splitlines()) == 1


def test_a_decision_is_one_log_line_with_the_runs_name(caplog):
    log = DecisionLog()
    log.begin(RUN)
    with caplog.at_level(logging.INFO, logger="rex_ray.decisions"):
        log.see(Happened(elapsed_s=1.0, step=14, kind="decided", text="moves the shares"))
        log.see(Happened(elapsed_s=1.0, step=15, kind="incident", text="the control actor says this itself"))
        log.see(progress())
        log.see(Ended(elapsed_s=9.0, reason="finished"))
    log.close()
    assert [record.getMessage() for record in caplog.records] == [
        "cifar10, step 14: moves the shares",
        "cifar10: the run ended: finished",
    ]


def test_without_any_logging_decisions_go_to_standard_error_and_nothing_is_left_of_it(monkeypatch, capsys):
    root, rex = logging.getLogger(), logging.getLogger("rex_ray")
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(rex, "handlers", [])
    log = DecisionLog()
    log.begin(RUN)
    log.see(Happened(elapsed_s=1.0, step=14, kind="applied", text="runs 33/95 of 128 rows"))
    log.close()
    log.see(Happened(elapsed_s=1.0, step=15, kind="applied", text="after the end"))
    assert capsys.readouterr().err == "rex_ray: cifar10, step 14: runs 33/95 of 128 rows\n"
    assert not logging.getLogger("rex_ray.decisions").handlers


def test_a_log_line_takes_the_whole_row_where_a_progress_line_stands(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for stream, expected in ((Terminal(), f"{CLEAR_LINE}rex_ray: a word\n"), (io.StringIO(), "rex_ray: a word\n")):
        line_handler(stream).emit(logging.LogRecord("rex_ray", logging.INFO, "", 0, "a word", (), None))
        assert stream.getvalue() == expected
