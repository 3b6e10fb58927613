"""What an elastic run needs beside Ray: notices of drained nodes, waits, profiles on disk, who hears of a save."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import FailureConfig, ScalingConfig

from rex_ray import ConfigError, LinkError, RexConfig, RexTrainer
from rex_ray.control.commands import RequestCheckpoint
from rex_ray.core.types import LearntShape, WorkerSpec
from rex_ray.hosting.emission import Emission
from rex_ray.hosting.listener import Listener
from rex_ray.hosting.profile_files import PROFILES_FILE, profiles_to_begin_with, read_profiles, write_profiles
from rex_ray.train import drains, worker_loop
from rex_ray.train.drains import LAST_SAVE_S, DrainWatch, draining_nodes, node_tag, wait_out_notice
from rex_ray.train.waits import quick_restarts, shorter_waits
from rex_ray.worker.link import SaveRequest

NODES = {name: letter * 56 for name, letter in (("one", "a"), ("two", "b"), ("other", "c"))}
WORKERS = [
    WorkerSpec(rank=0, device="T4", node=f"host/{node_tag(NODES['one'])}"),
    WorkerSpec(rank=1, device="V100", node=f"host/{node_tag(NODES['two'])}"),
    WorkerSpec(rank=2, device="V100", node=f"host/{node_tag(NODES['two'])}"),
]
SHAPES = (LearntShape(device="T4", num_rows=(8.0,), own_s=(0.1,), weights=(3.0,)),)


def test_f5_a_drained_node_is_noticed_once_and_once_more_when_its_time_has_nearly_come():
    watch = DrainWatch()
    drained = {NODES["two"]: 100_000, NODES["other"]: 100_000}
    (first,) = watch.notices("g", WORKERS, drained, now_ms=70_000)
    assert (first.ranks, first.left_us, first.generation) == ((1, 2), 30_000_000, "g")
    assert watch.notices("g", WORKERS, drained, now_ms=99_999 - LAST_SAVE_S * 1e3) == []
    (last,) = watch.notices("g", WORKERS, drained, now_ms=100_000 - LAST_SAVE_S * 1e3)
    assert last.left_us == LAST_SAVE_S * 1e6
    for now_ms in (95_000, 100_000, 200_000):
        assert watch.notices("g", WORKERS, drained, now_ms=now_ms) == []
    (again,) = watch.notices("later", WORKERS, drained, now_ms=200_000)
    assert again.left_us == 0, "another group is told, too"


def test_a_node_without_a_deadline_or_with_little_time_is_noticed_once():
    for deadline_ms, left_us in ((0, None), (6_000, 5_000_000)):
        watch = DrainWatch()
        (only,) = watch.notices("g", WORKERS, {NODES["one"]: deadline_ms}, now_ms=1_000)
        assert (only.ranks, only.left_us) == ((0,), left_us)
        assert watch.notices("g", WORKERS, {NODES["one"]: deadline_ms}, now_ms=5_000) == []


@pytest.mark.parametrize(("left_s", "waits_s"), [(None, 0), (120.0, 0), (8.0, 18.0), (-2.0, 10.0), (-60.0, 0)])
def test_f5_peers_that_go_when_notice_said_are_not_reported_as_a_failure_before_ray_has_counted_it(
    monkeypatch, left_s, waits_s
):
    slept = [0.0]
    monkeypatch.setattr(drains.time, "sleep", slept.append)
    monkeypatch.setattr(drains, "_notice_left_s", lambda: left_s)
    wait_out_notice()
    assert sum(slept) == waits_s


def test_f5_a_backends_own_error_is_waited_out_too_though_only_the_session_makes_it_a_link_error(monkeypatch):
    waited = []

    @contextmanager
    def session_that_explains(**_: Any) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LinkError("rank 0 waited for rank 1") from error

    def loop() -> None:
        raise RuntimeError("gloo: connection closed by peer")

    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 2)
    monkeypatch.setattr(worker_loop.ray.train, "get_context", lambda: context)
    monkeypatch.setattr(worker_loop.ray.train.torch, "get_device", lambda: None)
    monkeypatch.setattr(worker_loop, "device_kind", str)
    monkeypatch.setattr(worker_loop, "_node_name", str)
    monkeypatch.setattr(worker_loop, "RayLink", lambda *_: None)
    monkeypatch.setattr(worker_loop, "RayReporter", lambda _: None)
    monkeypatch.setattr(worker_loop, "open_session", session_that_explains)
    monkeypatch.setattr(worker_loop, "wait_out_notice", lambda: waited.append(True))
    options = RexConfig(global_batch_size=32).worker_options()
    wiring = worker_loop.Wiring(options=options, device_label="label", control=None, queue=Any, run_id="run")
    with pytest.raises(LinkError):
        worker_loop.run_worker({}, loop=loop, wiring=wiring)
    assert waited == [True]


def test_a_ray_that_does_not_say_what_it_drains_costs_no_more_than_a_line(monkeypatch, caplog):
    monkeypatch.setattr(drains, "_cannot_tell", False)
    monkeypatch.setattr(drains.ray._private.state, "state", None)
    assert draining_nodes() == {}
    assert draining_nodes() == {}
    assert len([line for line in caplog.messages if "no save is made ahead" in line]) == 1


def test_waits_are_shorter_where_that_helps_and_never_those_of_the_user(monkeypatch):
    elastic, fixed = ScalingConfig(num_workers=(1, 4)), ScalingConfig(num_workers=4)
    start = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
    assert start in shorter_waits(elastic, FailureConfig())
    assert start not in shorter_waits(fixed, FailureConfig()), "it has nothing better to try"
    assert start not in shorter_waits(elastic, FailureConfig(controller_failure_limit=2)), "it would be used up"

    monkeypatch.delenv(start, raising=False)
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "7")
    with quick_restarts(elastic, None):
        assert os.environ[start] == "5"
        assert os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] == "7"
    assert start not in os.environ
    assert os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] == "7"


def test_an_elastic_group_with_a_selector_per_worker_is_refused():
    each = [{"ray.io/accelerator-type": "T4"}, {"ray.io/accelerator-type": "V100"}]
    with pytest.raises(ConfigError, match=r"cannot shrink.*\{'ray.io/accelerator-type': 'in\(T4, V100\)'\}"):
        RexTrainer(
            lambda: None,
            rex_config=RexConfig(global_batch_size=32),
            scaling_config=ScalingConfig(num_workers=(1, 2), label_selector=each),
        )


def test_profiles_are_found_by_file_run_and_journal_and_missed_in_words(tmp_path: Path):
    run = tmp_path / "run"
    (run / "rex_ray" / "journal").mkdir(parents=True)
    write_profiles(run / "rex_ray" / PROFILES_FILE, SHAPES)
    for source in (run, run / "rex_ray", run / "rex_ray" / "journal", run / "rex_ray" / PROFILES_FILE):
        assert read_profiles(source) == SHAPES
    assert [path.name for path in (run / "rex_ray").iterdir()] != [], "no torn file is left"
    assert sorted(path.name for path in (run / "rex_ray").iterdir()) == ["journal", PROFILES_FILE]
    with pytest.raises(ConfigError, match=r"holds no profiles: there is neither .*rex_ray.profiles.json"):
        read_profiles(tmp_path)
    with pytest.raises(ConfigError, match="holds no profiles"):
        RexTrainer(
            lambda: None,
            rex_config=RexConfig(global_batch_size=32, learn_from=str(tmp_path / "nowhere")),
            scaling_config=ScalingConfig(num_workers=1),
        )


def test_a_run_taken_up_again_goes_on_from_its_own_profiles_unless_told_otherwise(tmp_path: Path, caplog):
    assert profiles_to_begin_with(None, tmp_path) == ()
    write_profiles(tmp_path / PROFILES_FILE, SHAPES)
    assert profiles_to_begin_with(None, tmp_path) == SHAPES
    other = (LearntShape(device="A100", num_rows=(8.0,), own_s=(0.1,), weights=(3.0,)),)
    write_profiles(tmp_path / "other.json", other)
    assert profiles_to_begin_with(str(tmp_path / "other.json"), tmp_path) == other
    (tmp_path / PROFILES_FILE).write_text("{torn", encoding="utf-8")
    assert profiles_to_begin_with(None, tmp_path) == ()
    assert "the run's own profiles are not used" in caplog.text
    with pytest.raises(ConfigError, match=r"learn_from: .*not valid JSON"):
        profiles_to_begin_with(str(tmp_path), tmp_path / "new")


def test_a_request_for_a_save_reaches_its_own_group_once():
    woken = []
    emission = Emission(lambda _: None, lambda: None, lambda: woken.append(True))  # type: ignore[arg-type, return-value]
    assert emission.newer_save("g", -1) is None
    emission.emit(RequestCheckpoint(generation="g", number=5, reason="drained"))
    assert woken == [True]
    request = emission.newer_save("g", -1)
    assert request == SaveRequest(number=5, reason="drained")
    assert emission.newer_save("g", 5) is None
    assert emission.newer_save("later", -1) is None

    listener = Listener(None)
    listener.hear(request)
    listener.hear(SaveRequest(number=3, reason="late"))
    assert (listener.save, listener.known_save, listener.known_version) == (request, 5, None)
