"""Saves in a folder: the newest whole one counts, and no more are kept than were asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rex_ray import ConfigError
from rex_ray.core.errors import StorageError
from rex_ray.standalone.folder_reporter import FolderReporter
from rex_ray.worker.saving.manifest import MANIFEST
from rex_ray.worker.saving.store import LocalStore


def state_at(step: int) -> dict[str, Any]:
    return {
        "registered": {},
        "position": {"epoch": 0, "cursor": step, "step": step, "dataset_size": 36, "seed": 0},
        "rng": {"cpu": torch.zeros(2, 8, dtype=torch.uint8), "cuda": None},
        "generation": "g",
    }


def nothing() -> None:
    """No progress to tell."""


def reporter(folder: Path, num_to_keep: int | None = 2) -> FolderReporter:
    return FolderReporter(folder, num_to_keep, retry_s=0.0)


def saved(folder: Path, steps: list[int], num_to_keep: int | None = 2) -> list[Path]:
    writing = reporter(folder, num_to_keep)
    writing.restore(nothing)
    for step in steps:
        writing.write(state_at(step), nothing)
        writing.report({}, {})
    return sorted(folder.glob("checkpoint_*"))


def test_the_newest_saves_are_kept_and_the_newest_is_gone_on_from(tmp_path: Path) -> None:
    kept = saved(tmp_path, [1, 2, 3])
    assert [path.name[:17] for path in kept] == ["checkpoint_000002", "checkpoint_000003"]
    found = reporter(tmp_path).restore(nothing)
    assert found is not None
    assert found.step == 3
    assert len(saved(tmp_path, [4, 5], num_to_keep=None)) == 4, "all of them"


def test_a_torn_save_falls_back_to_the_one_before(tmp_path: Path) -> None:
    _, newest = saved(tmp_path, [1, 2])
    state = newest / "state.pt"
    state.write_bytes(state.read_bytes()[:-1])
    found = reporter(tmp_path).restore(nothing)
    assert found is not None
    assert found.step == 1
    assert newest.name in found.troubles[0]


def test_a_save_that_was_never_finished_is_none_and_makes_room(tmp_path: Path) -> None:
    _, newest = saved(tmp_path, [1, 2])
    (newest / MANIFEST).unlink()
    kept = saved(tmp_path, [3])
    assert newest not in kept
    assert [path.name[:17] for path in kept] == ["checkpoint_000001", "checkpoint_000003"]


def test_without_any_whole_save_nothing_begins_anew(tmp_path: Path) -> None:
    (only,) = saved(tmp_path, [1])
    (only / "state.pt").write_bytes(b"")
    with pytest.raises(StorageError, match="training does not begin anew by itself"):
        reporter(tmp_path).restore(nothing)


def test_a_fresh_start_finds_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    first = reporter(tmp_path)
    first.check()
    assert first.restore(nothing) is None
    assert LocalStore(tmp_path).folders() == []


def test_what_cannot_work_is_said_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_to_keep=0"):
        reporter(tmp_path, num_to_keep=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"training\(output=...\)"):
        reporter(tmp_path / "file").check()
