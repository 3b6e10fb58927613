"""The trackers, against the real packages: one run per job, figures at their steps, a resumed run goes on."""

from __future__ import annotations

import importlib.util
import json
import posixpath
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.errors import ConfigError
from rex_ray.loggers import MLflowLogger, TensorBoardLogger, WandbLogger
from rex_ray.loggers.mlflow_logger import mlflow_name
from rex_ray.loggers.tracker import progress_figures
from rex_ray.watch.seams import Ended, Happened, Progress, Reported, RunInfo, Sight, Watcher, WorkerView

# What their clients warn of on their own account is none of ours.
pytestmark = pytest.mark.filterwarnings("ignore")


def needs(package: str):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed (pip install '.[dev]')")


def run_info(folder: Path, run_id: str = "abc123") -> RunInfo:
    return RunInfo(
        name="cifar10",
        run_id=run_id,
        policy="rex",
        settings={"global_batch_size": 128},
        run_dir=str(folder / "rex_ray"),
    )


def progress(step: int, noise_scale: float | None = None) -> Progress:
    workers = tuple(
        WorkerView(rank=rank, device="T4", node="n", local_batch_size=64, own_s=0.1 if rank else float("nan"))
        for rank in range(2)
    )
    return Progress(
        elapsed_s=1.0,
        epoch=0,
        step=step,
        rows_per_s=1000.0 + step,
        step_s=0.128,
        global_batch_size=128,
        lr_factor=1.5,
        workers=workers,
        slowest_rank=0,
        slowest_why="larger share",
        imbalance=0.1,
        learning_rate=0.1,
        noise_scale=noise_scale,
    )


def group(step: int) -> Happened:
    return Happened(elapsed_s=0.0, step=step - 1, kind="group", text=f"2 workers (2 T4) begin at step {step}")


