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

import logging
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rex_ray.core.errors import ConfigError, LinkError, RexError
from rex_ray.core.types import Allocation, WorkerSpec
from rex_ray.worker import evaluation, joining, replicas, state
from rex_ray.worker.comm_hook import CommHook, Reduction, reduce_bucket
from rex_ray.worker.link import ControlLink, MetricRecord, Reporter
from rex_ray.worker.loader import (
    TrainLoader,
    batches_drawn_ahead,
    check_loader_options,
    check_map_style,
    make_data_loader,
    wants_epoch,
)
from rex_ray.worker.microbatch import Gradients
from rex_ray.worker.optimizer_hooks import OptimizerHooks
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.probes import RecordQueue, total_squared_norm
from rex_ray.worker.sampler import ElasticSampler, Position
from rex_ray.worker.schedule import Schedule
from rex_ray.worker.side_group import SideGroup, distributed
from rex_ray.worker.switch import Switch
from rex_ray.worker.timing import now_s
from rex_ray.worker.tracker import StepHook, StepTracker
from rex_ray.worker.weighting import OutputWeights, has_batch_norm

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
    ) -> None:
        self.device_kind = device_kind
        self.node = node
        self._options = options
        self._link = link
        self._reporter = reporter
        self._opened_s = self._saved_s = now_s()
        self._values = SideGroup(options.collective_timeout_s)
        self._control = SideGroup(options.collective_timeout_s)
        self.rank, self.world_size = self._values.rank, self._values.size
        self.generation: str = self._values.broadcast_object(uuid.uuid4().hex, "the group's identity")
        link.started(self.generation)
        self._restored = reporter.restore()
        self._torch_device = torch_device
        self._tracker = StepTracker(
            rank=self.rank,
            options=options,
            device=torch_device or torch.device("cpu"),
            generation=self.generation,
            records=RecordQueue(link.send),
        )
        self._ddp_group: Any = None
        self._reduction: Reduction | None = None
        self._user_hook: tuple[Any, CommHook] | None = None
        self._prepared: state.Prepared | None = None
        self._gradients: Gradients | None = None
        self._registered: dict[str, state.Stateful] = {}
        self._loader: TrainLoader | None = None
        self._schedule: Schedule | None = None
        self._switch: Switch | None = None
        self._dataset_size: int | None = None
        self._epoch_loop: tuple[int, int] | None = None
        self._unsaved: Mapping[str, Any] | None = None
        if self._restored is not None:
            self._resume(self._restored)

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
        step = self._tracker.in_hand
        if step is not None:
            return step.plan.allocation
        return None if self._schedule is None else self._schedule.at(self._tracker.position.step)

    # --- model and data

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> tuple[Any, ...]:
        """Make a model train on all ranks, weighted by their rows; load what a save holds of it.

        The learning rate is multiplied by the allocation's factor inside ``optimizer.step()`` only.

        Args:
            model: the bare model, or an already wrapped DDP without a communication hook.
            optimizer: steps the model's parameters.
            scheduler: saved and restored; tick it in reference steps, ``len(loader)`` per epoch.
            scaler: gradient scaler; saved and restored, and its scale is taken out of what is measured.

        Returns:
            What was given, in the same order, the model wrapped.

        Raises:
            ConfigError: a second model, or a DDP that has a communication hook.
        """
        if self._prepared is not None:
            raise ConfigError("session.prepare takes one model; put several networks into one nn.Module")
        bare = replicas.unwrap(model)
        if self._torch_device is not None:
            bare.to(self._torch_device)
        self._tracker.device = next((p.device for p in bare.parameters()), self._tracker.device)
        self._tracker.parameters = [p for p in bare.parameters() if p.requires_grad]
        self._tracker.scaler = scaler
        prepared = state.Prepared(model=bare, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
        if self._restored is not None:
            prepared.load(self._restored)
        wrapped = self._replicate(model)
        by_tokens = self._options.weight_by == "tokens"
        complete = None if isinstance(wrapped, DistributedDataParallel) else self._complete_gradient
        OutputWeights(self._tracker, by_tokens=by_tokens, complete=complete).install(wrapped)
        OptimizerHooks(self._tracker).install(optimizer)
        self._prepared = state.Prepared(model=wrapped, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
        self._gradients = Gradients(tracker=self._tracker, group=self._values, by_tokens=by_tokens, model=wrapped)
        if self._restored is not None:
            state.restore_rng(self._restored["rng"], self.rank, self.world_size)
        given = (scheduler, scaler)
        return (wrapped, optimizer, *(part for part in given if part is not None))

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the bare model: evaluate with it, also on one rank alone."""
        return replicas.unwrap(model)

    def loader(self, dataset: Any, **options: Any) -> TrainLoader:
        """Return the training loader: any map-style data set, any DataLoader options but those decided here.

        Not accepted are ``batch_size``, ``shuffle``, ``sampler``, ``batch_sampler`` and ``drop_last``. Loader
        processes are persistent by default. New shares take effect ``num_workers * prefetch_factor`` batches
        later than with none, so keep the prefetch small. A rank without rows gets an empty batch; its loop must
        treat it like any other.

        The first call joins the ranks to the controller.

        Raises:
            ConfigError: a refused option, an iterable-style data set, a second training loader, or a global
                batch that the data set or the number of workers does not allow.
        """
        if self._loader is not None:
            raise ConfigError(
                "session.loader was called before, and a session has one training loader, whose batches are steps; "
                "use session.eval_loader for other data"
            )
        check_loader_options(options)
        num_rows = check_map_style(dataset, "session.loader")
        reference = joining.reference_batch(self._options, num_rows, self.world_size)
        self._check_restored_data(num_rows)
        member = joining.Member(spec=self._spec(), dataset_size=num_rows, ahead=batches_drawn_ahead(options))
        members = joining.gather_members(self._values, member)
        first = joining.join(
            self._values,
            self._link,
            joining.group_info(
                self.generation, members, reference, self._tracker.position.step, self._resumed_allocation()
            ),
            self._options,
        )
        self._dataset_size = num_rows
        self._schedule = Schedule(first)
        sampler = ElasticSampler(
            dataset_size=num_rows,
            rank=self.rank,
            seed=self._seed(),
            schedule=self._schedule,
            carry_epoch=wants_epoch(dataset),
        )
        self._switch = Switch(
            group=self._control,
            link=self._link,
            schedule=self._schedule,
            next_undrawn=lambda: sampler.next_undrawn,
            ahead=max(member.ahead for member in members),
            interval_steps=self._options.control_interval_steps,
        )
        self._loader = TrainLoader(
            dataset=dataset,
            data_loader=make_data_loader(dataset, sampler, options),
            sampler=sampler,
            switch=self._switch,
            tracker=self._tracker,
            global_batch_size=reference,
            start_pass=self._start_pass,
            end_pass=self._end_pass,
        )
        return self._loader

    def eval_loader(self, dataset: Any, *, local_batch_size: int = 256, **options: Any) -> evaluation.EvalLoader:
        """Return a loader of this rank's part of ``dataset``: over all ranks every row comes exactly once.

        Parts may differ by one row and may be empty; combine what ranks found with :meth:`pool`. Use
        :meth:`unwrap` for the model.
        """
        return evaluation.EvalLoader(
            dataset,
            rank=self.rank,
            num_ranks=self.world_size,
            local_batch_size=local_batch_size,
            device=lambda: self._tracker.device,
            on_start=self._tracker.gap,
            options=options,
        )

    # --- the loop

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield epoch numbers up to ``num_epochs``, from the epoch that a save was made in.

        That epoch's first pass goes on at the saved sample. Leaving an epoch's loop early ends the epoch: the next
        one begins with an order of its own.
        """
        while (epoch := self._tracker.position.epoch) < num_epochs:
            self._epoch_loop = (epoch, num_epochs)
            yield epoch
            self._tracker.left_loop()
            self._tracker.position = Position(epoch=epoch + 1, step=self._tracker.position.step)
        self._epoch_loop = None
        if self._unsaved is not None:
            self._save(self._unsaved)

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Differentiate a mean loss; like ``loss.backward()``, scaled if there is a gradient scaler.

        Args:
            loss: mean over the rows (or tokens) of this rank's batch or micro-batch.
            weight: number of tokens behind the mean; needed with ``weight_by="tokens"``, refused otherwise.
        """
        self._need_gradients().backward(loss, weight)

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
        return self._need_gradients().micro_batches(batch, num_chunks, weight)

    def accumulate(self, weight: float | None = None) -> AbstractContextManager[None]:
        """Keep the gradients of all micro-batches but the last local, where you cut the batch yourself.

        Forward *and* backward of each micro-batch but the last belong inside, those of the last one after it. Each
        is weighted by the first dimension of the model's input, so use the mean loss over its rows and don't
        divide it. That every row was used once is checked when the optimizer steps.

        Args:
            weight: this rank's tokens of the whole batch; needed with ``weight_by="tokens"``.
        """
        return self._need_gradients().accumulate(weight)

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Journal metrics, and now and then save.

        A save holds model, optimizer, scheduler, scaler, what was registered, the position in the data, the
        allocation and the random generators; it is made at most every ``checkpoint_interval_s`` (rank 0's clock),
        and always at the end of the last epoch. Must be called on every rank.
        """
        self._tracker.gap()
        now = now_s()
        if self.rank == 0:
            numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
            self._link.send(
                [
                    MetricRecord(
                        generation=self.generation,
                        epoch=self.epoch,
                        step=self._tracker.position.step,
                        elapsed_s=now - self._opened_s,
                        metrics=numbers,
                    )
                ]
            )
        due = torch.tensor([now - self._saved_s >= self._options.checkpoint_interval_s or self._is_last()])
        if bool(self._values.broadcast(due.to(torch.int64), "session.report")):
            self._save(metrics)
        else:
            self._unsaved = dict(metrics)

    def pool(self, numerator: evaluation.Summable, denominator: evaluation.Summable) -> float:
        """Return ``sum(numerator) / sum(denominator)`` over ranks, e.g. of correct answers and rows."""
        return evaluation.pool_ratio(self._values, numerator, denominator)

    def pool_sum(self, values: evaluation.Summable) -> torch.Tensor:
        """Return the sum of a number or tensor over ranks, on the CPU in int64 or float64, same shape."""
        return evaluation.pool_sum(self._values, values)

    # --- extensions

    def register(self, **stateful: state.Stateful) -> None:
        """Save these too, e.g. ``session.register(ema=ema)``; a save that holds them is loaded at once."""
        saved = {} if self._restored is None else self._restored["registered"]
        for name, part in stateful.items():
            self._registered[name] = part
            if name in saved:
                part.load_state_dict(saved[name])

    def register_comm_hook(self, hook_state: Any, hook: CommHook) -> None:
        """Average gradients with a DDP communication hook, e.g. torch's ``bf16_compress_hook``.

        Weights stay exact, since they are in the gradient already. Gradient norms are no longer measured.
        """
        self._user_hook = (hook_state, hook)
        if self._reduction is not None:
            self._reduction.average_by(hook_state, hook)

    def add_step_hook(self, hook: StepHook) -> None:
        """Have ``hook`` called at each step's last local gradient and at the end of its reduction."""
        self._tracker.hooks.append(hook)

    def close(self, *, failed: bool) -> None:
        """Send what is measured and leave; waits a few seconds at most.

        Args:
            failed: an error ended training, so that other ranks may no longer answer.
        """
        self._tracker.close()
        self._tracker.flush()
        limit_s = min(_CLOSE_LIMIT_S, self._options.collective_timeout_s)
        if self._loader is not None:
            self._loader.stop()
        try:
            if not failed:
                if self._switch is not None:
                    self._switch.close(limit_s)
                self._control.close()
                self._values.close()
        except LinkError as error:
            _log.warning("training is over, but the last control message never arrived: %s", error)
        finally:
            self._link.close(limit_s)

    # --- inside

    def _replicate(self, model: nn.Module) -> nn.Module:
        if not distributed():
            return model
        ddp = replicas.wrapped(model, self._options.collective_timeout_s)
        self._ddp_group = ddp.process_group
        self._reduction = Reduction(self._tracker, self._ddp_group)
        if self._user_hook is not None:
            self._reduction.average_by(*self._user_hook)
        self._reduction.install(ddp)
        return ddp

    def _complete_gradient(self) -> None:
        """End a backward pass that nobody reduces: the local gradient is the global one."""
        self._tracker.last_gradient()
        if self._tracker.measures_norm:
            self._tracker.add_local_sq(total_squared_norm(self._tracker.parameters))
        self._tracker.reduction_ended()

    def _spec(self) -> WorkerSpec:
        model = None if self._prepared is None else self._prepared.model
        fewest = 2 if model is not None and has_batch_norm(model) else 1
        return WorkerSpec(rank=self.rank, device=self.device_kind, node=self.node, min_local_batch_size=fewest)

    def _start_pass(self) -> Position:
        if self._prepared is None:
            raise ConfigError("call session.prepare(model, optimizer) before the loop: without it gradients are local")
        self._tracker.left_loop()
        self._tracker.gap()
        position = self._tracker.position
        if self._dataset_size is not None and position.cursor >= self._dataset_size:
            if self._epoch_loop is not None:
                raise RexError(
                    f"epoch {position.epoch} is complete, and session.loader was iterated again within it; one "
                    "`for ... in loader` per epoch of session.epochs, and session.eval_loader to evaluate"
                )
            position = Position(epoch=position.epoch + 1, step=position.step)
            self._tracker.position = position
        return position

    def _end_pass(self) -> None:
        self._tracker.gap()
        self._agree_on_buffers()

    def _agree_on_buffers(self) -> None:
        if self._prepared is not None and self._ddp_group is not None:
            tracker = self._tracker
            replicas.agree_on_buffers(
                replicas.unwrap(self._prepared.model),
                self._ddp_group,
                tracker.own_rows_since_sync,
                tracker.total_rows_since_sync,
            )
            tracker.own_rows_since_sync = tracker.total_rows_since_sync = 0

    def _is_last(self) -> bool:
        if self._epoch_loop is None or self._dataset_size is None:
            return False
        epoch, num_epochs = self._epoch_loop
        return epoch == num_epochs - 1 and self._tracker.position.cursor >= self._dataset_size

    def _save(self, metrics: Mapping[str, Any]) -> None:
        self._agree_on_buffers()
        cuda = None
        if self._tracker.device.type == "cuda":
            cuda = self._values.gather(torch.cuda.get_rng_state(), "the save's generator states")
        saved = {
            **({} if self._prepared is None else self._prepared.save()),
            "registered": {name: part.state_dict() for name, part in self._registered.items()},
            "position": state.save_position(self._tracker.position, self._dataset_size, self._seed()),
            "allocation": state.save_allocation(self.allocation),
            "rng": {"cpu": self._values.gather(torch.get_rng_state(), "the save's generator states"), "cuda": cuda},
        }
        self._reporter.report(metrics, saved)
        self._unsaved = None
        self._saved_s = now_s()
        self._tracker.gap()

    def _resume(self, restored: Mapping[str, Any]) -> None:
        position = self._tracker.position = state.position_of(restored)
        if self.rank == 0:
            _log.warning(
                "resumed at epoch %d, sample %d, step %d with %d workers",
                position.epoch,
                position.cursor,
                position.step,
                self.world_size,
            )

    def _seed(self) -> int:
        """Return the seed of the epochs' orders: a saved cursor means nothing in another order."""
        if self._restored is None:
            return self._options.seed
        seed: int = self._restored["position"]["seed"]
        return seed

    def _resumed_allocation(self) -> Allocation | None:
        return None if self._restored is None else state.allocation_of(self._restored)

    def _check_restored_data(self, num_rows: int) -> None:
        saved = None if self._restored is None else self._restored["position"]["dataset_size"]
        if saved is not None and saved != num_rows:
            raise ConfigError(
                f"the save was made with a training set of {saved} rows and this one has {num_rows}; resume with the "
                "same data, or start a new run"
            )
        if self._seed() != self._options.seed:
            warnings.warn(
                f"seed {self._options.seed} is without effect: the resumed run's order was drawn from {self._seed()}",
                stacklevel=3,
            )

    def _need_gradients(self) -> Gradients:
        if self._gradients is None:
            raise ConfigError("call session.prepare(model, optimizer) first")
        return self._gradients


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) or hasattr(value, "__float__")


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

    Raises:
        ConfigError: a session is open already.
        LinkError: the ranks did not find together within the limit.
    """
    global _current  # noqa: PLW0603 - one session per process, like the process group it wraps
    if _current is not None:
        raise ConfigError("a session is open already in this process")
    session = Session(
        options=options, device_kind=device, node=node, link=link, reporter=reporter, torch_device=torch_device
    )
    _current = session
    failed = True
    try:
        yield session
        failed = False
    finally:
        _current = None
        session.close(failed=failed)


def get_session() -> Session:
    """Return the session of this process.

    Raises:
        ConfigError: there is none; the loop does not run under a RexTrainer.
    """
    if _current is None:
        raise ConfigError("no session is open: run this loop with RexTrainer, or inside `with open_session(...)`")
    return _current
