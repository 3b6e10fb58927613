"""The session: everything that a training loop asks of rex_ray, on one rank.

A loop needs four calls and stays a plain PyTorch loop::

    session = get_session()
    model, optimizer = session.prepare(model, optimizer)
    loader = session.loader(train_set, num_workers=2)
    for epoch in session.epochs(num_epochs):
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        correct, count = evaluate(session.unwrap(model), session.eval_loader(test_set))
        session.report({"accuracy": session.pool(correct, count)})

Every rank must make the same calls in the same order.
"""

from __future__ import annotations

import gc
import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import nn

from rex_ray.core.errors import ConfigError, LinkError
from rex_ray.core.types import Allocation, WorkerSpec
from rex_ray.worker.data import evaluation
from rex_ray.worker.data.feed import Feed
from rex_ray.worker.data.loader import TrainLoader
from rex_ray.worker.data.stream_end import WhenToEnd
from rex_ray.worker.data.taken_over import evaluation_data, training_data
from rex_ray.worker.group.presence import Presence
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.link import ControlLink
from rex_ray.worker.measuring.probes import RecordQueue
from rex_ray.worker.model import replicas
from rex_ray.worker.model.comm_hook import CommHook
from rex_ray.worker.model.model_side import ModelSide
from rex_ray.worker.model.out_of_memory import is_out_of_memory, short
from rex_ray.worker.model.scheduling import ReferenceScheduler, Stepping
from rex_ray.worker.model.share import CountTokens, LossFunction
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.preflight.facts import WorkerFacts, device_memory_bytes
from rex_ray.worker.preflight.look import Look, gather_facts, look
from rex_ray.worker.preflight.precision import AutocastDtype, Precision
from rex_ray.worker.preparing import prepare_parts, warn_of_late_prepare
from rex_ray.worker.saving import state
from rex_ray.worker.saving.collecting import Collector
from rex_ray.worker.saving.learnt_limits import LearntLimits
from rex_ray.worker.saving.reporter import Reporter
from rex_ray.worker.saving.restoring import Restored, newest_state
from rex_ray.worker.saving.saves import Saves, SavingRank
from rex_ray.worker.saving.snapshots import SnapshotPlace, Snapshots, holders
from rex_ray.worker.schedule_teller import ScheduleTeller
from rex_ray.worker.step import StepHook
from rex_ray.worker.tracker import StepTracker

__all__ = ["Session", "get_session", "open_session"]

_log = logging.getLogger("rex_ray")

# Once training is over nobody should wait long for politeness.
_CLOSE_LIMIT_S = 5.0


