"""``RexTrainer``: Ray Train's ``TorchTrainer`` with a controller beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import DataConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.queue import Queue

from rex_ray.config import RexConfig
from rex_ray.core.errors import LinkError
from rex_ray.hosting.control_status import ControlStatus
from rex_ray.hosting.journal_files import new_journal_dir
from rex_ray.hosting.memory_file import earlier_memory
from rex_ray.hosting.profile_files import profiles_to_begin_with, read_profiles
from rex_ray.train.arrow_store import ArrowStore, store_of
from rex_ray.train.checkpoint_list import put_aside_a_damaged_list
from rex_ray.train.control_plane import control_of, queue_of
from rex_ray.train.data_config import DealingDataConfig
from rex_ray.train.loss_teller import LossTeller
from rex_ray.train.placement import check_placement, devices_asked_for
from rex_ray.train.reaching import connect
from rex_ray.train.run_folder import run_directory
from rex_ray.train.scaling import check_elastic, check_scaling
from rex_ray.train.snapshot_folders import snapshots_removed
from rex_ray.train.telemetry import first_line
from rex_ray.train.waits import quick_restarts
from rex_ray.train.watching import chosen_watchers, plain_settings, watched
from rex_ray.train.worker_loop import TrainLoop, Wiring, run_worker
from rex_ray.watch.seams import RunInfo, Watcher
from rex_ray.worker.saving.store import check_storage

__all__ = ["RexTrainer"]

logger = logging.getLogger("rex_ray")

_ANSWER_LIMIT_S = 60.0
_FINISH_LIMIT_S = 15.0


class RexTrainer(TorchTrainer):  # type: ignore[misc]
    """Trains a PyTorch loop synchronously on workers of different speed.

    Args:
        train_loop: the loop that each worker runs; takes ``train_loop_config``, or nothing. Inside,
            ``rex_ray.get_session()`` returns the session.
        train_loop_config: given to the loop.
        rex_config: what to adapt, within which limits.
        scaling_config: workers, and through its label selector where they may run.
        run_config: name, storage, what to do on failure.
        datasets: Ray data sets by name, to be had on a worker by ``ray.train.get_dataset_shard(name)``.
        dataset_config: how they reach the workers; default: each block is dealt to the worker that asks first.
        dataset_size: rows of the training set; if given, a global batch above it is refused before anything starts
            instead of before the first step.
        backend: ``torch.distributed`` backend; default NCCL on GPUs and gloo elsewhere.
        loggers: who is shown the run while it goes on, in this process, e.g. ``rex_ray.loggers.TensorBoardLogger()``:
            one tracker run per job, however many workers train.
        verbose: also show a progress line (plain lines where standard error is no terminal) and a log line for every
            decision; a ``ProgressLine`` or ``DecisionLog`` among the loggers takes that one's place.

    Raises:
        ConfigError: no workers, a global batch below the workers or above the rows, shares set by hand that do not
            sum to it; a group that no cluster could place; an elastic group with a selector for each worker;
            ``learn_from`` without profiles.
    """

    def __init__(  # noqa: PLR0913 - what it takes is TorchTrainer's, and four more
        self,
        train_loop: TrainLoop,
        *,
        rex_config: RexConfig,
        scaling_config: ScalingConfig,
        train_loop_config: dict[str, Any] | None = None,
        run_config: RunConfig | None = None,
        datasets: dict[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        dataset_size: int | None = None,
        backend: str | None = None,
        loggers: Sequence[Watcher] = (),
        verbose: bool = True,
    ) -> None:
        self._watchers = chosen_watchers(loggers, verbose=verbose)
        check_scaling(scaling_config, backend)
        check_elastic(scaling_config)
        rex_config.check_group(scaling_config.min_workers)
        devices = devices_asked_for(scaling_config, rex_config.device_label)
        rex_config.check_group(scaling_config.max_workers, dataset_size, devices)
        self.rex_config = rex_config
        self._train_loop = train_loop
        self._journal_dir: Path | None = None
        self._status: ControlStatus | None = None
        self._control: Any = None
        if rex_config.learn_from is not None:
            read_profiles(rex_config.learn_from)
        # A copy: fit() adds a callback of its own.
        own_run_config = dataclasses.replace(run_config) if run_config else RunConfig()
        super().__init__(
            train_loop,
            train_loop_config={} if train_loop_config is None else train_loop_config,
            torch_config=TorchConfig(backend=backend, timeout_s=math.ceil(rex_config.collective_timeout_s)),
            scaling_config=scaling_config,
            run_config=own_run_config,
            datasets=datasets,
            dataset_config=dataset_config or DealingDataConfig(),
        )

    @property
    def run_dir(self) -> Path:
        """Where rex_ray keeps what it knows of the run: ``<storage_path>/<name>/rex_ray``."""
        return run_directory(self.run_config)

    @property
    def journal_dir(self) -> Path:
        """The directory of the newest run's journal; it is written while the run goes on."""
        return self._journal_dir or self.run_dir / "journal"

    @property
    def control_status(self) -> ControlStatus | None:
        """How the controller was at the end of the last ``fit``; None before, or if it gave no answer."""
        return self._status

    def request_save(self, reason: str = "the driver asked") -> bool:
        """Have the workers save before one of their next steps, while ``fit`` runs in another thread.

        Args:
            reason: why, for the journal.

        Returns:
            Whether there was a worker group, and a controller to ask it. That it has saved stands in the journal, and
            as a checkpoint.

        Raises:
            LinkError: the control actor did not answer.
        """
        control = self._control
        if control is None:
            return False
        try:
            is_asked: bool = ray.get(control.request_save.remote(reason), timeout=_ANSWER_LIMIT_S)
        except RayError as error:
            raise LinkError(f"the control actor could not be asked for a save: {first_line(error)}") from error
        return is_asked

    def fit(self) -> Result:
        """Train; return Ray Train's result.

        Leaves nothing behind, however it ends: the control actor, the queue, workers and placement group are gone.

        Raises:
            ConfigError: no Ray cluster answers where one is said to be, no node meets the label selector within
                ``placement_timeout_s``, the run's storage cannot be used, or another driver trains under its name.
            ray.train.TrainingFailedError: a worker failed more often than ``FailureConfig`` allows, or with one and the
                same ConfigError twice in a row.
        """
        if not ray.is_initialized():
            connect()
        check_placement(self.scaling_config, self.rex_config.placement_timeout_s)
        own = self.run_config
        store = store_of(own.storage_path, own.storage_filesystem, str(own.name))
        check_storage(store)
        run_id = uuid.uuid4().hex[:12]
        waits = quick_restarts(self.scaling_config, own.failure_config)
        controlled = self._controlled(run_id, store)
        with _sigint_given_back(), waits, snapshots_removed(run_id), controlled as (control, queue):
            wiring = Wiring(
                options=self.rex_config.worker_options(),
                device_label=self.rex_config.device_label,
                control=control,
                queue=queue,
                run_id=run_id,
            )
            self.train_loop_per_worker: TrainLoop = partial(run_worker, loop=self._train_loop, wiring=wiring)
            users = self.run_config.callbacks
            self.run_config.callbacks = [*(users or []), LossTeller(control)]
            try:
                return super().fit()
            finally:
                self.run_config.callbacks = users
                self.train_loop_per_worker = self._train_loop

    @contextlib.contextmanager
    def _controlled(self, run_id: str, store: ArrowStore) -> Iterator[tuple[Any, Queue]]:
        """Have a control actor and its queue, with what earlier runs learnt, and end the journal.

        Raises:
            ConfigError: another driver trains under the run's name and storage.
            LinkError: the control actor did not start within the limit.
        """
        self._status = None
        reason = "interrupted"
        with contextlib.ExitStack() as stack:
            queue = stack.enter_context(queue_of(store))
            put_aside_a_damaged_list(store)
            control = stack.enter_context(self._control_beside(run_id, store))
            stack.enter_context(watched(control, self._watchers, self._run_info(run_id)))
            try:
                self._control = control
                yield control, queue
                reason = "finished"
            except Exception as error:
                reason = f"failed: {first_line(error)}"
                raise
            finally:
                self._control = None
                self._finish(control, reason)

    def _control_beside(self, run_id: str, store: ArrowStore) -> contextlib.AbstractContextManager[Any]:
        """Return a control actor with a journal of its own, to be entered."""
        elsewhere = None if Path(store.path_of("rex_ray")) == self.run_dir else store
        learnt = profiles_to_begin_with(self.rex_config.learn_from, self.run_dir, elsewhere)
        memory = earlier_memory(self.run_dir, elsewhere) if self.rex_config.learn_from is None else None
        self._journal_dir = new_journal_dir(self.run_dir)
        return control_of(store, self.rex_config, run_id, self._journal_dir, learnt, elsewhere, memory)

    def _run_info(self, run_id: str) -> RunInfo:
        return RunInfo(
            name=str(self.run_config.name),
            run_id=run_id,
            policy=self.rex_config.policy,
            settings=plain_settings(self.rex_config, self.scaling_config.max_workers),
            run_dir=str(self.run_dir),
        )

    def _finish(self, control: Any, reason: str) -> None:
        """End the journal, within a limit: whoever presses Ctrl-C waits for it."""
        try:
            self._status = ray.get(control.finish.remote(reason), timeout=_FINISH_LIMIT_S)
        except RayError as error:
            logger.warning(
                "the control actor did not end the journal (%s); it lacks its last seconds", first_line(error)
            )


@contextlib.contextmanager
def _sigint_given_back() -> Iterator[None]:
    """Ray Train takes over Ctrl-C in ``fit`` and keeps it; give it back to the user afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Callable[..., Any] | int | None = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
