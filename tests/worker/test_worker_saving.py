"""A save is whole or it is no save: written, checked, tried again, and never believed when it was damaged."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import MemoryReporter, Rows, ScriptedLink, opened, two_layers

from rex_ray.core.errors import ConfigError, RexError, StorageError
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.link import IncidentRecord
from rex_ray.worker.measuring.timing import now_s
from rex_ray.worker.saving import archive, manifest, patience, writing
from rex_ray.worker.saving.checking import checked
from rex_ray.worker.saving.manifest import MANIFEST, FileFacts, Manifest
from rex_ray.worker.saving.patience import patiently
from rex_ray.worker.saving.restoring import newest_state
from rex_ray.worker.saving.snapshots import SnapshotPlace, Snapshots
from rex_ray.worker.saving.store import LocalStore, check_storage

STATE = archive.STATE


def state_at(step: int) -> dict[str, Any]:
    model = two_layers()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(2, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "registered": {"ema": {"count": 3}},
        "position": {"epoch": 1, "cursor": 24, "step": step, "dataset_size": 36, "seed": 0},
        "lr_factor": 1.0,
        "allocation": {"version": 2, "local_batch_sizes": [5, 7], "lr_factor": 1.0, "devices": ["T4", "V100"]},
        "rng": {"cpu": torch.stack([torch.get_rng_state()] * 2), "cuda": None},
        "generation": "abcdef0123456789",
    }


@pytest.fixture
def three(tmp_path: Path) -> LocalStore:
    """Three saves, of steps 10, 20 and 30."""
    store = LocalStore(tmp_path / "run")
    for number in (1, 2, 3):
        archive.write(store, name_of(number), state_at(10 * number))
    return store


def name_of(number: int) -> str:
    return f"checkpoint_{number:06d}-0123abcd"


NEWEST_FIRST = [name_of(3), name_of(2), name_of(1)]


def test_a_save_comes_back_as_it_was_and_its_manifest_says_what_it_is(three: LocalStore) -> None:
    saved = archive.newest_whole(three, NEWEST_FIRST)
    assert saved is not None
    assert (saved.step, saved.troubles) == (30, ())
    state, was = archive.state_of(saved.data), state_at(30)
    assert torch.equal(state["model"]["0.weight"], was["model"]["0.weight"])
    assert state["position"] == was["position"]
    told = archive.read_manifest(three, name_of(3))
    assert (told.epoch, told.cursor, told.step, told.num_ranks) == (1, 24, 30, 2)
    assert {"model", "optimizer", "rng", "position", "allocation"} <= set(told.parts)
    assert sorted(path.name for path in (three.root / name_of(3)).iterdir()) == [MANIFEST, STATE]


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda save: os.truncate(save / STATE, 1000), "has 1000 bytes where the manifest says"),
    "longer": (lambda save: append(save / STATE, b"x"), "has more than .* bytes"),
    "a flipped bit": (lambda save: flip(save / STATE, 3000), "not the ones that were written"),
    "no state": (lambda save: (save / STATE).unlink(), "state.pt is missing"),
    "no manifest": (lambda save: (save / MANIFEST).unlink(), "never finished, or was damaged"),
    "half a manifest": (lambda save: os.truncate(save / MANIFEST, 200), "no JSON"),
    "an edited manifest": (lambda save: edit(save, step=31), "its own checksum"),
    "another save's state": (lambda save: shutil.copy(save.parent / name_of(2) / STATE, save), "not the ones"),
    "another save's files": (
        lambda save: [shutil.copy(save.parent / name_of(2) / name, save) for name in (STATE, MANIFEST)],
        f"belongs to {name_of(2)}",
    ),
    "nothing there": (shutil.rmtree, "never finished, or was damaged"),
}


def append(path: Path, more: bytes) -> None:
    path.write_bytes(path.read_bytes() + more)


def flip(path: Path, at: int, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= bits
    path.write_bytes(data)


def edit(save: Path, **fields: Any) -> None:
    document = {**json.loads((save / MANIFEST).read_text()), **fields}
    (save / MANIFEST).write_text(json.dumps(document))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_save_is_passed_over_with_its_path_and_what_is_wrong(three: LocalStore, damage: str) -> None:
    hurt, why = DAMAGES[damage]
    hurt(three.root / name_of(3))
    saved = archive.newest_whole(three, NEWEST_FIRST)
    assert saved is not None
    assert saved.step == 20
    (trouble,) = saved.troubles
    assert str(three.root / name_of(3)) in trouble
    with pytest.raises(StorageError, match=why):
        archive.read(three, name_of(3))


def test_whatever_a_storage_raises_is_damage_to_one_save_alone(three: LocalStore) -> None:
    def read(store: LocalStore, name: str) -> Any:
        if name == name_of(3):
            raise KeyError("not found in the client's cache")
        return archive.read(store, name)

    saved = archive.newest_whole(three, NEWEST_FIRST, read)  # type: ignore[arg-type]
    assert saved is not None
    assert saved.step == 20
    assert "client's cache" in saved.troubles[0]


def test_training_never_begins_anew_where_saves_were_and_none_is_whole(three: LocalStore) -> None:
    for name in NEWEST_FIRST:
        flip(three.root / name / STATE, 2000)
    with pytest.raises(StorageError, match="does not begin anew by itself") as caught:
        archive.newest_whole(three, NEWEST_FIRST)
    assert all(str(three.root / name) in str(caught.value) for name in NEWEST_FIRST)
    assert archive.newest_whole(three, []) is None


def put(store: LocalStore, data: bytes, name: str = "checkpoint_000009-00000000", **fields: Any) -> str:
    """Write anything as the state of a save whose manifest is in order."""
    import hashlib

    facts = FileFacts(num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    whole: dict[str, Any] = {
        "name": name, "generation": "g", "num_ranks": 2, "epoch": 1, "cursor": 24, "step": 90, "parts": (),
        "files": {STATE: facts}, **fields,
    }  # fmt: skip
    for file, content in ((STATE, data), (MANIFEST, manifest.encode(Manifest(**whole)))):
        with store.create(name, file) as out:
            out.write(content)
    return name


class Evil:
    """Unpickling it would leave a trace."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_no_code_of_a_save_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore(tmp_path / "run")
    file = io.BytesIO()
    torch.save({**state_at(90), "model": Evil()}, file)
    for data in (file.getvalue(), pickle.dumps(Evil())):
        with pytest.raises(StorageError, match="cannot be read as tensors and plain values"):
            archive.read(store, put(store, data))
    assert not (tmp_path / "executed").exists()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3) | st.just(torch.zeros(2)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
FIELDS = st.sampled_from(["position", "registered", "rng", "allocation", "lr_factor", "generation"])
INNER = st.sampled_from(["epoch", "cursor", "step", "seed", "dataset_size", "cpu", "cuda", "version", "devices"])


@given(field=FIELDS, inner=INNER, value=VALUES, deep=st.booleans(), drop=st.booleans())
@settings(max_examples=60)
def test_fuzz_fields_of_other_types_are_told_and_nothing_else_is_raised(
    field: str, inner: str, value: Any, deep: bool, drop: bool
) -> None:
    state = state_at(30)
    target = state[field] if deep and isinstance(state[field], dict) else state
    name = inner if target is not state else field
    target.pop(name, None)
    if not drop:
        target[name] = value
    try:
        sound = checked(state)
    except StorageError:
        return
    # What is accepted can be gone on from.
    for count in ("epoch", "cursor", "step", "seed"):
        assert isinstance(sound["position"][count], int)
    assert sound["rng"]["cpu"].dtype == torch.uint8
    if (allocation := sound.get("allocation")) is not None:
        assert sum(allocation["local_batch_sizes"]) > 0


@given(data=st.data(), where=st.sampled_from([STATE, MANIFEST]))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fuzz_any_damage_to_any_file_is_a_fallback_and_never_a_wrong_state(
    three: LocalStore, data: st.DataObject, where: str
) -> None:
    file = three.root / name_of(3) / where
    was = file.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "flip", "insert", "replace", "zero"]))
    at = data.draw(st.integers(0, len(was) - 1))
    some = data.draw(st.binary(min_size=1, max_size=20))
    now = {
        "cut": was[:at],
        "flip": was[:at] + bytes([was[at] ^ (some[0] or 1)]) + was[at + 1 :],
        "insert": was[:at] + some + was[at:],
        "replace": some,
        "zero": was[:at] + bytes(len(was) - at),
    }[kind]
    file.write_bytes(now)
    try:
        saved = archive.newest_whole(three, NEWEST_FIRST)
        assert saved is not None
        if saved.step == 30:  # white space in the manifest, perhaps: then it says the same
            assert torch.equal(archive.state_of(saved.data)["model"]["0.weight"], state_at(30)["model"]["0.weight"])
            assert where == MANIFEST or now == was
        else:
            assert saved.step == 20
            assert len(saved.troubles) == 1
    finally:
        file.write_bytes(was)