class Session:
    """One rank's training session. Make it with :func:`open_session`, get it with :func:`get_session`.

    Attributes:
        rank: this worker's rank.
        world_size: number of workers.
        device_kind: kind of device that this worker has, e.g. ``"T4"``.
        node: the machine's name.
        generation: identity of this worker group.
    """

    def __init__(
        self,
        *,
        options: WorkerOptions,
        device_kind: str,
        node: str,
        link: ControlLink,
        reporter: Reporter,
        torch_device: torch.device | None,
        presence: Presence,
        snapshots: SnapshotPlace | None,
    ) -> None:
        self.device_kind = device_kind
        self.node = node
        self._options = options
        self._link = link
        self._presence = presence
        presence.meet(options.collective_timeout_s)
        self._values = SideGroup(options.collective_timeout_s, presence)
        self._control = SideGroup(options.collective_timeout_s, presence)
        self.rank, self.world_size = self._values.rank, self._values.size
        self.generation: str = self._values.broadcast_object(uuid.uuid4().hex, "the group's identity")
        link.started(self.generation)
        self._looked: Look | None = None
        if options.preflight_timeout_s is not None:
            self._looked = look(
                self._values, device_kind, torch_device or torch.device("cpu"), options.preflight_timeout_s
            )
        snapshot_place = snapshots if options.snapshot_interval_s else None
        resumed = newest_state(self._values, reporter, snapshot_place, options.storage_retry_s)
        self._restored = None if resumed is None else resumed.state
        self._schedule = ScheduleTeller(self.generation, link.send, lambda: self._tracker.position)
        self._tracker = StepTracker(
            rank=self.rank,
            options=options,
            device=torch_device or torch.device("cpu"),
            generation=self.generation,
            records=RecordQueue(self._schedule.send if self.rank == 0 else link.send),
        )
        presence.activity = self._tracker.activity
        presence.on_long_wait = self._tell_long_wait
        if self._looked is not None and self.rank == 0:
            self._tracker.incident(self._tracker.position.step, "preflight", self._looked.in_words())
        self._precision = Precision(self._values, self._facts, lambda: self._tracker.device)
        self._limits = LearntLimits(device_kind=device_kind, restored=self._restored, link=link)
        self._model_side = ModelSide(
            tracker=self._tracker,
            options=options,
            values=self._values,
            torch_device=torch_device,
            pass_limit=self._limits.passes,
        )
        self._feed = Feed(
            tracker=self._tracker,
            options=options,
            link=link,
            values=self._values,
            control=self._control,
            generation=self.generation,
            restored=self._restored,
        )
        self._collector = Collector(
            group=self._values,
            tracker=self._tracker,
            feed=self._feed,
            model_side=self._model_side,
            generation=self.generation,
            limits=self._limits,
        )
        saving = SavingRank(
            reporter=reporter,
            link=link,
            group=self._values,
            tracker=self._tracker,
            feed=self._feed,
            generation=self.generation,
            collector=self._collector,
            snapshots=None if snapshot_place is None else self._snapshots(snapshot_place),
            interval_s=options.checkpoint_interval_s,
            retry_s=options.storage_retry_s,
        )
        self._saves = Saves(saving)
        self._feed.save_now = self._saves.save_now
        self._feed.take_snapshot = self._saves.take_snapshot
        if saving.snapshots is not None:
            self._feed.snapshot_due = saving.snapshots.due
        if resumed is not None and self.rank == 0:
            self._tell_resumed(resumed)

    # --- where training stands

    @property
    def step(self) -> int:
        """The step of the batch in hand, else the next one; counted over the whole run."""
        step = self._tracker.in_hand
        return self._tracker.position.step if step is None else step.plan.step

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._tracker.position.epoch

    @property
    def device(self) -> torch.device:
        """Where the model computes; the loaders move their batches there."""
        return self._tracker.device

    @property
    def allocation(self) -> Allocation | None:
        """Shares of the batch in hand, else of the next one; None before ``session.loader``."""
        return self._feed.allocation

    @property
    def share_weight(self) -> float:
        """What this rank's mean over its rows (or tokens) counts for in a plain mean over ranks: ``n b_i / B``."""
        return self._tracker.need_in_hand("session.share_weight").share_weight

    @property
    def weight_by(self) -> Literal["samples", "tokens"]:
        """What ranks are weighted by."""
        return self._options.weight_by

    @property
    def lr_factor(self) -> float:
        """What the newest ``optimizer.step()`` multiplied the learning rate by; schedulers never see it."""
        return self._model_side.lr_factor

    # --- model and data

    def prepare(
        self, *parts: Any, scheduler: Any = None, scaler: torch.amp.GradScaler | None = None
    ) -> tuple[Any, ...]:
        """Make a model train on all ranks, weighted by their rows; load what a save holds of it.

        ``model, optimizer = session.prepare(model, optimizer)``, or with whatever else the loop has made already, in
        any order. The learning rate is multiplied by the allocation's factor inside ``optimizer.step()`` only.

        Args:
            parts: the bare model, compiled or not, or one that ``fully_shard`` divided over the ranks, or an already
                wrapped DDP without a communication hook; its optimizer (of several, the one whose rate follows the
                global batch; have the others saved with :meth:`register`); schedulers, see :meth:`prepare_scheduler`;
                a gradient scaler, whose scale is taken out of what is measured; DataLoaders, of which the first one
                trains and the others evaluate, see :meth:`loader` and :meth:`eval_loader`.
            scheduler: another way to give one.
            scaler: likewise.

        Returns:
            What was given, in the same order, those by name last: use these from here on.

        Raises:
            ConfigError: a second model, several optimizers, a DDP that has a communication hook, or a DataLoader that
                chooses rows in a way that would be lost.
        """
        named = tuple(part for part in (scheduler, scaler) if part is not None)
        return prepare_parts((*parts, *named), self._prepare_model, self)

    def _prepare_model(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, scaler: torch.amp.GradScaler | None
    ) -> tuple[Any, ...]:
        if scheduler is not None:
            scheduler = ReferenceScheduler(scheduler, self._tracker)
        parts = state.Prepared(model=replicas.unwrap(model), optimizer=optimizer, scheduler=scheduler, scaler=scaler)
        joined = self._feed.joined
        prepared = self._model_side.prepare(model, parts, self._restored, optimizer_known=not joined)
        self._collector.prepare(parts, restored=self._restored)
        self._schedule.optimizer = optimizer
        if parts.is_sharded:
            self._saves.rely_on_rank_0()
        if joined:
            warn_of_late_prepare(self._model_side.normalises_over_rows, self._model_side.optimizer_family)
        if self._restored is not None:
            state.restore_rng(self._restored["rng"], self.rank, self.world_size)
        return (prepared, optimizer, *(part for part in (scheduler, scaler) if part is not None))

    def prepare_scheduler(self, scheduler: Any, stepped: Stepping | None = None, name: str = "scheduler") -> Any:
        """Make a learning-rate schedule end where it should, whatever the global batch does; have it saved.

        Make the schedule for ``len(loader)`` steps per epoch, and call ``scheduler.step()`` after every batch, or once
        per epoch, as in any loop. Per batch it ticks by rows: a step of twice the reference batch counts twice. The
        factor of the global batch on the learning rate comes on top, inside ``optimizer.step()`` only.

        Args:
            scheduler: of the prepared optimizer.
            stepped: ``"batch"``, ``"epoch"``, or ``"sample"`` for a schedule that counts rows and not steps
                (``total_steps=num_epochs * len(train_set)``); default: which of the first two, told by the first call.
            name: under which it is saved; several schedulers need several.

        Returns:
            The scheduler, wrapped: use this from here on.

        Raises:
            ConfigError: something is saved under this name already.
        """
        if name in self._collector.registered:
            raise ConfigError(f"something named {name!r} is saved already; give this scheduler another name=")
        wrapped = ReferenceScheduler(scheduler, self._tracker, stepped)
        self.register(**{name: wrapped})
        self._collector.restore_rates(name)
        return wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the bare model, without DDP or a compiler: evaluate with it; unless sharded, also on one rank alone.

        The other ranks then wait in their next collective, so one rank alone must be done well within
        ``collective_timeout_s``; evaluate on all of them with :meth:`eval_loader` and :meth:`pool` instead.
        """
        return replicas.unwrap(model)

    def loader(self, dataset: Any, *, end: WhenToEnd | None = None, **options: Any) -> TrainLoader:
        """Return the training loader: any data set, any DataLoader options but those decided here.

        Of a map-style data set every rank is given the whole, which is divided here. Of an iterable one, or a shard
        of Ray Data, every rank brings its own rows, and has its share of each step read off them; see "Streams and Ray
        Data" in the documentation. A DataLoader that the loop has made already is taken for its data set and options;
        its batch size is the whole step's, of all ranks, and warned of if that is not the run's.

        Not accepted are ``batch_size``, ``shuffle``, ``sampler``, ``batch_sampler`` and ``drop_last``. Loader
        processes are persistent by default. New shares take effect ``num_workers * prefetch_factor`` batches
        later than with none, so keep the prefetch small. A rank without rows gets an empty batch; its loop must
        treat it like any other. A ``collate_fn`` should keep every row: a rank is weighted by the rows drawn.

        The first call joins the ranks to the controller.

        Args:
            dataset: map-style, iterable, a shard of Ray Data, or a DataLoader of one of the first two.
            end: when an epoch of streams ends: with the last, ``"all"`` (default), ranks that have no more rows
                having no weight until then; or with the ``"shortest"``.
            options: for torch's DataLoader.

        Raises:
            ConfigError: a refused option, something that is no data set, a second training loader, or a global
                batch that the data set or the number of workers does not allow.
        """
        dataset, options = training_data(dataset, options, self._options.global_batch_size)
        fewest = 2 if self._model_side.normalises_over_rows else 1
        spec = WorkerSpec(
            rank=self.rank,
            device=self.device_kind,
            node=self.node,
            min_local_batch_size=fewest,
            max_local_batch_size=self._limits.share_rows,
            memory_bytes=device_memory_bytes(self._tracker.device),
        )
        loader = self._feed.loader(dataset, spec, self._model_side.optimizer_family, self._end_pass, end, options)
        # A full collection walks every object that torch and Ray ever made, and each rank has its own moment for it:
        # a pause of one rank is a pause of all. What is there now stays for the run, so it is not walked again.
        gc.freeze()
        return loader

    def eval_loader(
        self,
        dataset: Any,
        *,
        local_batch_size: int = 256,
        whole: bool | None = None,
        in_step: bool = False,
        **options: Any,
    ) -> evaluation.EvalLoader:
        """Return a loader of this rank's part of ``dataset``: over all ranks every row comes exactly once.

        Parts may differ by one row and may be empty; combine what ranks found with :meth:`pool`. Use
        :meth:`unwrap` for the model. A stream, or a shard of Ray Data, is taken for this rank's own rows, which no
        other rank reads. If every rank is given the same stream, say so: ``whole=True`` leaves each its part. Of a
        DataLoader that the loop has made already, data set, batch size and options are taken. With ``in_step`` a rank
        that has fewer batches gets one of no rows in the end, so that all ranks can meet at each; not for streams.
        """
        dataset, local_batch_size, options = evaluation_data(dataset, local_batch_size, options)
        return evaluation.EvalLoader(
            dataset,
            rank=self.rank,
            num_ranks=self.world_size,
            local_batch_size=local_batch_size,
            whole=whole,
            device=lambda: self._tracker.device,
            on_start=self._begin_evaluation,
            in_step=in_step,
            options=options,
        )

    # --- the loop

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield epoch numbers up to ``num_epochs``, from the epoch that a save was made in.

        That epoch's first pass goes on at the saved sample. Leaving an epoch's loop early ends the epoch: the next
        one begins with an order of its own.
        """
        self._schedule.announce(num_epochs)
        yield from self._feed.epochs(num_epochs)
        self.finish()

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Differentiate a mean loss; like ``loss.backward()``, scaled if there is a gradient scaler.

        Args:
            loss: mean over the rows (or tokens) of this rank's batch or micro-batch.
            weight: number of tokens behind the mean; needed with ``weight_by="tokens"``, refused with the default,
                which weights a rank by its samples.
        """
        self._model_side.gradients.backward(loss, weight)

    def autocast(self, dtype: AutocastDtype = "auto") -> AbstractContextManager[Any]:
        """Run the forward pass in a lower precision, the same on every rank: ``with session.autocast(): ...``.

        ``"auto"`` is bfloat16 where every worker computes it natively, else float16 where all are GPUs that do (give
        ``prepare`` a gradient scaler then), else the model's own precision. Ranks agree at the first use.

        Args:
            dtype: ``"auto"``, ``torch.bfloat16`` or ``torch.float16``.

        Raises:
            ConfigError: a GPU that only emulates what was asked for, or ranks that ask for different ones.
        """
        with self._tracker.waiting():
            return self._precision.autocast(dtype)

    def train_step(
        self,
        batch: Any,
        loss_fn: LossFunction,
        *,
        weight: CountTokens | None = None,
        max_grad_norm: float | None = None,
    ) -> torch.Tensor:
        """Make one whole optimizer step: forward, backward, reduction, clipping, update, cleared gradients.

        The rank's share is run in as many passes as its memory asks for. Where one runs out of memory, the step is
        done again in place, in smaller passes, while the other ranks wait; what was learnt is kept, also in saves. The
        gradient is that of the whole share, so don't divide the loss, and a penalty on the weights counts once::

            for batch in loader:
                loss = session.train_step(batch, lambda model, rows: F.cross_entropy(model(rows[0]), rows[1]))

        Batch normalisation sees each pass's rows alone, and its running statistics also those of passes that failed.
        A retry begins with the random numbers of the pass that failed, but draws them for other shapes. A gradient
        scaler that was prepared scales, unscales before clipping, and is updated.

        Args:
            batch: what the loader handed out, rows first in every tensor.
            loss_fn: ``loss_fn(model, rows)`` returns the mean loss over these rows, which are the batch or a part of
                it; it calls the model that it is given, and may be called several times for one batch.
            weight: ``weight(rows)`` returns the number of tokens behind that mean; needed with ``weight_by="tokens"``.
            max_grad_norm: the global gradient is clipped to this norm; None: not at all.

        Returns:
            The mean loss over this rank's rows, detached; not a number on a rank without rows.

        Raises:
            MemoryExhaustedError: memory ran out where no retry is safe (SyncBatchNorm, a sharded model; within the
                reduction also ``find_unused_parameters`` and ``static_graph``), or with a single row.
        """
        return self._model_side.train_step.run(batch, loss_fn, weight, max_grad_norm)

    def micro_batches(self, batch: Any, num_chunks: int, weight: float | None = None) -> Iterator[Any]:
        """Cut this rank's batch into micro-batches, to save memory and change nothing else.

        Run forward and backward on each, with the mean loss over *its* rows, then step the optimizer once::

            for inputs, labels in session.micro_batches(batch, 4):
                session.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()

        Each micro-batch is weighted by its rows and only the last one reduces, so don't divide the loss. Ranks may
        use different numbers. Let the loop run to its end. A penalty on the weights has no rows to be weighted by:
        add it to one micro-batch only.

        Args:
            batch: what the loader handed out, rows first in every tensor.
            num_chunks: most micro-batches; fewer where there are fewer rows.
            weight: this rank's tokens of the whole batch; needed with ``weight_by="tokens"``.
        """
        return self._model_side.gradients.micro_batches(batch, num_chunks, weight)

    def accumulate(self, weight: float | None = None) -> AbstractContextManager[None]:
        """Keep the gradients of all micro-batches but the last local, where you cut the batch yourself.

        Forward *and* backward of each micro-batch but the last belong inside, those of the last one after it. Each
        is weighted by the first dimension of the model's input, so use the mean loss over its rows and don't
        divide it. That every row was used once is checked when the optimizer steps.

        Args:
            weight: this rank's tokens of the whole batch; needed with ``weight_by="tokens"``.
        """
        return self._model_side.gradients.accumulate(weight)

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Journal metrics, and now and then save.

        A save holds model, optimizer, scheduler, scaler, what was registered, the position in the data, the
        allocation and the random generators; it is made at most every ``checkpoint_interval_s`` (rank 0's clock),
        and always at the end: of the last epoch, or of a loop that was left early. Must be called on every rank.
        """
        self._saves.report(metrics)

    def save(self, reason: str = "the loop asked") -> None:
        """Save now, whatever ``checkpoint_interval_s`` says; between two steps, on every rank.

        Metrics reported last go with it. A save that somebody else asks for (a node that is about to be taken away,
        ``RexTrainer.request_save``) needs no call: the ranks agree on a step and make it before that one.
        """
        self._saves.save_now(reason)

    def pool(self, numerator: evaluation.Summable, denominator: evaluation.Summable) -> float:
        """Return ``sum(numerator) / sum(denominator)`` over ranks, e.g. of correct answers and rows."""
        with self._tracker.waiting():
            return evaluation.pool_ratio(self._values, numerator, denominator)

    def pool_sum(self, values: evaluation.Summable) -> torch.Tensor:
        """Return the sum of a number or tensor over ranks, on the CPU in int64 or float64, same shape."""
        with self._tracker.waiting():
            return evaluation.pool_sum(self._values, values)

    # --- extensions

    def register(self, **stateful: state.Stateful) -> None:
        """Save these too, e.g. ``session.register(ema=ema)``; a save that holds them is loaded at once."""
        saved = {} if self._restored is None else self._restored["registered"]
        for name, part in stateful.items():
            self._collector.registered[name] = part
            if name in saved:
                state.load_part(name, part, saved[name])

    def register_comm_hook(self, hook_state: Any, hook: CommHook) -> None:
        """Average gradients with a DDP communication hook, e.g. torch's ``bf16_compress_hook``.

        Weights stay exact, since they are in the gradient already. Gradient norms are no longer measured.

        Raises:
            ConfigError: the model is sharded, and reduced by FSDP.
        """
        self._model_side.average_by(hook_state, hook)

    def add_step_hook(self, hook: StepHook) -> None:
        """Have ``hook`` called at each step's last local gradient and at the end of its reduction."""
        self._tracker.hooks.append(hook)

    def finish(self) -> None:
        """End checks under way, and save what was reported last; called on every rank when the loop has returned."""
        self._model_side.settle()
        self._saves.finish()

    def tell_failure(self, error: BaseException) -> None:
        """Have later groups keep off the share at which memory ran out, if that is what ended this one."""
        if self._options.on_out_of_memory == "retry" and is_out_of_memory(error):
            self._tracker.ran_out_of_memory(self.device_kind, short(error))

    def close(self, *, failed: bool) -> None:
        """Send what is measured and leave; waits a few seconds at most.

        Args:
            failed: an error ended training, so that other ranks may no longer answer.
        """
        self._tracker.close()
        self._tracker.flush()
        limit_s = min(_CLOSE_LIMIT_S, self._options.collective_timeout_s)
        try:
            self._feed.close(limit_s, failed=failed)
            self._saves.close(limit_s, failed=failed)
            if not failed:
                self._control.close()
                self._values.close()
        except LinkError as error:
            _log.warning("training is over, but the last control message never arrived: %s", error)
        finally:
            gc.unfreeze()
            self._link.close(limit_s)

    def _facts(self) -> tuple[WorkerFacts, ...]:
        if self._looked is not None:
            return self._looked.workers
        return gather_facts(self._values, self.device_kind, self._tracker.device)

    def _snapshots(self, place: SnapshotPlace) -> Snapshots:
        nodes = self._values.gather_objects(self.node, "the ranks' nodes")
        return Snapshots(
            place,
            keeps=self.rank in holders(nodes),
            interval_s=self._options.snapshot_interval_s,
            on_trouble=lambda trouble: self._tell_aloud("snapshot", trouble),
        )

    def _tell_resumed(self, resumed: Restored) -> None:
        """Say aloud where training goes on, and which newer states could not be read."""
        for trouble in resumed.troubles:
            self._tell_aloud("damaged_save", f"passed over a save that is not whole: {trouble}")
        _log.warning("%s", resumed.in_words(self._tracker.position, self.world_size))

    def _tell_aloud(self, kind: str, message: str) -> None:
        _log.warning("%s", message)
        self._tracker.incident(self._tracker.position.step, kind, message)

    def _tell_long_wait(self, told: str) -> None:
        _log.warning("%s", told)
        self._tracker.incident(self._tracker.position.step, "waiting", told)

    def _begin_evaluation(self) -> bool:
        self._tracker.gap()
        return self._model_side.is_sharded

    def _end_pass(self) -> None:
        self._tracker.gap()
        self._model_side.end_pass()


