"""Puts everything around a model that trains: its reduction, its weights, its checks, its steps.

Torch calls hooks in the order in which they were registered, and the order is this module's to know.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rex_ray.core.types import OptimizerFamily
from rex_ray.worker.group.side_group import SideGroup, distributed
from rex_ray.worker.model.attempts import Attempts
from rex_ray.worker.model.backward_updates import BackwardUpdates
from rex_ray.worker.model.compiling import Compiling, Hook
from rex_ray.worker.model.guard import ReplicaGuard
from rex_ray.worker.model.microbatch import Gradients
from rex_ray.worker.model.non_finite import NonFiniteGuard
from rex_ray.worker.model.optimizer_fit import IdleOptimizer, SteppedParameters, warn_of_local_decisions
from rex_ray.worker.model.optimizer_hooks import OptimizerHooks
from rex_ray.worker.model.pass_limit import PassLimit
from rex_ray.worker.model.passes import SharePasses
from rex_ray.worker.model.preconditioner import AdamPreconditioner, optimizer_family
from rex_ray.worker.model.reducing import ReducedModel, UserHook, reduced
from rex_ray.worker.model.replica_check import ReplicaCheck
from rex_ray.worker.model.replicas import is_sharded
from rex_ray.worker.model.sharding import refuse_unfit_shards
from rex_ray.worker.model.train_step import TrainStep
from rex_ray.worker.model.weighting import OutputWeights, has_batch_norm
from rex_ray.worker.notices import Notices
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.saving.state import Prepared, lr_factor_of
from rex_ray.worker.tracker import StepTracker

__all__ = ["Assembly", "PreparedModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model that trains on all ranks, and what is around it.

    Attributes:
        reduced: the model that the user's loop calls, and its reduction.
        optimizer_family: what the optimizer makes of a gradient.
        optimizer_hooks: around each update; know the factor on the learning rate.
        non_finite: looks at the gradient before each update.
        replica_check: compares the ranks' models.
        gradients: backward passes of the batch in hand.
        train_step: whole optimizer steps.
    """

    reduced: ReducedModel
    optimizer_family: OptimizerFamily
    optimizer_hooks: OptimizerHooks
    non_finite: NonFiniteGuard
    replica_check: ReplicaCheck
    gradients: Gradients
    train_step: TrainStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """Prepares a model.

    Attributes:
        tracker: told of each step's backward pass.
        notices: has the journal told of what is dealt with.
        options: the worker's limits, and what ranks are weighted by.
        values: ranks to agree with about token counts.
        torch_device: where the model is moved to; None: it stays where it is.
        pass_limit: rows that one forward and backward pass may have.
    """

    tracker: StepTracker
    notices: Notices
    options: WorkerOptions
    values: SideGroup
    torch_device: torch.device | None
    pass_limit: PassLimit

    def prepare(
        self,
        model: nn.Module,
        parts: Prepared,
        restored: MutableMapping[str, Any] | None,
        user_hook: UserHook | None,
        *,
        optimizer_known: bool,
    ) -> PreparedModel:
        """Load what a save holds of the parts, then put the reduction and the hooks around the model.

        Args:
            model: the model as the user gave it, bare or wrapped.
            parts: the bare model, and what steps it.
            restored: the save that training resumes from; what is loaded is taken out.
            user_hook: averages gradients in DDP's place.
            optimizer_known: the controller will hear of the optimizer; norms are taken as it understands them.

        Raises:
            ConfigError: see ``Session.prepare``.
        """
        tracker, options, bare, optimizer = self.tracker, self.options, parts.model, parts.optimizer
        refuse_unfit_shards(bare, self.values.size)
        self._watch_optimizer(bare, optimizer)
        if self.torch_device is not None and not is_sharded(bare):  # shards lie where their mesh computes
            bare.to(self.torch_device)
        family = optimizer_family(optimizer)
        self._introduce(parts, as_adam=optimizer_known and family == "adam")
        if restored is not None:
            parts.load(restored)
        guard = ReplicaGuard(bare) if distributed() else None
        whole = reduced(model, user_hook, tracker=tracker, options=options, values=self.values)
        non_finite, replica_check = self._checks(bare, whole)
        hooks = self._weigh(whole)
        checks = [non_finite.before_update, replica_check.before_update]
        optimizer_hooks = OptimizerHooks(tracker, guard, options.lr_slew, checks)
        optimizer_hooks.factor = 1.0 if restored is None else lr_factor_of(restored)
        optimizer_hooks.install(optimizer)
        gradients = Gradients(
            tracker=tracker, group=self.values, by_tokens=options.weight_by == "tokens", model=whole.model
        )
        passes = self._passes(whole, gradients)
        hooks += passes.hooks
        train_step = TrainStep(tracker=tracker, passes=passes, model=whole.model, optimizer=optimizer)
        if whole.replicated is not None:
            hooks.append(self._watch_backward(bare, whole.model))
        self._watch_for_compiler(hooks)
        tracker.prepared = True
        return PreparedModel(
            reduced=whole,
            optimizer_family=family,
            optimizer_hooks=optimizer_hooks,
            non_finite=non_finite,
            replica_check=replica_check,
            gradients=gradients,
            train_step=train_step,
        )

    def _watch_optimizer(self, bare: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that does not fit the model, now or once it was given more; before its other hooks."""
        stepped = SteppedParameters(bare, optimizer, self.values.size)
        optimizer.register_step_pre_hook(stepped.check)
        warn_of_local_decisions(optimizer, self.values.size)
        idle = IdleOptimizer()
        idle.install(optimizer)
        self.tracker.at_step_end.append(idle.step_ended)

    def _introduce(self, parts: Prepared, *, as_adam: bool) -> None:
        """Tell the tracker what trains, and where."""
        tracker, bare = self.tracker, parts.model
        tracker.device = next((p.device for p in bare.parameters()), tracker.device)
        tracker.norms.parameters = list(bare.parameters())
        tracker.scaler = parts.scaler
        if as_adam:
            tracker.norms.preconditioner = AdamPreconditioner(parts.optimizer)

    def _checks(self, bare: nn.Module, whole: ReducedModel) -> tuple[NonFiniteGuard, ReplicaCheck]:
        """Make what looks at the gradient and at the replicas before each update."""
        non_finite = NonFiniteGuard(
            tracker=self.tracker,
            notices=self.notices,
            group=self.values,
            policy=self.options.on_non_finite,
            model=bare,
            reduction=whole.replicated,
            sharded=whole.sharded is not None,
        )
        self.tracker.at_step_end.append(non_finite.step_ended)
        return non_finite, ReplicaCheck(bare, self.values, self.options.replica_check_interval_steps)

    def _weigh(self, whole: ReducedModel) -> list[Hook]:
        """Weight the gradient at the model's output; return the hooks that do."""
        weights = OutputWeights(
            self.tracker,
            by_tokens=self.options.weight_by == "tokens",
            complete=whole.complete,
            notes_gradient=self.options.on_non_finite != "ignore",
        )
        return weights.install(whole.model)

    def _passes(self, whole: ReducedModel, gradients: Gradients) -> SharePasses:
        self.pass_limit.fewest = 2 if has_batch_norm(whole.model) else 1
        reduction = whole.replicated
        attempts = Attempts(
            tracker=self.tracker,
            model=whole.model,
            limit=self.pass_limit,
            retries=self.options.on_out_of_memory == "retry",
            beyond_retry=lambda: reduction is not None and reduction.beyond_retry,
        )
        return SharePasses(
            tracker=self.tracker,
            notices=self.notices,
            gradients=gradients,
            model=whole.model,
            limit=self.pass_limit,
            attempts=attempts,
        )

    def _watch_backward(self, bare: nn.Module, prepared: nn.Module) -> Hook:
        """Refuse updates within the backward pass, which DDP cannot bear."""
        updates = BackwardUpdates(bare)
        self.tracker.hooks.append(updates)
        return updates.install(prepared)

    def _watch_for_compiler(self, hooks: list[Hook]) -> None:
        compiling = Compiling(hooks)
        self.tracker.at_step_begin.append(compiling.step_begins)
        self.tracker.before_record.append(compiling.step_ends)
