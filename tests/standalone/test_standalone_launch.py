"""What torchrun says, and what a launch leaves for the next one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rex_ray import ConfigError, RexConfig
from rex_ray.core.types import LearntShape
from rex_ray.standalone import training
from rex_ray.standalone.control_process import ControlProcess, write_within
from rex_ray.standalone.launch import DEVICE_VARIABLE, Launch, listening_host
from rex_ray.standalone.orders import Orders
from rex_ray.standalone.run_files import LAUNCH_FILE, digest_of, journal_of_launch, launch_ended

ONE_NODE = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job/7",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "2",
}


def test_without_torchrun_the_error_says_what_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ONE_NODE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "0.1"])
    command = re.escape("torchrun --standalone --nproc-per-node=2 train.py --lr 0.1")
    with pytest.raises(ConfigError, match=command), training(RexConfig(global_batch_size=8), output=tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_one_machine_listens_on_loopback_and_several_where_rank_0_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REX_RAY_CONTROL_ADDRESS", raising=False)
    alone = Launch.from_environment(ONE_NODE)
    assert (alone.rank, alone.world_size, alone.may_restart, alone.restart) == (1, 2, True, 1)
    assert listening_host(alone, None) == "127.0.0.1"
    spread = Launch.from_environment({**ONE_NODE, "WORLD_SIZE": "4"})
    assert listening_host(spread, None) == "10.0.0.7"
    assert listening_host(spread, "192.168.1.7") == "192.168.1.7"
    assert not Launch.from_environment({**ONE_NODE, "TORCHELASTIC_RESTART_COUNT": "2"}).may_restart


def test_a_number_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="RANK='one'"):
        Launch.from_environment({**ONE_NODE, "RANK": "one"})


def test_a_device_is_what_was_given_then_the_environments_then_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch.from_environment(ONE_NODE)
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)
    assert launch.device_kind(None, "Tesla T4") == "Tesla T4"
    assert launch.device_kind(None, None) == "cpu"
    monkeypatch.setenv(DEVICE_VARIABLE, "T4, V100")
    assert launch.device_kind(None, "Tesla T4") == "V100", "the second of this machine"
    assert launch.device_kind("A100", "Tesla T4") == "A100"
    monkeypatch.setenv(DEVICE_VARIABLE, "P4")
    assert launch.device_kind(None, None) == "P4"
    monkeypatch.setenv(DEVICE_VARIABLE, "P4,")
    with pytest.raises(ConfigError, match="names no device for local rank 1"):
        launch.device_kind(None, None)


def test_a_launch_goes_on_with_its_own_journal_and_another_begins_a_new_one(tmp_path: Path) -> None:
    first = digest_of({"seed": 0})
    journal = journal_of_launch(tmp_path, "job", first)
    (journal.directory / "events.jsonl").write_text("x")
    assert journal_of_launch(tmp_path, "job", first) == journal
    assert (journal.directory / "events.jsonl").exists(), "torchrun started the same launch again"
    other = digest_of({"seed": 1})
    assert not any(journal_of_launch(tmp_path, "job", other).directory.iterdir()), "configured otherwise"
    launch_ended(tmp_path)
    (journal.directory / "events.jsonl").write_text("y")
    assert not any(journal_of_launch(tmp_path, "job", other).directory.iterdir()), "that journal has its end"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal", "journal-1", "journal-2", "launch.json"]


def test_a_launch_by_the_same_name_in_another_folder_is_another_run(tmp_path: Path) -> None:
    runs = {journal_of_launch(tmp_path / name, "job", "d").run for name in ("one", "two")}
    shutil.rmtree(tmp_path / "one")  # to begin anew: what the first left in memory is not for the next one
    runs.add(journal_of_launch(tmp_path / "one", "job", "d").run)
    assert len(runs) == 3


def test_a_run_that_is_over_does_not_fail_by_its_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / LAUNCH_FILE).mkdir()
    launch_ended(tmp_path)
    assert f"{LAUNCH_FILE} cannot be removed" in caplog.text


def test_a_folder_that_cannot_be_used_is_the_users_to_hear(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output=.*file cannot be used: .*training\(output=...\)"):
        journal_of_launch(tmp_path / "file" / "rex_ray", "job", "d")


def orders(tmp_path: Path, host: str = "127.0.0.1", **options: object) -> Orders:
    journal = tmp_path / "journal"
    journal.mkdir(exist_ok=True)
    return Orders(
        config=RexConfig(global_batch_size=8, policy_options=dict(options)),
        journal_dir=journal,
        host=host,
        port=0,
        token="t",
        num_ranks=2,
        learnt=(LearntShape(device="T4", num_rows=(8.0, 24.0), own_s=(0.1, 0.2), weights=(1.0, 1.0)),),
        memory="m",
    )


def test_orders_survive_the_pipe(tmp_path: Path) -> None:
    sent = orders(tmp_path)
    assert Orders.from_line(sent.to_line()) == sent


@pytest.mark.dist
def test_a_server_that_cannot_listen_names_the_remedy(tmp_path: Path) -> None:
    process = ControlProcess(orders(tmp_path, host="203.0.113.7"))  # of a block that is nobody's
    with pytest.raises(ConfigError, match=r"cannot listen at 203\.0\.113\.7.*REX_RAY_CONTROL_ADDRESS"):
        process.start()
    assert process.pid is None
    assert not list((tmp_path / "journal").iterdir()), "it may be tried again and again"


@pytest.mark.dist
def test_the_end_is_that_of_the_server_that_lives_not_of_one_before_it(tmp_path: Path) -> None:
    # Orders that no pipe holds at once: they are written as the server reads them.
    process = ControlProcess(replace(orders(tmp_path), memory="m" * 2**20))
    process.start()
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 60.0
    while process.pid in (first, None):
        assert time.monotonic() < deadline, "it was not started again"
        time.sleep(0.05)
    ended = process.finish("finished", 60.0)
    process.close(30.0)
    assert ended is not None
    assert b"RunEnded" in (tmp_path / "journal" / "events.jsonl").read_bytes()


def test_what_a_policy_prints_is_no_word_to_rank_0() -> None:
    program = "from rex_ray.standalone.server import own_output\n"
    program += "words = own_output(); print('noise', flush=True); words.write(b'a word'); words.flush()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=200, check=True)
    assert (done.stdout, done.stderr) == (b"a word", b"noise\n")


def test_what_is_told_to_a_process_that_never_reads_is_given_up_within_the_limit() -> None:
    reading, writing = os.pipe()
    try:
        with pytest.raises(TimeoutError):
            write_within(writing, b"x" * 2**21, 0.2)
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.dist
def test_a_server_that_is_abandoned_leaves_a_journal_to_go_on_with(tmp_path: Path) -> None:
    process = ControlProcess(orders(tmp_path))
    assert process.start() > 0
    process.close(30.0)
    assert process.pid is None
    assert b"RunEnded" not in (tmp_path / "journal" / "events.jsonl").read_bytes()
    again = ControlProcess(orders(tmp_path))
    again.start()
    ended = again.finish("finished", 30.0)
    again.close(30.0)
    assert again.pid is None
    assert ended is not None
    assert ended["fault"] is None
    assert b"RunEnded" in (tmp_path / "journal" / "events.jsonl").read_bytes()
