"""A group of any size goes on from the newest whole state, the same on every rank, and no row is lost or doubled."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_group import GlooGroup, RankError
from scripted import MemoryReporter, Rows, ScriptedLink, two_layers

from rex_ray.core.errors import ConfigError, StorageError
from rex_ray.worker.link import IncidentRecord, NullLink
from rex_ray.worker.opening import open_session
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.saving import archive, snapshots
from rex_ray.worker.saving.archive import Saved
from rex_ray.worker.saving.snapshots import SnapshotPlace, holders
from rex_ray.worker.saving.store import LocalStore
from rex_ray.worker.session import Session

pytestmark = pytest.mark.dist

ROWS, BATCH, EPOCHS = 100, 12, 2
NODES = ("a", "a", "b")


class FolderReporter(MemoryReporter):
    """Saves into a folder, as a storage that all machines share; rank 0 alone may touch it."""

    def __init__(self, root: str, rank: int) -> None:
        super().__init__()
        self.store, self.rank = LocalStore(Path(root)), rank

    def names(self) -> list[str]:
        assert self.rank == 0, "the others are told"
        return sorted(self.store.folders(), reverse=True)

    def restore(self, on_progress: Callable[[], None]) -> Saved | None:
        return archive.newest_whole(self.store, self.names())

    def write(self, state: Mapping[str, Any], on_progress: Callable[[], None]) -> None:
        archive.write(self.store, f"{len(self.names()):04d}", state, on_progress)


def opened_in(
    folder: str, rank: int, link: NullLink | None = None, *, run: str = "run", **options: Any
) -> AbstractContextManager[Session]:
    """Open a session that saves below ``folder``, and takes snapshots on machines of its own per node."""
    node = NODES[rank]
    return open_session(
        options=WorkerOptions(**{"global_batch_size": BATCH, "collective_timeout_s": 15.0, **options}),
        device="test",
        node=node,
        link=link or NullLink(),
        reporter=FolderReporter(f"{folder}/storage", rank),
        snapshots=SnapshotPlace(run=run, node=node, roots=(Path(folder) / f"machine-{node}",)),
    )


class KilledError(Exception):
    """Ends a loop as a crash would: nothing is saved any more."""


def die(*word: Any) -> None:
    raise KilledError(*word)


def train(rank: int, folder: str, dies_at: int | None, saves_at: tuple[int, ...], snapshot_interval_s: float) -> Any:
    """Train up to the end or to a step; return the first step, the rows of each epoch, the parameters, the position."""
    Path(folder, f"machine-{NODES[rank]}").mkdir(parents=True, exist_ok=True)
    snapshots._LARGEST_SHARE = 1e9  # here every step may take one
    rows: dict[int, list[int]] = {epoch: [] for epoch in range(EPOCHS)}
    first, model = None, two_layers()
    try:
        with opened_in(
            folder,
            rank,
            checkpoint_interval_s=3600.0,
            snapshot_interval_s=snapshot_interval_s,
            control_interval_steps=1,
        ) as session:
            first = session.step
            net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
            loader = session.loader(Rows(ROWS))
            for epoch in session.epochs(EPOCHS):
                for ids, inputs, targets in loader:
                    _let_snapshot_end(session)
                    if session.step == dies_at:
                        die()
                    rows[epoch] += ids.tolist()
                    torch.nn.functional.mse_loss(net(inputs), targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if session.step in saves_at:
                        session.save()
                session.report({"epoch": epoch})
    except KilledError:
        pass
    return first, rows, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _let_snapshot_end(session: Session) -> None:
    kept = session._saves._rank.snapshots
    if kept is not None and kept._writer is not None:
        kept._writer.join()


def all_rows(results: list[Any], epoch: int) -> list[int]:
    return [row for _, rows, _ in results for row in rows[epoch]]


def test_f10_resumed_in_mid_epoch_by_groups_of_other_sizes_several_times_every_row_is_seen_once(
    ranks: GlooGroup, pair: GlooGroup, tmp_path: Path
) -> None:
    whole = ranks.run(train, str(tmp_path / "whole"), None, (), 0.0)
    folder = str(tmp_path / "cut")
    # Each group saves before it dies; the next one, of another size, goes on at the very next step.
    parts = [
        ranks.run(train, folder, 3, (2,), 0.0),
        pair.run(train, folder, 7, (4, 6), 0.0),
        [train(0, folder, 12, (11,), 0.0)],
        pair.run(train, folder, 14, (13,), 0.0),
        ranks.run(train, folder, None, (), 0.0),
    ]
    assert [part[0][0] for part in parts] == [0, 3, 7, 12, 14]
    for epoch in range(EPOCHS):
        seen = [row for part in parts for row in all_rows(part, epoch)]
        assert sorted(seen) == list(range(ROWS))
    for _, _, parameters in parts[-1]:
        assert torch.allclose(parameters, whole[0][2], rtol=0, atol=1e-12)


def test_snapshots_are_on_two_nodes_and_a_restart_goes_on_from_the_newest_wherever_it_is(
    ranks: GlooGroup, tmp_path: Path
) -> None:
    assert holders(["a", "a", "b", "c"]) == (0, 2)
    assert holders(["a"]) == (0,)
    whole = ranks.run(train, str(tmp_path / "whole"), None, (), 0.0)
    folder = tmp_path / "cut"
    ranks.run(train, str(folder), 9, (2,), 1e-9)
    held = {node: snapshot_steps(folder, node) for node in ("a", "b")}
    assert all(len(steps) == 2 for steps in held.values()), "the newest two, on rank 0's machine and on another"
    newest = held["a"][-1]
    assert newest >= 7, "one at every boundary, but the one that was under way"

    # The node of rank 0 is lost, and what the other one wrote last is torn: its older copy is there.
    shutil.rmtree(folder / "machine-a")
    os.truncate(snapshot_file(folder, "b", held["b"][-1]), 100)
    second = ranks.run(train, str(folder), None, (), 1e-9)
    assert {first for first, _, _ in second} == {held["b"][0]}
    for _, _, parameters in second:
        assert torch.allclose(parameters, whole[0][2], rtol=0, atol=1e-12)
    for node in ("a", "b"):
        assert list((folder / f"machine-{node}").iterdir()) == [], "nothing is left behind by a run that ended"


def snapshot_steps(folder: Path, node: str) -> list[int]:
    place = SnapshotPlace(run="run", node=node, roots=(folder / f"machine-{node}",))
    return sorted(manifest.step for manifest, _ in place.found())


def snapshot_file(folder: Path, node: str, step: int) -> Path:
    (path,) = (folder / f"machine-{node}").glob(f"*/*/snapshot_{step:010d}-*/{archive.STATE}")
    return path


def resume_only(rank: int, folder: str, run: str = "run") -> Any:
    """Open a session and say where it stands, and what it was told."""
    link = ScriptedLink()
    try:
        with opened_in(folder, rank, link, run=run, snapshot_interval_s=3600.0) as session:
            restored = session._parts.met.restored
            weights = restored["model"]["0.weight"] if restored else None
            session._tracker.flush()
            told = [r.message for r in link.records if isinstance(r, IncidentRecord) and r.kind == "damaged_save"]
            die((session.step, weights, told))
    except KilledError as stopped:
        return stopped.args[0]
    except StorageError as error:
        return type(error).__name__, str(error), []
    return None


def test_a_torn_newest_save_is_passed_over_on_all_ranks_alike_and_none_begins_anew(
    ranks: GlooGroup, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    ranks.run(train, folder, 9, (2, 5, 8), 0.0)
    os.truncate(tmp_path / "storage" / "0002" / archive.STATE, 500)
    results = ranks.run(resume_only, folder)
    assert [step for step, _, _ in results] == [6, 6, 6]
    assert all(torch.equal(weights, results[0][1]) for _, weights, _ in results)
    (trouble,) = set(results[0][2])
    assert "storage/0002" in trouble
    assert "has 500 bytes" in trouble

    for name in ("0000", "0001"):
        (tmp_path / "storage" / name / archive.STATE).unlink()
    for kind, message, _ in ranks.run(resume_only, folder):
        assert kind == "StorageError"
        assert "does not begin anew" in message


def test_snapshots_of_another_run_or_older_than_the_save_are_not_looked_at(ranks: GlooGroup, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks.run(train, folder, 6, (2,), 1e-9)  # snapshots of about step 5, a save of step 3
    assert snapshot_steps(tmp_path, "a")[-1] > 3
    assert {step for step, _, _ in ranks.run(resume_only, folder, "another run")} == {3}
    for step in snapshot_steps(tmp_path, "a")[1:] + snapshot_steps(tmp_path, "b")[1:]:
        assert step > 3
    # Only snapshots that are older than the save are left.
    for node in ("a", "b"):
        for step in snapshot_steps(tmp_path, node):
            os.truncate(snapshot_file(tmp_path, node, step), 10)
    assert {step for step, _, _ in ranks.run(resume_only, folder)} == {3}


class SlowStorage(FolderReporter):
    """Fails for two seconds, then works."""

    def __init__(self, root: str, rank: int) -> None:
        super().__init__(root, rank)
        self.began: float | None = None

    def write(self, state: Mapping[str, Any], on_progress: Callable[[], None]) -> None:
        self.began = self.began or time.monotonic()
        if time.monotonic() < self.began + 2.0:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(state, on_progress)


def save_slowly(rank: int, folder: str, retry_s: float) -> bool:
    reporter = SlowStorage(folder, rank)
    options = WorkerOptions(global_batch_size=BATCH, collective_timeout_s=1.0, storage_retry_s=retry_s)
    session_in = open_session(options=options, device="test", node="a", link=NullLink(), reporter=reporter)
    try:
        with session_in as session:
            session.save()
            (saved,) = reporter.saves
            session.pool_sum(1)  # the ranks are still in step
            written = saved[1] is not None
    except StorageError:
        return written  # it was refused once more at the end
    return written


@pytest.mark.parametrize(("retry_s", "written"), [(20.0, True), (0.3, False)])
def test_f8_no_rank_gives_up_while_rank_0_tries_again_and_all_know_the_outcome(
    ranks: GlooGroup, tmp_path: Path, retry_s: float, written: bool
) -> None:
    assert ranks.run(save_slowly, str(tmp_path), retry_s) == [written] * 3


class Unusable(FolderReporter):
    def check(self) -> None:
        raise ConfigError("the storage /data cannot be used: the file system is read-only")


def start_unusable(rank: int, folder: str) -> None:
    with open_session(
        options=WorkerOptions(global_batch_size=BATCH, collective_timeout_s=10.0),
        device="test",
        node="a",
        link=NullLink(),
        reporter=Unusable(folder, rank),
    ):
        raise AssertionError("it must not open")


def test_f8_a_storage_that_cannot_be_used_stops_every_rank_at_once(ranks: GlooGroup, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(start_unusable, str(tmp_path))
    assert all("ConfigError: the storage /data cannot be used" in (text or "") for text in caught.value.errors)
