"""Saves on a real Ray cluster: whatever dies, is torn or is full, a run ends as if nothing had disturbed it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ray.train import FailureConfig, RunConfig, ScalingConfig
from row_counter import BATCH, ROWS
from saving_loop import disk, saving_loop, undisturbed
from train_harness import assert_nothing_left, journal_of, steps_of

from rex_ray import ConfigError, RexConfig, RexTrainer
from rex_ray.control.events import GroupStarted, IncidentReported
from rex_ray.control.journal import Journal
from rex_ray.train.checkpoint_list import LIST_FILE
from rex_ray.train.local_cluster import LocalCluster
from rex_ray.worker.saving.snapshots import SNAPSHOT_PREFIX, SnapshotPlace

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

PER_EPOCH = ROWS // BATCH


def trainer_in(tmp_path: Path, cluster: LocalCluster, num_epochs: int, **loop_config: Any) -> RexTrainer:
    flags = tmp_path / "flags"
    flags.mkdir(exist_ok=True)
    return RexTrainer(
        saving_loop,
        train_loop_config={"num_epochs": num_epochs, "flags": str(flags), **loop_config},
        rex_config=RexConfig(
            policy="bsp",
            global_batch_size=BATCH,
            checkpoint_interval_s=0.0,
            snapshot_interval_s=0.01,
            storage_retry_s=1.0,
        ),
        scaling_config=ScalingConfig(num_workers=2, label_selector=cluster.label_selectors),
        run_config=RunConfig(
            name="run",
            storage_path=str(tmp_path / "storage"),
            storage_filesystem=disk(flags),
            failure_config=FailureConfig(max_failures=1),
        ),
    )


def groups_of(journal: Journal) -> list[GroupStarted]:
    return [event for event in journal.events if isinstance(event, GroupStarted)]


def incidents_of(journal: Journal, kind: str) -> list[str]:
    return [event.message for event in journal.events if isinstance(event, IncidentReported) and event.kind == kind]


def saves_in(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "storage" / "run").glob("checkpoint_0*"))


def test_f1_f8_a_killed_worker_a_torn_checkpoint_and_a_full_disk_end_as_if_nothing_had_been(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # the journal of a run whose storage is no path

    # Rank 1 is killed in epoch 1: the group goes on from a snapshot, not from the save at the end of epoch 0.
    first = trainer_in(tmp_path, cluster, num_epochs=2)
    result = first.fit()
    assert result.metrics is not None
    assert result.metrics["score"] == pytest.approx(undisturbed(2), rel=1e-12)
    killed = json.loads((tmp_path / "flags" / "killed").read_text())
    journal = journal_of(first.journal_dir)
    one, two = groups_of(journal)
    assert one.step == 0
    assert PER_EPOCH < killed["snapshot"] <= two.step <= killed["step"]
    assert steps_of(journal)[-1].step == 2 * PER_EPOCH - 1
    assert_nothing_left()
    assert snapshot_folders(tmp_path / "flags") == [], "nothing is left of a run's snapshots"

    # The newest save and Ray's list are torn while nothing runs, and the disk is full at the next epoch's save.
    newest = saves_in(tmp_path)[-1]
    os.truncate(newest / "state.pt", 700)
    os.truncate(tmp_path / "storage" / "run" / LIST_FILE, 40)
    second = trainer_in(tmp_path, cluster, num_epochs=4, full_at=2)
    result = second.fit()
    assert result.metrics is not None
    assert result.metrics["epoch"] == 3
    assert result.metrics["score"] == pytest.approx(undisturbed(4), rel=1e-12)
    journal = journal_of(second.journal_dir)
    (resumed,) = groups_of(journal)
    assert resumed.step < 2 * PER_EPOCH, "the save before the torn one"
    assert one.memory is None
    assert resumed.memory is not None, "the controller goes on with what the earlier one knew"
    (damaged,) = incidents_of(journal, "damaged_save")
    assert newest.name in damaged
    assert "700 bytes" in damaged
    (full,) = incidents_of(journal, "storage")
    assert "gave up a save" in full
    assert "no space is left" in full
    assert not list((tmp_path / "storage" / "run").glob("*/*.tmp"))
    assert_nothing_left()
    assert snapshot_folders(tmp_path / "flags") == []


def snapshot_folders(flags: Path) -> list[Path]:
    """Folders of the snapshots of the runs that left word; other runs share the machine."""
    runs = [path.name.removeprefix("run-") for path in flags.glob("run-*")]
    assert runs
    folders = [root / f"{SNAPSHOT_PREFIX}{run}" for run in runs for root in SnapshotPlace(run="", node="").roots]
    return [folder for folder in folders if folder.exists()]


def test_f8_a_read_only_storage_is_refused_before_anything_starts(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    trainer = trainer_in(tmp_path, cluster, num_epochs=1)
    (tmp_path / "flags" / "read-only").touch()
    with pytest.raises(ConfigError, match="the file system is read-only") as caught:
        trainer.fit()
    assert str(tmp_path / "storage" / "run") in str(caught.value)
    assert not trainer.journal_dir.exists()
    assert_nothing_left()