@settings(max_examples=40)
@given(text=st.binary(max_size=60) | VALUES.map(lambda value: repr(value).encode()) | st.just(b"[" * 100_000))
def test_fuzz_a_manifest_of_anything_is_a_clear_error(text: bytes) -> None:
    with pytest.raises(StorageError):
        manifest.decode(text)


@settings(max_examples=60)
@given(field=st.sampled_from(["name", "num_ranks", "epoch", "step", "parts", "files", "more", "format"]), value=VALUES)
def test_fuzz_a_manifest_with_fields_of_other_types_and_the_right_checksum_is_refused(field: str, value: Any) -> None:
    if isinstance(value, torch.Tensor) or "tensor" in repr(value):
        return
    whole = json.loads(
        manifest.encode(
            Manifest(name="n", generation="g", num_ranks=1, epoch=0, cursor=0, step=1, parts=("model",), files={})
        )
    )
    del whole["checksum"]
    was = whole.get(field)
    whole[field] = value
    whole["checksum"] = manifest._checksum(whole)
    try:
        read = manifest.decode(json.dumps(whole).encode())
    except StorageError:
        return
    assert field != "more"
    assert type(getattr(read, field)) in (str, int, tuple, dict) or value == was


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)

    def half() -> None:
        with store.create("save", "file") as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert list((tmp_path / "save").iterdir()) == []


