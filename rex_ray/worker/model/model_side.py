"""The session's model side: the prepared model, once there is one, and what is asked of it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import nn

from rex_ray.core.errors import ConfigError
from rex_ray.core.types import OptimizerFamily
from rex_ray.worker.model import replicas
from rex_ray.worker.model.assembling import Assembly, PreparedModel
from rex_ray.worker.model.comm_hook import CommHook
from rex_ray.worker.model.microbatch import Gradients
from rex_ray.worker.model.reducing import UserHook
from rex_ray.worker.model.train_step import TrainStep
from rex_ray.worker.model.weighting import has_batch_norm
from rex_ray.worker.saving.state import Prepared

__all__ = ["ModelSide"]


class ModelSide:
    """The prepared model, its backward passes and its reductions.

    Args:
        assembly: prepares the model; its tracker and its ranks are those of what is asked here.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._tracker = assembly.tracker
        self._values = assembly.values
        self._assembly = assembly
        self._prepared: PreparedModel | None = None
        self._user_hook: UserHook | None = None

    def _need_prepared(self) -> PreparedModel:
        if self._prepared is None:
            raise ConfigError("call session.prepare(model, optimizer) first")
        return self._prepared

    @property
    def gradients(self) -> Gradients:
        """Backward passes of the batch in hand.

        Raises:
            ConfigError: no model is prepared.
        """
        return self._need_prepared().gradients

    @property
    def train_step(self) -> TrainStep:
        """Whole optimizer steps.

        Raises:
            ConfigError: no model is prepared.
        """
        return self._need_prepared().train_step

    @property
    def is_sharded(self) -> bool:
        """Whether ranks meet in every pass of the prepared model; False before there is one."""
        return self._prepared is not None and self._prepared.reduced.sharded is not None

    @property
    def normalises_over_rows(self) -> bool:
        """Whether the prepared model has batch normalisation; False before there is one."""
        return self._prepared is not None and has_batch_norm(self._prepared.reduced.model)

    @property
    def lr_factor(self) -> float:
        """What the learning rate was multiplied by in the newest update; 1 before there is one."""
        return 1.0 if self._prepared is None else self._prepared.optimizer_hooks.factor

    @property
    def optimizer_family(self) -> OptimizerFamily:
        """What the prepared optimizer makes of a gradient; SGD's before there is one."""
        return "sgd" if self._prepared is None else self._prepared.optimizer_family

    def prepare(
        self, model: nn.Module, parts: Prepared, restored: MutableMapping[str, Any] | None, *, optimizer_known: bool
    ) -> nn.Module:
        """Load what a save holds of the parts, then put DDP and the hooks around the model.

        Args:
            model: the model as the user gave it, bare or wrapped.
            parts: the bare model, and what steps it.
            restored: the save that training resumes from; what is loaded is taken out.
            optimizer_known: the controller will hear of the optimizer; norms are taken as it understands them.

        Returns:
            The model that the user's loop calls.

        Raises:
            ConfigError: see ``Session.prepare``.
        """
        if self._prepared is not None:
            raise ConfigError("session.prepare takes one model; put several networks into one nn.Module")
        self._prepared = self._assembly.prepare(
            model, parts, restored, self._user_hook, optimizer_known=optimizer_known
        )
        return self._prepared.reduced.model

    def average_by(self, hook_state: Any, hook: CommHook) -> None:
        """Average gradients by the user's communication hook, from now on or from ``prepare`` on.

        Raises:
            ConfigError: the model is sharded, and no DDP reduces it.
        """
        if self._prepared is None:
            self._user_hook = (hook_state, hook)
        else:
            self._prepared.reduced.average_by(hook_state, hook)

    def settle(self) -> None:
        """End every check that is under way; before a save, and wherever training pauses. Every rank must call this.

        Raises:
            RexError: the model holds an update that is not finite, or its replicas differ.
        """
        if self._prepared is not None:
            self._prepared.non_finite.settle()
            self._prepared.replica_check.settle()

    def begin_evaluation(self) -> bool:
        """Something other than training begins; return whether ranks meet in every pass of the model."""
        self._tracker.gap()
        return self.is_sharded

    def end_pass(self) -> None:
        """Settle, make buffers alike and compare replicas, at the end of a pass over the data.

        Raises:
            RexError: see ``settle``.
        """
        self._tracker.gap()
        self.settle()
        self.agree_on_buffers()
        if self._prepared is not None:
            self._prepared.replica_check.compare_all(f"after step {self._tracker.progress.position.step - 1}")

    def agree_on_buffers(self) -> None:
        """Make buffers alike on all ranks; every one must call this."""
        if self._prepared is None or (group := self._prepared.reduced.process_group) is None:
            return
        progress = self._tracker.progress
        with self._values.presence.told("buffers and running statistics to be made alike"):
            replicas.agree_on_buffers(
                replicas.unwrap(self._prepared.reduced.model),
                group,
                progress.own_rows_since_sync,
                progress.total_rows_since_sync,
            )
        progress.synchronised()
