"""The session's model side: a model that trains on all ranks, with every hook that weights, measures and checks it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn

from rex_ray.core.errors import ConfigError
from rex_ray.core.types import OptimizerFamily
from rex_ray.worker.group.side_group import SideGroup, distributed
from rex_ray.worker.model import replicas
from rex_ray.worker.model.backward_updates import BackwardUpdates
from rex_ray.worker.model.comm_hook import CommHook, Reduction
from rex_ray.worker.model.compiling import Compiling, Hook
from rex_ray.worker.model.guard import ReplicaGuard
from rex_ray.worker.model.microbatch import Gradients
from rex_ray.worker.model.non_finite import NonFiniteGuard
from rex_ray.worker.model.optimizer_fit import IdleOptimizer, SteppedParameters, warn_of_local_decisions
from rex_ray.worker.model.optimizer_hooks import BeforeUpdate, OptimizerHooks
from rex_ray.worker.model.pass_limit import PassLimit
from rex_ray.worker.model.passes import SharePasses
from rex_ray.worker.model.preconditioner import AdamPreconditioner, optimizer_family
from rex_ray.worker.model.replica_check import ReplicaCheck
from rex_ray.worker.model.replicas import is_sharded
from rex_ray.worker.model.sharding import ShardedReduction, refuse_unfit_shards
from rex_ray.worker.model.thawed import ThawedGradients
from rex_ray.worker.model.train_step import TrainStep
from rex_ray.worker.model.weighting import OutputWeights, has_batch_norm
from rex_ray.worker.notices import Notices
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.preflight.precision import refuse_mixed_gradients
from rex_ray.worker.saving.state import Prepared, lr_factor_of
from rex_ray.worker.tracker import StepTracker
from rex_ray.worker.user_warning import warn

__all__ = ["ModelSide"]

_HOOK_OF_DDP = (
    "session.register_comm_hook takes a hook of DDP's, and a sharded model is reduced by FSDP; give fully_shard a "
    "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) to reduce in fewer bits"
)


class ModelSide:
    """The prepared model, its backward passes and its reductions.

    Args:
        tracker: told of each step's backward pass.
        notices: has the journal told of what is dealt with.
        options: the worker's limits, and what ranks are weighted by.
        values: ranks to agree with about token counts.
        torch_device: where the model is moved to; None: it stays where it is.
        pass_limit: rows that one forward and backward pass may have.
    """

    def __init__(
        self,
        *,
        tracker: StepTracker,
        notices: Notices,
        options: WorkerOptions,
        values: SideGroup,
        torch_device: torch.device | None,
        pass_limit: PassLimit,
    ) -> None:
        self._tracker = tracker
        self._notices = notices
        self._options = options
        self._values = values
        self._torch_device = torch_device
        self._pass_limit = pass_limit
        self._train_step: TrainStep | None = None
        self._model: nn.Module | None = None
        self._optimizer_family: OptimizerFamily = "sgd"
        self._gradients: Gradients | None = None
        self._optimizer_hooks: OptimizerHooks | None = None
        self._reduction: Reduction | None = None
        self._shards: ShardedReduction | None = None
        self._non_finite: NonFiniteGuard | None = None
        self._replica_check: ReplicaCheck | None = None
        self._user_hook: tuple[Any, CommHook] | None = None

    @property
    def gradients(self) -> Gradients:
        """Backward passes of the batch in hand.

        Raises:
            ConfigError: no model is prepared.
        """
        if self._gradients is None:
            raise ConfigError("call session.prepare(model, optimizer) first")
        return self._gradients

    @property
    def train_step(self) -> TrainStep:
        """Whole optimizer steps.

        Raises:
            ConfigError: no model is prepared.
        """
        if self._train_step is None:
            raise ConfigError("call session.prepare(model, optimizer) first")
        return self._train_step

    @property
    def is_sharded(self) -> bool:
        """Whether ranks meet in every pass of the prepared model; False before there is one."""
        return self._shards is not None

    @property
    def normalises_over_rows(self) -> bool:
        """Whether the prepared model has batch normalisation; False before there is one."""
        return self._model is not None and has_batch_norm(self._model)

    @property
    def lr_factor(self) -> float:
        """What the learning rate was multiplied by in the newest update; 1 before there is one."""
        return 1.0 if self._optimizer_hooks is None else self._optimizer_hooks.factor

    @property
    def optimizer_family(self) -> OptimizerFamily:
        """What the prepared optimizer makes of a gradient; SGD's before there is one."""
        return self._optimizer_family

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
        if self._model is not None:
            raise ConfigError("session.prepare takes one model; put several networks into one nn.Module")
        bare = parts.model
        refuse_unfit_shards(bare, self._values.size)
        self._watch_optimizer(bare, parts.optimizer)
        sharded = is_sharded(bare)
        if self._torch_device is not None and not sharded:  # shards lie where their mesh computes
            bare.to(self._torch_device)
        self._tracker.device = next((p.device for p in bare.parameters()), self._tracker.device)
        self._tracker.norms.parameters = list(bare.parameters())
        self._tracker.scaler = parts.scaler
        self._optimizer_family = optimizer_family(parts.optimizer)
        if optimizer_known and self._optimizer_family == "adam":
            self._tracker.norms.preconditioner = AdamPreconditioner(parts.optimizer)
        if restored is not None:
            parts.load(restored)
        guard = ReplicaGuard(bare) if distributed() else None
        self._model = prepared = self._sharded(model) if sharded else self._replicate(model)
        by_tokens = self._options.weight_by == "tokens"
        complete = None if self._reduction is not None else self._complete_gradient
        complete = complete if self._shards is None else self._shards.complete
        checks = self._checks_of(bare)
        hooks = OutputWeights(
            self._tracker,
            by_tokens=by_tokens,
            complete=complete,
            notes_gradient=self._options.on_non_finite != "ignore",
        ).install(prepared)
        self._optimizer_hooks = OptimizerHooks(self._tracker, guard, self._options.lr_slew, checks)
        self._optimizer_hooks.factor = 1.0 if restored is None else lr_factor_of(restored)
        self._optimizer_hooks.install(parts.optimizer)
        self._gradients = Gradients(tracker=self._tracker, group=self._values, by_tokens=by_tokens, model=prepared)
        self._train_step = self._step_of(prepared, parts.optimizer, self._gradients, hooks)
        self._watch_for_compiler(bare, prepared, hooks)
        self._tracker.prepared = True
        return prepared

    def _watch_optimizer(self, bare: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that does not fit the model, now or once it was given more; before its other hooks."""
        stepped = SteppedParameters(bare, optimizer, self._values.size)
        optimizer.register_step_pre_hook(stepped.check)
        warn_of_local_decisions(optimizer, self._values.size)
        idle = IdleOptimizer()
        idle.install(optimizer)
        self._tracker.at_step_end.append(idle.step_ended)

    def _watch_for_compiler(self, bare: nn.Module, prepared: nn.Module, hooks: list[Hook]) -> None:
        if self._reduction is not None:
            updates = BackwardUpdates(bare)
            hooks.append(updates.install(prepared))
            self._tracker.hooks.append(updates)
        compiling = Compiling(hooks)
        self._tracker.at_step_begin.append(compiling.step_begins)
        self._tracker.before_record.append(compiling.step_ends)

    def _step_of(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Gradients, hooks: list[Hook]
    ) -> TrainStep:
        self._pass_limit.fewest = 2 if has_batch_norm(model) else 1
        reduction = self._reduction
        passes = SharePasses(
            tracker=self._tracker,
            notices=self._notices,
            gradients=gradients,
            model=model,
            limit=self._pass_limit,
            retries=self._options.on_out_of_memory == "retry",
            beyond_retry=lambda: reduction is not None and reduction.beyond_retry,
        )
        hooks += passes.hooks
        return TrainStep(tracker=self._tracker, passes=passes, model=model, optimizer=optimizer)

    def average_by(self, hook_state: Any, hook: CommHook) -> None:
        """Average gradients by the user's communication hook, from now on or from ``prepare`` on.

        Raises:
            ConfigError: the model is sharded, and no DDP reduces it.
        """
        if self._shards is not None:
            raise ConfigError(_HOOK_OF_DDP)
        self._user_hook = (hook_state, hook)
        if self._reduction is not None:
            self._reduction.average_by(hook_state, hook)

    def settle(self) -> None:
        """End every check that is under way; before a save, and wherever training pauses. Every rank must call this.

        Raises:
            RexError: the model holds an update that is not finite, or its replicas differ.
        """
        if self._non_finite is not None and self._replica_check is not None:
            self._non_finite.settle()
            self._replica_check.settle()

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
        if self._replica_check is not None:
            self._replica_check.compare_all(f"after step {self._tracker.progress.position.step - 1}")

    def agree_on_buffers(self) -> None:
        """Make buffers alike on all ranks; every one must call this."""
        reduction = self._reduction or self._shards
        if self._model is None or reduction is None:
            return
        progress = self._tracker.progress
        with self._values.presence.told("buffers and running statistics to be made alike"):
            replicas.agree_on_buffers(
                replicas.unwrap(self._model),
                reduction.process_group,
                progress.own_rows_since_sync,
                progress.total_rows_since_sync,
            )
        progress.synchronised()

    def _sharded(self, model: nn.Module) -> nn.Module:
        """Leave the reduction to FSDP, and stop the clock in it."""
        if self._user_hook is not None:
            raise ConfigError(_HOOK_OF_DDP)
        refuse_mixed_gradients(self._values, model.parameters())
        self._tracker.norms.lossless = False
        if self._options.norm_interval_steps:
            warn(
                "gradient norms of a sharded model are not taken, so its global batch does not grow; set "
                "max_global_batch_size to global_batch_size to say so"
            )
        limit_s = self._options.collective_timeout_s
        with self._values.presence.told("all ranks to prepare the sharded model", limit_s, any_error=False):
            self._shards = ShardedReduction(self._tracker, self._values.presence, limit_s)
        self._shards.install(replicas.unwrap(model))
        return model

    def _replicate(self, model: nn.Module) -> nn.Module:
        if not distributed():
            return model
        refuse_mixed_gradients(self._values, model.parameters())
        limit_s = self._options.collective_timeout_s
        # A model that differs between ranks is refused in there, too, and that is not the network's fault.
        with self._values.presence.told("all ranks to wrap the model", limit_s, any_error=False):
            ddp = replicas.wrapped(model, limit_s)
        thawed = ThawedGradients(replicas.unwrap(model))
        self._reduction = Reduction(self._tracker, ddp.process_group, self._values.presence, thawed)
        if self._user_hook is not None:
            self._reduction.average_by(*self._user_hook)
        self._reduction.install(ddp)
        return ddp

    def _checks_of(self, bare: nn.Module) -> list[BeforeUpdate]:
        """Make what looks at the gradient and at the replicas before each update."""
        self._non_finite = NonFiniteGuard(
            tracker=self._tracker,
            notices=self._notices,
            group=self._values,
            policy=self._options.on_non_finite,
            model=bare,
            reduction=self._reduction,
            sharded=self._shards is not None,
        )
        self._tracker.at_step_end.append(self._non_finite.step_ended)
        self._replica_check = ReplicaCheck(bare, self._values, self._options.replica_check_interval_steps)
        return [self._non_finite.before_update, self._replica_check.before_update]

    def _complete_gradient(self) -> None:
        """End a backward pass that nobody reduces: the local gradient is the global one."""
        self._tracker.last_gradient()
        self._tracker.reduction_ended()
