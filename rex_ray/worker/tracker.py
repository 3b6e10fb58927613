"""The life of the batch in the user's hand, as told by hooks: handed out, backward, reduced, consumed.

The user's loop stays a plain loop, so what happens in it is seen only through torch's hooks. This module is the one
place where they meet. What a step adds up to (``progress``), whether its times are evidence and what its record holds
(``measuring``), and what is said of a loop that uses it wrongly (``misuse``) is known elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from rex_ray.core.measuring import NormSchedule
from rex_ray.worker import misuse
from rex_ray.worker.data.sampler import Plan
from rex_ray.worker.measuring.evidence import Evidence
from rex_ray.worker.measuring.norms import GradientNorms
from rex_ray.worker.measuring.probes import RecordQueue
from rex_ray.worker.measuring.step_record import pending_record
from rex_ray.worker.measuring.timing import StepTimer, now_s
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.progress import Progress
from rex_ray.worker.step import StepHook, StepInfo, StepInHand

__all__ = ["StepTracker"]


class StepTracker:
    """Follows one step after the other.

    Args:
        rank: this rank.
        options: intervals and limits.
        device: where the model computes; changes once, when the model is prepared.
        generation: identity of the worker group, written into every record.
        records: takes each step's record.
        progress: moves on with each step that is consumed.

    Attributes:
        in_hand: the step whose batch the loop holds.
        hooks: told of each step's last local gradient, and of its reduction.
        at_step_begin: called before a batch is handed out.
        at_step_end: called when the loop is done with a step that was reduced, on every rank at the same place.
        before_record: called before a step's record is written.
        evidence: whether a step's times are any.
        norms: takes the gradient's norms.
        scaler: the prepared gradient scaler.
        prepared: whether there is a prepared model.
        last_step_s: wall time of the newest step that ended.
        batches_since_update: batches that had a backward pass since the optimizer last stepped.
    """

    def __init__(
        self,
        *,
        rank: int,
        options: WorkerOptions,
        device: torch.device,
        generation: str,
        records: RecordQueue,
        progress: Progress,
    ) -> None:
        self._rank = rank
        self.device = device
        self._generation = generation
        self._records = records
        self.progress = progress
        self.in_hand: StepInHand | None = None
        self.hooks: list[StepHook] = []
        self.at_step_begin: list[Callable[[], None]] = []
        self.at_step_end: list[Callable[[StepInHand], None]] = []
        self.before_record: list[Callable[[StepInHand], None]] = []
        self.evidence = Evidence(warm_up_steps=options.warm_up_steps, settle_steps=options.settle_steps)
        self.norms = GradientNorms(
            NormSchedule(interval_steps=options.norm_interval_steps, dense_steps=options.norm_dense_steps)
        )
        self.scaler: torch.amp.GradScaler | None = None
        self.prepared = False
        self.last_step_s: float | None = None
        self.batches_since_update = 0

    # --- the loader's side

    def begin(self, plan: Plan, *, asked_s: float, waited_s: float = 0.0) -> StepInHand:
        """A batch is handed to the user's loop.

        Args:
            plan: the step's rows.
            asked_s: when the loop asked for it; the step's wall time starts here.
            waited_s: how long the data took, without what was agreed with other ranks in between.
        """
        for prepare in self.at_step_begin:
            prepare()
        self.norms.begin(plan.step, plan.allocation.global_batch_size)
        self.progress.num_batches += 1
        rows = plan.num_rows
        info = StepInfo(step=plan.step, num_rows=rows[self._rank], all_rows=rows, began_s=now_s(), data_s=waited_s)
        self.in_hand = StepInHand(
            plan=plan,
            rank=self._rank,
            asked_s=asked_s,
            info=info,
            timer=StepTimer(self.device),
            flags=self.evidence.flags_of(plan),
        )
        return self.in_hand

    def asked_for_next(self) -> None:
        """The loop asks for another batch, so it is done with the one in hand.

        Raises:
            RexError: it did nothing with it.
        """
        step = self.in_hand
        if step is None:
            return
        if step.chunks_open:
            raise misuse.unfinished_micro_batches(step)
        if not step.backward_seen:
            raise misuse.unused_batch(step)
        self._consume(step)
        self._end()
        self.close()
        self.in_hand = None

    def left_loop(self) -> None:
        """The loop was left, or something else begins: a batch counts as consumed only if it was reduced."""
        self._end()
        self.close()
        self.in_hand = None

    def close(self) -> None:
        """End the step in hand, if it was reduced, and write its record. Harmless when repeated."""
        step = self.in_hand
        if step is None or step.closed or not step.num_reductions:
            return
        self._consume(step)
        for look in self.before_record:
            look(step)
        step.closed = True
        step_s = now_s() - step.asked_s
        self.last_step_s = step_s
        self._records.put(pending_record(step, step_s, self._generation, self.device))

    def gap(self) -> None:
        """Something other than training takes place: the next step's times are no evidence."""
        self.close()
        self.evidence.gap()

    def waiting(self) -> AbstractContextManager[None]:
        """Leave a wait for other ranks that the loop asks for out of the own time of the step in hand."""
        return nullcontext() if self.in_hand is None else self.in_hand.timer.paused()

    def need_in_hand(self, what: str) -> StepInHand:
        """Return the batch in hand.

        Raises:
            ConfigError: there is none.
        """
        if self.in_hand is None:
            raise misuse.no_batch(what)
        return self.in_hand

    def flush(self) -> None:
        """Send every record that is complete."""
        self._records.flush()

    # --- the model's side

    def backward_began(self) -> None:
        """A gradient reaches the model's output."""
        if self.in_hand is not None and not self.in_hand.backward_seen:
            self.in_hand.backward_seen = True
            self.batches_since_update += 1

    def last_gradient(self) -> None:
        """The last local gradient before a reduction is there."""
        if self.in_hand is None:
            return
        for hook in self.hooks:
            hook.last_gradient(self.in_hand.info)
        self.in_hand.timer.last_gradient()
        if self.scaler is not None and self.scaler.is_enabled():
            self.in_hand.scale = self.scaler.scale(torch.ones((), device=self.device))

    @property
    def measures_norm(self) -> bool:
        """Whether norms are taken at this step, and would be of this step's gradient alone."""
        step = self.in_hand
        if step is None or not self.norms.due(step.plan.step):
            return False
        return self.batches_since_update + (not step.backward_seen) == 1

    def reduction_ended(self) -> None:
        """Every gradient is the global one; the optimizer has not stepped."""
        step = self.in_hand
        if step is None:
            return
        for hook in self.hooks:
            hook.reduced(step.info)
        step.timer.reduced()
        if self.measures_norm:
            self.norms.reduced(step)
        step.num_reductions += 1
        step.called_since_reduction = False

    # --- inside

    def _end(self) -> None:
        """The loop is done with the step in hand, on every rank at the same place; they may agree on something."""
        if self.in_hand is not None and self.in_hand.num_reductions:
            for look in self.at_step_end:
                look(self.in_hand)

    def _consume(self, step: StepInHand) -> None:
        if not step.consumed:
            step.consumed = True
            self.progress.consume(step)
