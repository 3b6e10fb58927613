"""Saves in a run's storage: which of its folders count, and which is the newest whole one."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
import torch
from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import _CheckpointManagerState

from rex_ray.core.errors import ConfigError, StorageError
from rex_ray.core.types import LearntShape
from rex_ray.hosting.profile_files import PROFILES_FILE, profiles_to_begin_with
from rex_ray.train import reporter as reporter_module
from rex_ray.train.arrow_store import ArrowStore, store_of
from rex_ray.train.checkpoint_list import LIST_FILE, put_aside_a_damaged_list
from rex_ray.train.control_actor import ControlActor
from rex_ray.train.reporter import RayReporter
from rex_ray.train.snapshot_folders import remove_stale_snapshots
from rex_ray.worker.saving.archive import Saved
from rex_ray.worker.saving.snapshots import SNAPSHOT_PREFIX
from rex_ray.worker.saving.store import check_storage


def state_at(step: int) -> dict[str, Any]:
    return {
        "registered": {},
        "position": {"epoch": 0, "cursor": step, "step": step, "dataset_size": 36, "seed": 0},
        "rng": {"cpu": torch.zeros(2, 8, dtype=torch.uint8), "cuda": None},
        "generation": "g",
    }


class Run:
    """What Ray Train would know of a run."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.reported: set[str] = set()
        self.calls: list[dict[str, Any]] = []
        storage = SimpleNamespace(storage_filesystem=pyarrow.fs.LocalFileSystem(), experiment_fs_path=str(root))
        context = SimpleNamespace(get_storage=lambda: storage, get_world_rank=lambda: 0)
        monkeypatch.setattr(reporter_module.ray.train, "get_context", lambda: context)
        monkeypatch.setattr(reporter_module.ray.train, "report", self._report)
        monkeypatch.setattr(reporter_module, "_reported", lambda: self.reported)

    def _report(self, metrics: dict[str, Any], checkpoint: Any = None, **options: Any) -> None:
        self.calls.append(metrics)
        if checkpoint is not None:
            self.reported.add(Path(checkpoint.path).name)

    def save(self, step: int) -> Path:
        """Save as a session does; return the save's folder."""
        reporter, before = RayReporter(retry_s=0.0), self.reported.copy()
        reporter.write(state_at(step), lambda: None)
        reporter.report({"step": step}, state_at(step))
        (name,) = self.reported - before
        return self.root / name


def restored() -> Saved | None:
    return RayReporter(retry_s=0.0).restore(lambda: None)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path / "run", monkeypatch)


def test_saves_are_numbered_over_the_whole_run_and_the_newest_comes_back(run: Run) -> None:
    assert restored() is None
    folders = [run.save(step) for step in (3, 6, 9)]
    assert [folder.name[:17] for folder in folders] == [f"checkpoint_00000{k}" for k in (1, 2, 3)]
    saved = restored()
    assert saved is not None
    assert (saved.step, saved.where) == (9, str(folders[-1]))
    assert list(run.root.rglob("*.tmp")) == []


def test_a_save_that_was_written_but_not_reported_counts_and_one_that_was_never_finished_does_not(run: Run) -> None:
    run.save(3)
    late = run.save(6)
    run.reported.discard(late.name)  # the worker died before it could report
    dying = run.root / "checkpoint_000003-0123abcd"
    dying.mkdir()
    (dying / "state.pt.tmp").write_bytes(b"half")
    reporter = RayReporter(retry_s=0.0)
    saved = reporter.restore(lambda: None)
    assert saved is not None
    assert (saved.step, saved.troubles) == (6, ())
    reporter.write(state_at(9), lambda: None)
    assert not dying.exists(), "removed before the first save of the new group"
    assert sorted(path.name[:17] for path in run.root.iterdir()) == [f"checkpoint_00000{k}" for k in (1, 2, 4)]


def test_a_first_save_that_was_never_finished_is_a_fresh_start(run: Run) -> None:
    (run.root / "checkpoint_000001-0123abcd").mkdir(parents=True)
    assert restored() is None


def test_a_reported_save_that_is_gone_or_torn_is_told_and_all_of_them_are_an_error(run: Run) -> None:
    folders = [run.save(step) for step in (3, 6, 9)]
    (folders[2] / "manifest.json").unlink()
    os.truncate(folders[1] / "state.pt", 10)
    saved = restored()
    assert saved is not None
    assert saved.step == 3
    assert [folder.name in trouble for folder, trouble in zip(folders[:0:-1], saved.troubles, strict=True)] == [
        True
    ] * 2
    (folders[0] / "state.pt").unlink()
    with pytest.raises(StorageError, match="does not begin anew"):
        restored()
    assert all(folder.exists() for folder in folders), "what was reported is left for whoever looks into it"


def test_checkpoints_of_something_else_are_no_saves(run: Run) -> None:
    (run.root / "checkpoint_2026-01-01_00-00-00").mkdir(parents=True)
    run.reported.add("checkpoint_2026-01-01_00-00-00")
    with pytest.raises(ConfigError, match="another name"):
        restored()