def reported(step: int, accuracy: float) -> Reported:
    return Reported(elapsed_s=1.0, epoch=step // 10, step=step, metrics={"accuracy": accuracy, "broken": float("nan")})


END = Ended(elapsed_s=9.0, reason="finished")

STORY: tuple[Sight, ...] = (
    group(0),
    progress(5),
    reported(10, 0.5),
    progress(20),
    progress(20),  # a second look at the same step
    Happened(elapsed_s=2.0, step=20, kind="decided", text="moves the shares from 64/64 to 32/96 rows"),
    reported(20, 0.6),
    group(12),  # a worker was lost; training goes on from a save
    progress(15),
    reported(20, 0.7),
    END,
)


def show(watcher: Watcher, run: RunInfo, sights: tuple[Sight, ...]) -> None:
    watcher.begin(run)
    for sight in sights:
        watcher.see(sight)
    watcher.close()


def test_only_what_is_known_is_logged_and_the_rate_is_the_one_that_updates_use():
    figures = progress_figures(progress(5, noise_scale=float("inf")))
    assert figures["rex/learning_rate"] == pytest.approx(0.15)
    assert {"rex/own_s/rank_1", "rex/local_batch_size/rank_0"} <= set(figures)
    assert not {"rex/own_s/rank_0", "rex/noise_scale"} & set(figures)


@pytest.mark.parametrize(
    ("package", "make"), [("tensorboard", "TensorBoardLogger"), ("mlflow", "MLflowLogger"), ("wandb", "WandbLogger")]
)
def test_a_package_that_is_missing_is_said_when_the_logger_is_made(package, make, monkeypatch):
    from rex_ray import loggers
    from rex_ray.loggers import tracker

    monkeypatch.setattr(tracker, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"'{package}' is not installed; run: pip install 'rex-ray\[{package}\]'"):
        getattr(loggers, make)()


def test_making_a_logger_loads_no_tracker():
    program = "import sys, rex_ray.loggers\n"
    program += "print(sorted({'torch', 'wandb', 'mlflow', 'tensorboard', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), purge_orphaned_data=True)
    events.Reload()
    return [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]


@needs("tensorboard")
def test_tensorboard_has_every_point_once_also_where_training_went_back(tmp_path):
    show(TensorBoardLogger(interval_s=0.0), run_info(tmp_path), STORY)
    folder = tmp_path / "rex_ray" / "tensorboard"
    assert scalars(folder, "accuracy") == [(10, 0.5), (20, 0.7)]
    assert scalars(folder, "rex/rows_per_s") == [(5, 1005.0), (15, 1015.0)]
    # Resumed under its name from a save of step 16.
    show(TensorBoardLogger(interval_s=0.0), run_info(tmp_path, "def456"), (group(16), reported(20, 0.8), END))
    assert scalars(folder, "accuracy") == [(10, 0.5), (20, 0.8)]
    assert scalars(folder, "rex/rows_per_s") == [(5, 1005.0), (15, 1015.0)]


@needs("tensorboard")
def test_tensorboard_drops_a_report_beyond_the_save_also_where_no_figure_of_ours_is_as_new(tmp_path):
    sights = (group(0), progress(5), reported(20, 0.6), group(18), reported(19, 0.7), END)
    show(TensorBoardLogger(interval_s=0.0), run_info(tmp_path), sights)
    assert scalars(tmp_path / "rex_ray" / "tensorboard", "accuracy") == [(19, 0.7)]


@needs("tensorboard")
def test_tensorboard_keeps_what_it_has_where_a_resumed_run_begins_with_trouble(tmp_path):
    show(TensorBoardLogger(interval_s=0.0), run_info(tmp_path), (group(0), reported(10, 0.5), END))
    trouble = Happened(elapsed_s=0.0, step=-1, kind="incident", text="the newest save is torn")
    show(TensorBoardLogger(interval_s=0.0), run_info(tmp_path), (trouble, group(12), reported(20, 0.6), END))
    assert scalars(tmp_path / "rex_ray" / "tensorboard", "accuracy") == [(10, 0.5), (20, 0.6)]


@needs("tensorboard")
def test_tensorboard_keeps_the_decisions_as_text(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    show(TensorBoardLogger(tmp_path / "here", interval_s=0.0), run_info(tmp_path), STORY[:7])
    events = EventAccumulator(str(tmp_path / "here"))
    events.Reload()
    texts = [b"".join(event.tensor_proto.string_val) for event in events.Tensors("rex/decisions/text_summary")]
    assert any(b"moves the shares" in text for text in texts)
    assert any(b"| global_batch_size | 128 |" in text for text in _settings(events))


def _settings(events) -> list[bytes]:
    return [b"".join(event.tensor_proto.string_val) for event in events.Tensors("rex/settings/text_summary")]


# --- MLflow -----------------------------------------------------------------------------------------------------------


@needs("mlflow")
def test_mlflow_has_one_run_that_a_resumed_fit_goes_on_with(tmp_path, monkeypatch):
    # The skinny package has no database; its file store asks to be allowed.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    show(MLflowLogger("mixed", tracking_uri=uri, interval_s=0.0), run_info(tmp_path), STORY)
    failed = Ended(elapsed_s=9.0, reason="failed: rank 1 was lost")
    show(MLflowLogger("mixed", tracking_uri=uri), run_info(tmp_path, "def456"), (group(16), reported(30, 0.8), failed))

    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("mixed")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("cifar10", "FAILED")
    assert run.data.params["global_batch_size"] == "128"
    points = client.get_metric_history(run.info.run_id, "accuracy")
    assert [(point.step, point.value) for point in points] == [(10, 0.5), (20, 0.6), (20, 0.7), (30, 0.8)]
    assert {"rex/own_s/rank_1", "rex/step_s"} <= set(run.data.metrics)
    artifacts = [item.path for item in client.list_artifacts(run.info.run_id, "rex_ray")]
    assert artifacts == ["rex_ray/decisions-abc123.txt", "rex_ray/decisions-def456.txt"]


@needs("mlflow")
def test_mlflow_begins_a_new_run_where_the_earlier_one_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    show(MLflowLogger(tracking_uri=uri), run_info(tmp_path), (group(0), END))

    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment_id = client.get_experiment_by_name("rex_ray").experiment_id
    (run,) = client.search_runs([experiment_id])
    client.delete_run(run.info.run_id)
    show(MLflowLogger(tracking_uri=uri), run_info(tmp_path, "def456"), (group(0), END))
    (other,) = client.search_runs([experiment_id])
    assert other.info.run_id != run.info.run_id


ODD_NAMES = (
    "val/AR@100",
    "val/AR(100",
    "timing(s)",
    "a,b",
    "",
    "../x",
    "/abs",
    "a//b",
    "x" * 300,
    "loss:",
    "%",
    "λ",
    "%2",
)


@needs("mlflow")
def test_mlflow_takes_whatever_a_metric_is_called(tmp_path, monkeypatch):
    # verl#119, mlflow#7807, Lightning#4411: one name with a bracket, and the whole tracker is lost.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    metrics = {name: float(number) for number, name in enumerate(ODD_NAMES)}
    sights = (group(0), Reported(elapsed_s=1.0, epoch=0, step=1, metrics=metrics), reported(2, 0.5), END)
    show(MLflowLogger(tracking_uri=uri), run_info(tmp_path), sights)

    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("rex_ray").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["val/AR_100"] == 0.0
    assert run.data.metrics["val/AR_100_2"] == 1.0
    assert run.data.metrics["accuracy"] == 0.5
    assert len(run.data.metrics) == len(ODD_NAMES) + len(("epoch", "accuracy"))


@given(st.text())
def test_names_for_mlflow_are_such_as_it_takes(name):
    made = mlflow_name(name)
    assert re.fullmatch(r"[/\w.\- ]{1,250}", made, flags=re.ASCII)
    assert posixpath.normpath(made) == made
    assert not made.startswith(("/", ".."))


# --- W&B --------------------------------------------------------------------------------------------------------------


@needs("wandb")
@pytest.mark.slow
def test_wandb_has_one_run_per_fit_with_every_figure_at_its_step(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    odd = Reported(elapsed_s=1.0, epoch=2, step=20, metrics={"accuracy": 0.7, "step": -1.0, "_step": 0.0})
    story = tuple(odd if sight is STORY[-2] else sight for sight in STORY)
    show(WandbLogger("mixed", init={"mode": "offline"}, interval_s=0.0), run_info(tmp_path), story)
    (folder,) = (tmp_path / "rex_ray" / "wandb").glob("offline-run-*")
    assert folder.name.endswith("-abc123")
    rows = _history(next(folder.glob("*.wandb")))
    accuracy = [(row["step"], row["accuracy"]) for row in rows if "accuracy" in row]
    assert accuracy == [(10, 0.5), (20, 0.6), (20, 0.7)]
    assert [row["step"] for row in rows if "rex/step_s" in row] == [5, 20, 15]
    # A metric that is called as the axis is, or as W&B's own counter, moves no point.
    (last,) = [row for row in rows if row.get("accuracy") == 0.7]
    assert (last["reported/step"], last["reported/_step"]) == (-1.0, 0.0)
    # The same run goes on, whatever the fit's own identity is.
    show(WandbLogger("mixed", init={"mode": "offline"}), run_info(tmp_path, "def456"), (group(16), END))
    folders = sorted((tmp_path / "rex_ray" / "wandb").glob("offline-run-*"))
    assert [name.name.rpartition("-")[2] for name in folders] == ["abc123"] * len(folders)


def _history(path: Path, limit_s: float = 30.0) -> list[dict[str, float]]:
    """Read an offline run's figures back: protocol buffers in the log format of LevelDB, behind a header of 7 bytes.

    W&B's own process may write them a moment after ``finish`` has returned; a run that is whole ends with ``exit``.
    """
    from wandb.proto import wandb_internal_pb2

    deadline = time.monotonic() + limit_s
    while True:
        rows, kinds = [], set()
        for data in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kinds.add(record.WhichOneof("record_type"))
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append({key: json.loads(value) for key, value in items.items()})
        if "exit" in kinds:
            return rows
        assert time.monotonic() < deadline, f"{path} was not whole within {limit_s} s; it holds {kinds}"
        time.sleep(0.1)


def _records(data: bytes) -> Iterator[bytes]:
    at, whole, parts = 7, (1, 4), b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no record's head crosses a block's end
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in whole:  # in one piece, or the last of several
            yield parts
            parts = b""
