"""Lightning inside a session: a strategy that has it train by the session's shares and weights.

Automatic optimisation stays Lightning's own: it calls the training step through the model that the session prepared,
differentiates, clips and steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from rex_ray.core.errors import ConfigError
from rex_ray.integrations.whole_passes import WholePasses
from rex_ray.worker.current import get_session
from rex_ray.worker.model.scheduling import Stepping

__all__ = ["EvalBatches", "RexCallback", "RexStrategy", "TrainBatches"]


class TrainBatches:
    """The session's training loader, made when Lightning first asks for it: then the model is prepared.

    Args:
        dataset: see ``Session.loader``; also a DataLoader. Not a stream, since Lightning asks for a batch ahead where
            it knows no length.
        options: likewise.
    """

    def __init__(self, dataset: Any, **options: Any) -> None:
        self.dataset = dataset
        self._options = options
        self._passes: WholePasses | None = None

    def __len__(self) -> int:
        """Reference steps per epoch."""
        return len(self._made())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._made())

    def end_pass(self) -> None:
        """End an epoch as Lightning counts it."""
        if self._passes is not None:
            self._passes.end_pass()

    def _made(self) -> WholePasses:
        if self._passes is None:
            self._passes = WholePasses(get_session().loader(self.dataset, **self._options))
        return self._passes


class EvalBatches:
    """The session's loader of this rank's rows to evaluate, in step with the others.

    Log with ``self.log(name, mean, batch_size=len(rows), sync_dist=True)``: then an epoch's mean is that over all rows.

    Args:
        dataset: see ``Session.eval_loader``; also a DataLoader.
        options: likewise.
    """

    def __init__(self, dataset: Any, **options: Any) -> None:
        self._loader = get_session().eval_loader(dataset, **options)
        self.dataset = self._loader.dataset

    def __len__(self) -> int:
        """Batches of this rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class _Ranks(LightningEnvironment):  # type: ignore[misc]
    """Processes that a trainer of this library has started."""

    @property
    def creates_processes_externally(self) -> bool:
        """Yes: Lightning starts none."""
        return True

    def world_size(self) -> int:
        """Return the number of ranks."""
        return get_session().world_size

    def set_world_size(self, size: int) -> None:
        """It is what it is."""

    def global_rank(self) -> int:
        """Return this rank."""
        return get_session().rank

    def set_global_rank(self, rank: int) -> None:
        """It is what it is."""

    def local_rank(self) -> int:
        """Return this process's number among the devices that Lightning is given: one."""
        return 0

    def teardown(self) -> None:
        """Leave the launcher's environment as it is; Lightning's own would take WORLD_SIZE out of it."""


class RexStrategy(DDPStrategy):  # type: ignore[misc]
    """Prepares model, optimizer and schedules by the session, in the loop of a ``RexTrainer``.

    For ``Trainer(strategy=RexStrategy(), callbacks=[RexCallback()], use_distributed_sampler=False, devices=1)``, with
    :class:`TrainBatches` and :class:`EvalBatches` as its data.
    """

    def __init__(self) -> None:
        super().__init__(cluster_environment=_Ranks())
        self._is_prepared = False

    @property
    def root_device(self) -> torch.device:
        """Where the session computes."""
        return get_session().device

    def configure_ddp(self) -> None:
        """Prepare by the session, which wraps the model in DDP itself.

        Raises:
            ConfigError: what would not be exact; see the documentation.
        """
        module = self.lightning_module
        assert module is not None
        _check(module.trainer)
        self.setup_optimizers(module.trainer)
        self._is_prepared = True
        if len(self.optimizers) != 1:
            raise ConfigError(
                f"configure_optimizers made {len(self.optimizers)} optimizers, and session.prepare takes one; have the "
                "others saved with session.register(name=optimizer), and step them in manual optimisation elsewhere"
            )
        session, scaler = get_session(), getattr(self.precision_plugin, "scaler", None)
        self.model: Any = session.prepare(module, self.optimizers[0], scaler=scaler)[0]
        for k, config in enumerate(self.lr_scheduler_configs):
            if config.reduce_on_plateau:
                session.register(**{f"scheduler_{k}": config.scheduler})
            else:
                stepped: Stepping = "batch" if config.interval == "step" else "epoch"
                config.scheduler = session.prepare_scheduler(config.scheduler, stepped, name=f"scheduler_{k}")

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers, once: the session takes them with the model."""
        if not self._is_prepared:
            super().setup_optimizers(trainer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the training step as the prepared model's forward pass: also one rank, without DDP, has its hooks."""
        assert self.lightning_module is not None
        # Validation sets the wrapper around the module to evaluate, too, and only the module back.
        self.model.training = True
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(self.model, self.lightning_module, "training_step", *args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as ever, but take means in floating point.

        Lightning takes the mean over ranks of how many rows each has logged as a whole number, so that 4 and 3 would
        make 3 instead of 3.5.
        """
        if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)


class RexCallback(Callback):  # type: ignore[misc]
    """Ends each epoch in the session, reports what was logged, and goes on at the epoch of a save."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count epochs on from the session's."""
        del pl_module
        progress = trainer.fit_loop.epoch_progress.current
        progress.ready = progress.started = progress.processed = progress.completed = get_session().epoch

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have running statistics alike before the model is evaluated at an epoch's end."""
        del pl_module
        if not trainer.sanity_checking and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            _end_pass(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report, and save now and then."""
        del pl_module
        _end_pass(trainer)
        get_session().report({name: float(value) for name, value in trainer.callback_metrics.items()})


def _check(trainer: Trainer) -> None:
    if get_session().weight_by == "tokens":
        raise ConfigError(
            'weight_by="tokens" needs the tokens behind each loss, and Lightning has no place to say them; weight '
            "ranks by rows, or write the loop with session.backward(loss, weight=...)"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: a rank's batch is its whole share of an "
            "optimizer step, so this would multiply the global batch; raise global_batch_size instead"
        )
    if not any(isinstance(callback, RexCallback) for callback in trainer.callbacks):
        raise ConfigError(
            "RexStrategy needs RexCallback() among the Trainer's callbacks, which ends epochs and reports"
        )


def _end_pass(trainer: Trainer) -> None:
    loaders = trainer.train_dataloader
    for loader in loaders if isinstance(loaders, (list, tuple)) else [loaders]:
        if isinstance(loader, TrainBatches):
            loader.end_pass()
