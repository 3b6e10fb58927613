"""The part of a sweep that is Ray's: a local cluster that listens on the loopback only, and one trial per cell."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read when Tune is imported: no second copy of every result as CSV and TensorBoard events, and no change of directory,
# since data and caches are named relative to the one that the command was given in.
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")

import ray
from ray import tune

from experiments.lab.cells import Cell
from experiments.lab.sweep import code_digest, play_into, result_file
from rex_ray.train.local_cluster import quiet_surroundings

__all__ = ["is_whole", "local_ray", "tune_cells"]

_OBJECT_STORE_BYTES = 80 * 2**20
_REPORT_EVERY_S = 30.0
_RECORD = "tune"


def tune_cells(name: str, cells: Sequence[Cell], folder: Path, *, jobs: int) -> None:
    """Play all cells of a matrix that have no result in its folder, on the cluster that this process is connected to.

    Raises:
        RuntimeError: cells that failed twice, each named with its own error; or the sweep was interrupted; or another
            process plays this matrix at this moment.
    """
    with _alone(folder):
        found = _fit(name, cells, folder.resolve(), jobs)
        if any(not result_file(folder, key).exists() for key in found.done):
            # Tune takes them for played, and would not play them again.
            shutil.rmtree(folder / _RECORD)
            found = _fit(name, cells, folder.resolve(), jobs)
    missing = [cell.key for cell in cells if not result_file(folder, cell.key).exists()]
    if found.errors:
        lines = [f"  {key}: {words}" for key, words in found.errors.items()]
        raise RuntimeError("\n".join([f"{len(lines)} of {len(cells)} cells of {name!r} failed twice:", *lines]))
    if missing:
        raise RuntimeError(
            f"{name!r} was interrupted: {len(missing)} of {len(cells)} cells are missing; the same command goes on"
        )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep a second command away from Tune's record; the system lets go of it when this process ends, however."""
    with (folder / "lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(f"{folder} is being played by another process: wait for it, or give --out") from error
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitted:
    """Keys of cells that Tune takes for played, and the last words of those that failed."""

    done: Sequence[str]
    errors: Mapping[str, str]


def _trial(config: dict[str, Any]) -> None:
    """Play one cell and report its row."""
    folder = Path(config["folder"])
    matrix = json.loads((folder / "matrix.json").read_text(encoding="utf-8"))
    if matrix["code"] != code_digest():
        raise RuntimeError("the code changed while the sweep ran; the same command begins a folder of its own")
    fields = next(fields for fields in matrix["cells"] if Cell(**fields).key == config["key"])
    tune.report(dict(play_into(folder, Cell(**fields)).row()))


def _fit(name: str, cells: Sequence[Cell], folder: Path, jobs: int) -> _Fitted:
    progress = _Progress(name, len(cells))
    record = folder / _RECORD
    if is_whole(record):
        tuner = tune.Tuner.restore(str(record), _trial, resume_unfinished=True, restart_errored=True)
    else:
        shutil.rmtree(record, ignore_errors=True)
        tuner = tune.Tuner(
            _trial,
            param_space={"folder": str(folder), "key": tune.grid_search([cell.key for cell in cells])},
            tune_config=tune.TuneConfig(
                reuse_actors=True,
                max_concurrent_trials=jobs,
                trial_name_creator=lambda trial: str(trial.config["key"]),
                trial_dirname_creator=lambda trial: str(trial.config["key"]),
            ),
            run_config=tune.RunConfig(
                name=_RECORD,
                storage_path=str(folder),
                failure_config=tune.FailureConfig(max_failures=1),
                callbacks=[progress],
                verbose=0,
            ),
        )
    # A failed trial is named at the end, with its own words.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        found = tuner.fit()
    known = [(str(result.config["key"]), result) for result in found if result.config is not None]
    return _Fitted(
        done=[key for key, result in known if result.error is None and result.metrics],
        errors={key: _own_words(result.error) for key, result in known if result.error is not None},
    )


def is_whole(record: Path) -> bool:
    """Return whether Tune can go on from its record: it was not killed before, or while, it wrote the first state."""
    states = sorted(record.glob("experiment_state-*.json"))
    if not states or not tune.Tuner.can_restore(str(record)):
        return False
    try:
        json.loads(states[-1].read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def _own_words(error: BaseException) -> str:
    """Return the line of an error that the cell itself raised, without Ray's frames around it."""
    return str(error).strip().splitlines()[-1]


class _Progress(tune.Callback):
    """One line on the standard error, rewritten where that is a terminal."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total = name, total
        self.begun_s = self.shown_s = 0.0

    def setup(self, **info: Any) -> None:
        """Begin to count; one that was restored counts from now."""
        del info
        self.begun_s = self.shown_s = time.monotonic()

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Count it."""
        del iteration, info
        self._show(trials, trial, "TERMINATED")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Count it among the failed."""
        del iteration, info
        self._show(trials, trial, "ERROR")

    def _show(self, trials: list[Any], ended: Any, status: str) -> None:
        """Say how far the sweep is: at once on a terminal, else now and then."""
        # Tune tells of an end before it notes it.
        states = [status if trial is ended else trial.status for trial in trials]
        done, failed = states.count("TERMINATED"), states.count("ERROR")
        at_end = done + failed == self.total
        on_terminal = sys.stderr.isatty()
        now_s = time.monotonic()
        if on_terminal or at_end or now_s - self.shown_s > _REPORT_EVERY_S:
            self.shown_s = now_s
            text = f"{self.name}: {done} of {self.total} cells, {failed} failed, {now_s - self.begun_s:.0f} s"
            print(f"\r{text}" if on_terminal else text, end="" if on_terminal and not at_end else "\n", file=sys.stderr)


@contextlib.contextmanager
def local_ray(jobs: int) -> Iterator[None]:
    """A cluster for as many trials at once; one that this process is connected to already is used as it is."""
    if ray.is_initialized():
        yield
        return
    with quiet_surroundings():
        try:
            ray.init(
                address="local",
                num_cpus=jobs,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
            )
            yield
        finally:
            ray.shutdown()