_current: Session | None = None


@contextmanager
def open_session(
    *,
    options: WorkerOptions,
    device: str,
    node: str,
    link: ControlLink,
    reporter: Reporter,
    torch_device: torch.device | None = None,
    snapshots: SnapshotPlace | None = None,
) -> Iterator[Session]:
    """Open this rank's session; inside, :func:`get_session` returns it.

    Uses ``torch.distributed`` if it is initialised, else the session is a group of one.

    Args:
        options: the worker's intervals and limits.
        device: kind of this worker's device, e.g. ``"T4"``.
        node: the machine's name.
        link: this rank's connection to the controller; closed at the end.
        reporter: where saves go to and come from.
        torch_device: where the model is moved to; default: it stays where the user put it.
        snapshots: where local snapshots of this run are kept between saves; default: there are none.

    Raises:
        ConfigError: a session is open already.
        LinkError: the ranks did not find together within the limit; or a collective of the loop's own broke, and this
            says for whom it waited.
    """
    global _current  # noqa: PLW0603 - one session per process, like the process group it wraps
    if _current is not None:
        raise ConfigError("a session is open already in this process")
    presence = Presence.of_process_group(options.collective_timeout_s)
    try:
        session = Session(
            options=options,
            device_kind=device,
            node=node,
            link=link,
            reporter=reporter,
            torch_device=torch_device,
            presence=presence,
            snapshots=snapshots,
        )
    except BaseException as error:
        presence.leave(error)
        link.close(_CLOSE_LIMIT_S)
        raise
    _current = session
    failed = True
    try:
        yield session
        session.finish()
        failed = False
    except BaseException as error:
        session.tell_failure(error)
        told = presence.explained(error)
        presence.leave(told)
        if told is error:
            raise
        raise told from error
    finally:
        _current = None
        session.close(failed=failed)
        presence.leave()


def get_session() -> Session:
    """Return the session of this process.

    Raises:
        ConfigError: there is none; the loop does not run under a RexTrainer.
    """
    if _current is None:
        raise ConfigError("no session is open: run this loop with RexTrainer, or inside `with open_session(...)`")
    return _current
