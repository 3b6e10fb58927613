"""Hugging Face's ``Trainer`` inside a session: a mixin that has it train by the session's shares and weights.

What its training loop does by itself and what is taken over:

- it makes a DataLoader and has Accelerate give each process every n-th batch: the session's loader instead;
- it has Accelerate wrap the model in DDP: the session does, which weights each rank by its rows or tokens;
- it scales a loss that is a sum over tokens by the tokens of all processes: each rank's is the mean over its own
  tokens, and the session weights it by their number;
- it logs the plain mean of the ranks' losses: each is multiplied by its rank's weight first;
- it counts steps to know an epoch's end: the session ends it there, also where the global batch has grown.

Clipping, mixed precision, the optimizer, schedules, callbacks and evaluation stay the Trainer's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainerCallback

from rex_ray.core.errors import ConfigError
from rex_ray.integrations.accelerate import SessionAccelerator
from rex_ray.integrations.whole_passes import WholePasses
from rex_ray.worker.current import get_session
from rex_ray.worker.data.taken_over import training_data
from rex_ray.worker.model.scheduling import ReferenceScheduler
from rex_ray.worker.user_warning import warn

__all__ = ["RexTrainerMixin"]

_BY_METRIC = ("ReduceLROnPlateau", "GreedyLR")
"""Schedules that the Trainer steps with a metric rather than after each batch."""


class _TrainersAccelerator(SessionAccelerator):
    """Accelerate as the Trainer uses it: it evaluates in equal shares, and leaves the training data undivided.

    Attributes:
        hands_over: the DataLoader that is about to be prepared is the training one.
        num_tokens: tokens behind the next loss, None where ranks are weighted by rows.
    """

    hands_over = False
    num_tokens: float | None = None

    def prepare_data_loader(self, data_loader: Any, device_placement: Any = None, **options: Any) -> Any:
        """Divide a DataLoader as Accelerate does, but for the training one, which the session divides."""
        return data_loader if self.hands_over else super().prepare_data_loader(data_loader, device_placement, **options)

    def backward(self, loss: torch.Tensor, weight: float | None = None, **kwargs: Any) -> None:
        """Differentiate, weighted by the tokens that the Trainer counted."""
        super().backward(loss, self.num_tokens if weight is None else weight, **kwargs)


class RexTrainerMixin:
    """Makes a ``Trainer`` train by the session's shares and weights, in the loop of a ``RexTrainer``.

    It comes before the Trainer among the bases::

        class MixedTrainer(RexTrainerMixin, Trainer): ...

        def train_loop(config):
            MixedTrainer(model=model, args=TrainingArguments(...), train_dataset=rows).train()

    With ``RexConfig(weight_by="tokens")`` a language model's update is the mean over all tokens of the global batch, as
    the Trainer's own is in one process. What the Trainer logs is reported to the session, which saves.
    """

    args: Any
    model: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any
    model_wrapped: Any
    accelerator: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._passes: WholePasses | None = None
        self._counter = _Counter(self)
        self._warned_of_tokens = False
        self.add_callback(_Reporting(self))  # type: ignore[attr-defined]

    def create_accelerator_and_postprocess(self) -> None:
        """Have the Trainer's Accelerator prepare by the session.

        Raises:
            ConfigError: gradient accumulation, or a search for a batch size.
        """
        if self.args.gradient_accumulation_steps != 1:
            raise ConfigError(
                f"gradient_accumulation_steps={self.args.gradient_accumulation_steps}: a rank's batch is its whole "
                "share of an optimizer step, so this would multiply the global batch; set it to 1, and the rows of a "
                "step by RexConfig.global_batch_size"
            )
        if self.args.auto_find_batch_size:
            raise ConfigError("auto_find_batch_size: the session decides how many rows a rank gets; leave it out")
        # DDP would look for unused parameters at every step; without, the session names them before the first update.
        self.args.ddp_find_unused_parameters = bool(self.args.ddp_find_unused_parameters)
        # With the other ranks' tokens in it, a loss would be weighted twice.
        self.args.average_tokens_across_devices = False
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # The Trainer makes its own by a name in its module; there is no other place to hand one in.
        self.accelerator.__class__ = _TrainersAccelerator
        self.accelerator.check()

    def get_train_dataloader(self) -> Any:
        """Prepare model and optimizer by the session, then return its loader of the training set.

        Raises:
            ConfigError: a second call of ``train``, or a sampler that groups rows by length.
        """
        if self._passes is not None:
            raise ConfigError("trainer.train() was called twice, and a session trains one model, once")
        session = get_session()
        given: Any = super().get_train_dataloader()  # type: ignore[misc]
        # How many rows a step has is the run's to say, not the Trainer's arguments'.
        dataset, options = training_data(given, {}, given.batch_size)
        self.create_optimizer()  # type: ignore[attr-defined]
        self.model_wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self._passes = WholePasses(session.loader(dataset, **options))
        session.register(trainer=self._counter)
        return self._passes

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        self.accelerator.hands_over = is_training
        try:
            return super()._get_dataloader(*args, is_training=is_training, **kwargs)  # type: ignore[misc]
        finally:
            self.accelerator.hands_over = False

    def _init_training_state(
        self, max_steps: Any, steps_per_epoch: Any, num_train_epochs: Any, resume_from_checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """Count on from the session's save."""
        if resume_from_checkpoint is not None:
            raise ConfigError(
                "resume_from_checkpoint: the session resumes by itself, at the exact sample; leave it out"
            )
        super()._init_training_state(max_steps, steps_per_epoch, num_train_epochs, None, trial)  # type: ignore[misc]
        self.state.global_step = self._counter.restored
        return get_session().epoch, 0

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule, and have it tick by rows and be saved."""
        super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]
        if type(self.lr_scheduler).__name__ in _BY_METRIC:
            get_session().register(scheduler=self.lr_scheduler)
        elif not isinstance(self.lr_scheduler, ReferenceScheduler):
            self.lr_scheduler = get_session().prepare_scheduler(self.lr_scheduler, stepped="batch")
        return self.lr_scheduler

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Return this rank's tokens if ranks are weighted by them; else None, and losses are means over rows.

        Whatever is counted, the update is right: the loss is a sum divided by this count, and weighted by it.
        """
        if not batch_samples:
            return None
        if get_session().weight_by == "samples":
            self._warn_of_tokens(batch_samples[0])
            return None
        count = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        if count is None:
            raise ConfigError(
                'RexConfig(weight_by="tokens") needs labels, and a model or compute_loss_func that takes '
                "num_items_in_batch, by which its loss is divided; weight ranks by rows (the default) instead"
            )
        self.accelerator.num_tokens = float(count)
        return count

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Make the Trainer's own step; return a loss whose plain mean over ranks is the mean over the global batch."""
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        weight = get_session().share_weight
        return loss * weight if weight else torch.zeros_like(loss)

    def end_pass(self) -> None:
        """End an epoch as the Trainer counts it."""
        if self._passes is not None:
            self._passes.end_pass()

    def _warn_of_tokens(self, batch: Any) -> None:
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if self._warned_of_tokens or not isinstance(labels, torch.Tensor) or labels.dim() < 2:
            return
        self._warned_of_tokens = True
        if len(set(labels.ne(-100).sum(tuple(range(1, labels.dim()))).tolist())) > 1:
            warn(
                "rows have different numbers of labels, and ranks are weighted by rows, so that the update is not the "
                'mean over tokens that the Trainer has in one process; set RexConfig(weight_by="tokens")'
            )


class _Counter:
    """The Trainer's step number, as the session saves it."""

    def __init__(self, trainer: RexTrainerMixin) -> None:
        self._trainer = trainer
        self.restored = 0

    def state_dict(self) -> dict[str, int]:
        """Return how many updates were made."""
        return {"global_step": self._trainer.state.global_step}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Keep it until the Trainer begins to count."""
        self.restored = state_dict["global_step"]


class _Reporting(TrainerCallback):  # type: ignore[misc]
    """Reports to the session what the Trainer logs, and each epoch's end."""

    def __init__(self, trainer: RexTrainerMixin) -> None:
        self._trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Journal the metrics, and save now and then; on every rank."""
        del args, state, control, kwargs
        get_session().report({name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))})

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the pass, so that running statistics are alike before the model is evaluated."""
        del args, control, kwargs
        self._trainer.end_pass()
        get_session().report({"epoch": state.epoch})