def test_metrics_without_a_save_are_reported_without_a_checkpoint(run: Run) -> None:
    reporter = RayReporter(retry_s=0.0)
    reporter.write(state_at(3), lambda: None)
    reporter.report({"epoch": 0}, None)  # given up
    assert (run.calls, run.reported) == ([{"epoch": 0}], set())


def listed(run: Run, *names: str) -> str:
    state = _CheckpointManagerState(
        checkpoint_results=[{"checkpoint_dir_name": name, "metrics": {}} for name in names],
        checkpoint_report_indices=[*range(len(names))],
        pending_training_results=[],
        pending_validation_specs=[],
        current_report_index=len(names),
        validated_checkpoint_dir_names=[],
        timed_out_validation_checkpoint_dir_names=[],
        failed_validation_checkpoint_dir_names=[],
    )
    text: str = state.model_dump_json()
    (run.root / LIST_FILE).write_text(text)
    return text


@pytest.mark.parametrize(("damage", "word"), [("cut", "is torn"), ("empty", "is torn"), ("gone", "are gone")])
def test_a_list_of_checkpoints_that_ray_would_refuse_is_put_aside(
    run: Run, damage: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert LIST_FILE == CHECKPOINT_MANAGER_SNAPSHOT_FILENAME
    folders = [run.save(step) for step in (3, 6)]
    text = listed(run, *(folder.name for folder in folders))
    store = store_of(run.root.parent, None, run.root.name)
    put_aside_a_damaged_list(store)
    assert (run.root / LIST_FILE).read_text() == text, "a sound one stays as it is"
    if damage == "gone":
        shutil.rmtree(folders[1])
    else:
        (run.root / LIST_FILE).write_text(text[:80] if damage == "cut" else "")
    put_aside_a_damaged_list(store)
    assert word in caplog.text
    assert not (run.root / LIST_FILE).exists()
    assert (run.root / f"{LIST_FILE}.damaged").exists()
    run.reported.clear()
    saved = restored()
    assert saved is not None
    assert saved.step == (3 if damage == "gone" else 6)


def test_without_a_save_a_damaged_list_is_an_error_since_something_else_made_it(run: Run) -> None:
    (run.root / "checkpoint_2026-01-01_00-00-00").mkdir(parents=True)
    (run.root / LIST_FILE).write_text("{")
    with pytest.raises(ConfigError, match=r"is torn, and there is no save .*another name"):
        put_aside_a_damaged_list(store_of(run.root.parent, None, run.root.name))
    assert (run.root / LIST_FILE).exists()


def test_what_a_run_has_learnt_lies_in_its_storage_too_for_a_driver_on_another_machine(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = (LearntShape(device="T4", num_rows=(8.0, 24.0), own_s=(0.1, 0.2), weights=(1.0, 1.0)),)
    store = store_of(run.root.parent, None, run.root.name)
    here = tmp_path / "here"
    here.mkdir()
    actor: Any = ControlActor.__new__(ControlActor)
    actor._host, actor._store = SimpleNamespace(learnt=shapes, memory=None), store
    actor._run_dir = here
    asyncio.run(actor._write_learnt())
    assert profiles_to_begin_with(None, here) == shapes
    assert profiles_to_begin_with(None, tmp_path / "elsewhere", store) == shapes
    (run.root / "rex_ray" / PROFILES_FILE).write_text("{torn")
    assert profiles_to_begin_with(None, tmp_path / "elsewhere", store) == ()
    assert "not used" in caplog.text
    assert profiles_to_begin_with(None, here, store) == shapes, "this machine's own first"


def test_snapshots_of_runs_that_nobody_ended_are_removed_after_a_day(tmp_path: Path) -> None:
    alive, dead = (tmp_path / f"{SNAPSHOT_PREFIX}{name}" / "node" for name in ("alive", "dead"))
    for folder in (alive, dead):
        folder.mkdir(parents=True)
    long_ago = alive.stat().st_mtime - 90_000
    for folder in (alive.parent, dead, dead.parent):
        os.utime(folder, (long_ago, long_ago))
    (tmp_path / "of somebody else").mkdir()
    remove_stale_snapshots((tmp_path,))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of somebody else", alive.parent.name]


def test_a_store_is_where_ray_train_would_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in (tmp_path / "runs", f"file://{tmp_path}/runs", "~/runs"):
        store = store_of(given, None, "mine")
        assert store.root == f"{tmp_path}/runs/mine"
        check_storage(store)
    memory = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    assert store_of("runs", memory, "mine") == ArrowStore(memory, "runs/mine")


def test_an_object_store_is_put_to_once_and_nothing_is_renamed_there(tmp_path: Path) -> None:
    class Bucket:
        """Knows no renaming."""

        type_name = "s3"
        moved = 0

        def __init__(self) -> None:
            self.local = pyarrow.fs.LocalFileSystem()

        def __getattr__(self, name: str) -> Any:
            assert name != "move", "a rename is a copy there"
            return getattr(self.local, name)

    store = ArrowStore(Bucket(), str(tmp_path / "bucket"))
    with store.create("save", "file") as file:
        file.write(b"whole")
    with store.open("save", "file") as file:
        assert file.read() == b"whole"
    assert [store.has("save", name) for name in ("file", "file.tmp")] == [True, False]
    assert store.folders() == ["save"]
