"""Hugging Face Accelerate inside a session: an ``Accelerator`` that leaves shares, weights and data to it."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import gather, recursively_apply
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from rex_ray.core.errors import ConfigError
from rex_ray.worker.current import get_session
from rex_ray.worker.model.replicas import ddp_options

__all__ = ["RexAccelerator", "SessionAccelerator"]

_TOGETHER = "accelerator.prepare needs the model and its optimizer in one call: prepare(model, optimizer, ...)"


class SessionAccelerator(Accelerator):  # type: ignore[misc]
    """Model, optimizer and schedules by the session; data loaders and gathering stay Accelerate's own.

    Precision, devices, clipping, trackers and printing are Accelerate's too. What Accelerate would do a second time is
    left out: it does not wrap the model in DDP, and steps a schedule once per step rather than once per rank.

    Args:
        cpu: as ever; default: where the session computes.
        kwargs: Accelerate's.
    """

    def __init__(self, *, cpu: bool | None = None, **kwargs: Any) -> None:
        super().__init__(cpu=get_session().device.type == "cpu" if cpu is None else cpu, **kwargs)

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Prepare what is given; return it in the same order, one object alone as itself.

        Args:
            objects: a model with its optimizer, schedulers, DataLoaders; what is prepared already, or is something
                else, comes back as it is.
            device_placement: not supported: the session knows the device.

        Raises:
            ConfigError: see ``Session.prepare``; gradient accumulation, which would multiply the global batch.
        """
        if device_placement is not None:
            raise ConfigError("device_placement was given to accelerator.prepare, and the session places the model")
        self.check()
        new = {k: each for k, each in enumerate(objects) if not getattr(each, "_is_accelerate_prepared", False)}
        models = [k for k, each in new.items() if isinstance(each, nn.Module)]
        optimizers = [k for k, each in new.items() if isinstance(each, torch.optim.Optimizer)]
        prepared = list(objects)
        if models or optimizers:
            if len(models) != 1 or len(optimizers) != 1:
                raise ConfigError(f"{_TOGETHER}; got {len(models)} models and {len(optimizers)} optimizers")
            pair = self._prepare_pair(objects[models[0]], objects[optimizers[0]])
            prepared[models[0]], prepared[optimizers[0]] = pair
        for k, each in new.items():
            if isinstance(each, DataLoader):
                prepared[k] = self.prepare_data_loader(each)
        for k, each in new.items():
            if isinstance(each, LRScheduler):
                prepared[k] = self.prepare_scheduler(each)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model to evaluate with; one that trains needs its optimizer beside it."""
        if not evaluation_mode:
            raise ConfigError(_TOGETHER)
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Have a schedule tick by rows and be saved, and stand still where the scaler skips a step."""
        names = ["scheduler", *(f"scheduler_{k}" for k in range(2, 2 + len(self._schedulers)))]
        wrapped = get_session().prepare_scheduler(scheduler, name=names[len(self._schedulers)])
        steps_with = [each for each in self._optimizers if each.optimizer is scheduler.optimizer] or self._optimizers
        # "Split" means that one tick is one step of all ranks together, which it is.
        prepared = AcceleratedScheduler(wrapped, steps_with, self.step_scheduler_with_optimizer, split_batches=True)
        prepared._is_accelerate_prepared = True
        self._schedulers.append(prepared)
        return prepared

    def backward(self, loss: torch.Tensor, weight: float | None = None, **kwargs: Any) -> None:
        """Differentiate the mean loss of this rank's batch.

        Args:
            loss: mean over its rows, or tokens.
            weight: the tokens behind that mean; needed with ``weight_by="tokens"``.
            kwargs: none is supported.
        """
        if kwargs:
            raise ConfigError(f"accelerator.backward does not take {', '.join(kwargs)} inside a session")
        get_session().backward(loss, weight)

    def check(self) -> None:
        """Refuse what would not be exact.

        Raises:
            ConfigError: gradient accumulation, other ranks than the session's, or FSDP, DeepSpeed and the like.
        """
        session = get_session()
        if self.gradient_accumulation_steps != 1:
            raise ConfigError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}: a loader batch is this rank's whole "
                "share of an optimizer step, so this would multiply the global batch; raise global_batch_size instead, "
                "and to save memory use session.micro_batches or session.train_step"
            )
        if self.num_processes != session.world_size:
            raise ConfigError(
                f"Accelerate counts {self.num_processes} processes and the session {session.world_size} ranks; make "
                "the Accelerator inside the loop that the trainer runs, where RANK and WORLD_SIZE are set, and where "
                "there are no GPUs say so: TrainingArguments(use_cpu=True)"
            )
        if (kind := str(self.distributed_type.value)) not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise ConfigError(f"Accelerate is set to {kind}, and the session reduces gradients itself; leave it out")

    def _prepare_pair(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        session = get_session()
        bare = self.prepare_model(model, evaluation_mode=True)
        handler = self.ddp_handler
        if handler is not None and session.world_size > 1 and (handler.find_unused_parameters or handler.static_graph):
            bare = DistributedDataParallel(
                bare,
                find_unused_parameters=handler.find_unused_parameters,
                static_graph=handler.static_graph,
                **ddp_options(),
            )
        wrapped = session.prepare(bare, optimizer, scaler=self.scaler)[0]
        wrapped._is_accelerate_prepared = True
        self._models[-1] = wrapped
        accelerated = self.prepare_optimizer(optimizer)
        accelerated._is_accelerate_prepared = True
        return wrapped, accelerated


class RexAccelerator(SessionAccelerator):
    """An ``Accelerator`` whose first DataLoader trains by the session's shares, and whose others evaluate by them.

    Use it in the loop of a ``RexTrainer`` in place of ``accelerate.Accelerator``::

        accelerator = RexAccelerator()
        model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
            model, optimizer, loader, test_loader, scheduler
        )

    Saves, and the position in the data after a restart, are the session's: ``session.epochs``, ``session.report``.
    """

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return the session's loader of the same data: the first for training, later ones to evaluate.

        A rank with fewer batches to evaluate gets one of no rows in the end, so that all meet in each
        ``gather_for_metrics``.
        """
        del device_placement, slice_fn_for_dispatch
        session = get_session()
        if self._dataloaders:
            loader: Any = session.eval_loader(data_loader, in_step=True)
        else:
            loader = session.loader(data_loader)
        loader._is_accelerate_prepared = True
        self._dataloaders.append(loader)
        return loader

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return every rank's rows: of tensors concatenated along the first dimension, however many each has.

        No row comes twice, so none is dropped. The order is by rank, not that of the data set.
        """
        if use_gather_object:
            return super().gather_for_metrics(input_data, use_gather_object=True)
        return recursively_apply(_gather_rows, input_data, error_on_other_type=True)

    def save_state(self, *_: Any, **__: Any) -> str:
        """Refused: it would lack the position in the data."""
        raise ConfigError(
            "accelerator.save_state does not know where in the data training stands; session.report and session.save "
            "save everything, and what session.register was given"
        )

    def load_state(self, *_: Any, **__: Any) -> None:
        """Refused: the session resumes by itself."""
        raise ConfigError("accelerator.load_state: the session resumes by itself, within session.prepare")

    def skip_first_batches(self, *_: Any, **__: Any) -> Any:
        """Refused: the training loader goes on at the saved sample by itself."""
        raise ConfigError("accelerator.skip_first_batches: the session's loader goes on at the saved sample by itself")


def _gather_rows(rows: torch.Tensor) -> torch.Tensor:
    if rows.dim() == 0:
        gathered: torch.Tensor = gather(rows)
        return gathered
    counts = gather(torch.tensor([len(rows)], device=rows.device)).tolist()
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = gather(padded).split(max(counts)) if max(counts) else [padded]
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=False)])