class Refusing(LocalStore):
    """Raises what it is told when a file is written."""

    error = OSError(errno.EROFS, "Read-only file system")

    def create(self, folder: str, name: str) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.EROFS, "Read-only file system"), "the file system is read-only"),
        (OSError(errno.ENOSPC, "No space left on device"), "no space is left"),
        (PermissionError(errno.EACCES, "Permission denied"), "permission is missing"),
        (ConnectionError("AWS Error ACCESS_DENIED"), "AWS Error ACCESS_DENIED"),
    ],
)
def test_f8_a_storage_that_cannot_be_used_is_told_with_path_and_cause(
    tmp_path: Path, error: Exception, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Refusing, "error", error)
    with pytest.raises(ConfigError, match=cause) as caught:
        check_storage(Refusing(tmp_path / "runs"))
    assert str(tmp_path / "runs") in str(caught.value)
    check_storage(LocalStore(tmp_path / "runs"))
    assert list((tmp_path / "runs").iterdir()) == [], "a probe leaves nothing"


def test_a_path_below_a_file_is_no_storage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no folder"):
        check_storage(LocalStore(tmp_path / "file" / "runs"))


class Flaky(MemoryReporter):
    """Refuses some attempts to write, counted over all saves; keeps what it took."""

    def __init__(self, refused: Callable[[int], bool], error: Exception) -> None:
        super().__init__()
        self.refused, self.error = refused, error
        self.num_attempts = 0

    def write(self, state: Any, on_progress: Callable[[], None]) -> None:
        self.num_attempts += 1
        if self.refused(self.num_attempts):
            raise self.error


