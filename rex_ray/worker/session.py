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
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from rex_ray.core.errors import ConfigError
from rex_ray.core.types import Allocation, WorkerSpec
from rex_ray.worker.data import evaluation
from rex_ray.worker.data.loader import TrainLoader
from rex_ray.worker.data.stream_end import WhenToEnd
from rex_ray.worker.data.taken_over import evaluation_data, training_data
from rex_ray.worker.model import replicas
from rex_ray.worker.model.comm_hook import CommHook
from rex_ray.worker.model.scheduling import ReferenceScheduler, Stepping
from rex_ray.worker.model.share import CountTokens, LossFunction
from rex_ray.worker.parts import Parts
from rex_ray.worker.preflight.facts import device_memory_bytes
from rex_ray.worker.preflight.precision import AutocastDtype
from rex_ray.worker.preparing import prepare_model, prepare_parts
from rex_ray.worker.saving import state
from rex_ray.worker.step import StepHook

__all__ = ["Session"]


class Session:
    """One rank's training session. Make it with :func:`open_session`, get it with :func:`get_session`.

    Args:
        parts: what it is made of; :func:`open_session` puts them together.

    Attributes:
        rank: this worker's rank.
        world_size: number of workers.
        device_kind: kind of device that this worker has, e.g. ``"T4"``.
        node: the machine's name.
        generation: identity of this worker group.
    """

    def __init__(self, parts: Parts) -> None:
        self.device_kind, self.node = parts.around.device_kind, parts.around.node
        self.rank, self.world_size = parts.met.values.rank, parts.met.values.size
        self.generation = parts.met.generation
        self._parts = parts
        self._options = parts.around.options
        self._values = parts.met.values
        self._tracker = parts.tracker
        self._progress = parts.tracker.progress
        self._model_side = parts.model_side
        self._feed = parts.feed
        self._collector = parts.collector
        self._saves = parts.saves

    # --- where training stands

    @property
    def step(self) -> int:
        """The step of the batch in hand, else the next one; counted over the whole run."""
        step = self._tracker.in_hand
        return self._progress.position.step if step is None else step.plan.step

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._progress.position.epoch

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
        return prepare_parts((*parts, *named), partial(prepare_model, self._parts), self)

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
        if self._collector.has_registered(name):
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
            max_local_batch_size=self._parts.limits.share_rows,
            memory_bytes=device_memory_bytes(self._tracker.device),
        )
        occasions, family = self._parts.occasions, self._model_side.optimizer_family
        loader = self._feed.loader(dataset, spec, family, occasions, end, options)
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
            on_start=self._model_side.begin_evaluation,
            in_step=in_step,
            options=options,
        )

    # --- the loop

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield epoch numbers up to ``num_epochs``, from the epoch that a save was made in.

        That epoch's first pass goes on at the saved sample. Leaving an epoch's loop early ends the epoch: the next
        one begins with an order of its own.
        """
        self._parts.schedule.announce(num_epochs)
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
            return self._parts.precision.autocast(dtype)

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
        self._collector.register(stateful)

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