def trained(reporter: MemoryReporter, num_epochs: int = 4, **options: Any) -> ScriptedLink:
    link = ScriptedLink()
    with opened(link, reporter, checkpoint_interval_s=0.0, **options) as session:
        model = two_layers()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        loader = session.loader(Rows(24))
        for epoch in session.epochs(num_epochs):
            for _, inputs, targets in loader:
                torch.nn.functional.mse_loss(net(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            session.report({"epoch": epoch})
    return link


def incidents(link: ScriptedLink) -> list[str]:
    return [f"{r.kind}: {r.message}" for r in link.records if isinstance(r, IncidentRecord) and r.kind == "storage"]


def test_f8_a_remote_error_twice_is_tried_again_and_told(caplog: pytest.LogCaptureFixture) -> None:
    reporter = Flaky(lambda attempt: attempt in (2, 3), ConnectionError("remote: 503 slow down"))
    link = trained(reporter)
    assert [(m["epoch"], s is not None) for m, s in reporter.saves] == [(k, True) for k in range(4)]
    (told,) = incidents(link)
    assert "saved after the storage failed 2 times" in told
    assert "503 slow down" in told
    assert "503 slow down" in caplog.text


def test_f8_a_full_disk_at_save_3_is_given_up_loudly_and_training_and_its_results_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    full = {"from": 3}
    reporter = Flaky(lambda attempt: attempt >= full["from"], OSError(errno.ENOSPC, "No space left on device"))

    class Freed(Flaky):
        """Somebody makes room once it was said."""

        def report(self, metrics: Any, state: Any) -> None:
            super().report(metrics, state)
            if state is None:
                self.refused = lambda attempt: False

    reporter.__class__ = Freed
    link = trained(reporter, storage_retry_s=0.6)
    assert [(m["epoch"], s is not None) for m, s in reporter.saves] == [(0, True), (1, True), (2, False), (3, True)]
    (told,) = incidents(link)
    assert "gave up a save" in told
    assert "no space is left" in told
    assert "gave up a save" in caplog.text
    assert len(link.metrics) == 4, "the journal has every metric all the same"


def test_a_last_save_that_fails_is_tried_once_more_and_never_lost_without_an_error() -> None:
    reporter = Flaky(lambda attempt: attempt > 1, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(StorageError, match=r"last save could not be written: no space is left.*under its name"):
        trained(reporter, num_epochs=2, storage_retry_s=0.0)
    assert [s is not None for _, s in reporter.saves] == [True, False, False]
    assert reporter.num_attempts == 3


def test_pauses_grow_and_a_mistake_of_our_own_is_not_tried_again() -> None:
    calls = []

    def fail(error: Exception) -> None:
        calls.append(error)
        raise error

    with pytest.raises(OSError, match="again"):
        patiently(lambda: fail(OSError("again")), limit_s=0.8)
    assert len(calls) == 3  # at 0, .25 and .75 seconds
    calls.clear()
    with pytest.raises(RexError):
        patiently(lambda: fail(RexError("ours")), limit_s=60.0)
    assert len(calls) == 1


def test_what_fails_after_a_long_attempt_is_tried_again_all_the_same() -> None:
    calls = []

    def slow() -> str:
        calls.append(1)
        time.sleep(0.3)
        if len(calls) == 1:
            raise OSError("lost at the last byte")
        return "done"

    assert patiently(slow, limit_s=0.28) == "done"


class Stuck(MemoryReporter):
    """Its storage's client never comes back from the first write, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, state: Any, on_progress: Callable[[], None]) -> None:
        self.released.wait(30.0)

    def restore(self, on_progress: Callable[[], None]) -> Any:
        self.released.wait(30.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_LEAST_STALL_S", 0.1)
    monkeypatch.setattr(patience, "_LONGEST_PAUSE_S", 0.1)


@pytest.mark.usefixtures("impatient")
def test_a_storage_that_hangs_when_a_run_begins_is_an_error() -> None:
    reporter = Stuck()
    with pytest.raises(StorageError, match=r"look for a save was given up, since the storage gave nothing for"):
        newest_state(SideGroup(1.0), reporter, None, 0.0)
    reporter.released.set()


@pytest.mark.usefixtures("impatient")
def test_a_storage_that_hangs_is_left_to_itself_until_it_answers_again() -> None:
    reporter = Stuck()
    writer = writing.SaveWriter(reporter, SideGroup(1.0), retry_s=0.0)
    for why in ("took nothing for", "still not answered to an earlier save"):
        attempts = writer.write(state_at(1))
        assert not attempts.written
        assert why in attempts.failures[0]
    reporter.released.set()
    threads = [thread for thread in threading.enumerate() if thread.name == "rex_ray-errand"]
    for thread in threads:
        thread.join(10.0)
    assert writer.write(state_at(2)).written


def snapshots_in(folder: Path, told: list[str], interval_s: float = 1e-9) -> Snapshots:
    place = SnapshotPlace(run="run", node="here/0", roots=(folder,))
    return Snapshots(place, keeps=True, interval_s=interval_s, on_trouble=told.append)


def test_snapshots_cost_a_hundredth_of_the_time_at_most_and_the_newest_two_are_kept(tmp_path: Path) -> None:
    told: list[str] = []
    kept = snapshots_in(tmp_path, told)
    assert kept.due()

    def collected(step: int) -> dict[str, Any]:
        time.sleep(0.02)
        return state_at(step)

    state = state_at(0)
    for step in (10, 20, 30):
        kept.take(lambda step=step: collected(step))  # type: ignore[misc]
        assert not kept.due()
        assert kept._due_s - now_s() > 1.9, "20 ms, so not for 2 s"
        kept.close(10.0, keep=True)
    place = SnapshotPlace(run="run", node="here/1", roots=(tmp_path,))
    assert sorted(manifest.step for manifest, _ in place.found()) == [20, 30], "also another node's on this machine"
    kept.take(lambda: state)
    state["model"]["0.weight"].zero_()  # the next step, while the copy is being written
    kept.close(10.0, keep=True)
    (written,) = [(store, manifest.name) for manifest, store in place.found() if manifest.step == 0]
    assert archive.state_of(archive.read(*written).data)["model"]["0.weight"].abs().sum() > 0
    kept.close(10.0, keep=False)
    assert list(tmp_path.iterdir()) == []
    assert told == []


def test_a_machine_without_room_takes_no_snapshot_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    kept = snapshots_in(tmp_path, told)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    for step in (1, 2):
        kept.take(lambda step=step: state_at(step))  # type: ignore[misc]
        kept.close(10.0, keep=True)
    (trouble,) = told
    assert "no room for snapshots" in trouble
    assert list(tmp_path.iterdir()) == []


class Opaque:
    """Holds a NumPy float from its second state on: a float to Python, an object to whoever reads it back."""

    num_calls = 0

    def state_dict(self) -> dict[str, Any]:
        self.num_calls += 1
        return {"best": np.float64(0.5) if self.num_calls > 1 else 0.5, "kept": OrderedDict(a=torch.zeros(2))}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def test_a_part_that_could_not_be_read_back_is_refused_by_name_at_any_save() -> None:
    with opened() as session:
        session.register(mine=Opaque())
        session.save()
        with pytest.raises(ConfigError, match="state_dict of 'mine' holds more than tensors"):
            session.save()


def test_a_save_of_another_model_is_told_with_the_remedy() -> None:
    reporter = MemoryReporter()
    trained(reporter, num_epochs=1)
    with opened(reporter=MemoryReporter(reporter.saves[-1][1])) as session:
        other = two_layers(num_features=9)
        with pytest.raises(ConfigError, match=r"the model does not take .*size mismatch.*another name"):
            session.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
