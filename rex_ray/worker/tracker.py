"""The life of the batch in the user's hand, as told by hooks: handed out, backward, reduced, consumed.

The user's loop stays a plain loop, so what happens in it is seen only through torch's hooks. This module is the one
place where they meet; it holds the position in the data and turns each step into a record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from rex_ray.core.errors import ConfigError, RexError
from rex_ray.core.measuring import NormSchedule
from rex_ray.core.types import StepFlag, StepRecord
from rex_ray.worker.data.sampler import Plan, Position
from rex_ray.worker.group.last_words import Activity
from rex_ray.worker.link import IncidentRecord, KindLimit
from rex_ray.worker.measuring.norms import GradientNorms
from rex_ray.worker.measuring.probes import DeferredScalar, PendingRecord, RecordQueue
from rex_ray.worker.measuring.timing import StepTimer, now_s
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.step import StepHook, StepInfo, StepInHand

__all__ = ["StepHook", "StepInHand", "StepInfo", "StepTracker"]


class StepTracker:
    """Follows one step after the other.

    Args:
        rank: this rank.
        options: intervals and limits.
        device: where the model computes; changes once, when the model is prepared.
        generation: identity of the worker group, written into every record.
        records: takes each step's record.
    """

    def __init__(
        self, *, rank: int, options: WorkerOptions, device: torch.device, generation: str, records: RecordQueue
    ) -> None:
        self._rank = rank
        self._options = options
        self.device = device
        self._generation = generation
        self._records = records
        self._num_steps = 0
        self._settling = 0
        self._last_sizes: tuple[int, ...] | None = None
        self._gap = True
        self.position = Position()
        self.in_hand: StepInHand | None = None
        self.hooks: list[StepHook] = []
        self.at_step_begin: list[Callable[[], None]] = []
        self.at_step_end: list[Callable[[StepInHand], None]] = []
        self.before_record: list[Callable[[StepInHand], None]] = []
        self.is_timed = True
        self.norms = GradientNorms(
            NormSchedule(interval_steps=options.norm_interval_steps, dense_steps=options.norm_dense_steps)
        )
        self.scaler: torch.amp.GradScaler | None = None
        self.prepared = False
        self.reference_batch: int | None = None
        self._reference_steps = 0
        self._rows_consumed = 0
        self.last_step_s: float | None = None
        self.batches_since_update = 0
        self.own_rows_since_sync = 0
        self.total_rows_since_sync = 0

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
        rows = plan.num_rows
        info = StepInfo(step=plan.step, num_rows=rows[self._rank], all_rows=rows, began_s=now_s(), data_s=waited_s)
        self.in_hand = StepInHand(
            plan=plan,
            rank=self._rank,
            asked_s=asked_s,
            info=info,
            timer=StepTimer(self.device),
            flags=self._flags(plan),
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
            raise RexError(
                f"step {step.plan.step}: the loop over session.micro_batches ended before its last micro-batch, so "
                "this rank never reduced its gradient while the others wait for it; let the loop run to its end"
            )
        if not step.backward_seen:
            raise RexError(
                f"step {step.plan.step}: the next training batch was asked for, but no backward pass of the prepared "
                f"model used the last one. {_reason(step)}; every rank must use every batch, an empty one too, or the "
                "others wait for its gradient"
            )
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
        self._records.put(self._pending_record(step, step_s))

    def gap(self) -> None:
        """Something other than training takes place: the next step's times are no evidence."""
        self.close()
        self._gap = True

    def waiting(self) -> AbstractContextManager[None]:
        """Leave a wait for other ranks that the loop asks for out of the own time of the step in hand."""
        return nullcontext() if self.in_hand is None else self.in_hand.timer.paused()

    @property
    def num_batches(self) -> int:
        """Batches that were handed out in this session."""
        return self._num_steps

    @property
    def reference_steps(self) -> int:
        """Steps of the reference batch that this session's batches make up, the one in hand included."""
        step = self.in_hand
        return self._reference_steps + (0 if step is None or step.consumed else self._reference_steps_of(step.plan))

    @property
    def rows_consumed(self) -> int:
        """Rows of all ranks in this session's batches, the one in hand included."""
        step = self.in_hand
        return self._rows_consumed + (0 if step is None or step.consumed else step.plan.total_rows)

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

    def before_update(self) -> None:
        """The optimizer is about to step.

        Raises:
            RexError: the user's micro-batches do not add up to the batch.
        """
        step = self.in_hand
        if step is None or not step.num_reductions:
            return
        if step.tokens is not None and not math.isclose(step.tokens_seen, step.tokens):
            raise RexError(
                f"step {step.plan.step}: {step.tokens:g} tokens were announced for the batch, and the losses given to "
                f"session.backward held {step.tokens_seen:g}"
            )
        if step.tokens is None and step.own_chunks and step.rows_seen != step.num_rows:
            raise RexError(
                f"step {step.plan.step}: the micro-batches of session.accumulate() held {step.rows_seen} rows by the "
                f"first dimension of the model's input, the loader's batch {step.num_rows}; each row must pass "
                "through the model once, rows first, the last micro-batch outside the `with` block"
            )

    def incident(self, step: int, kind: str, message: str) -> None:
        """Tell the journal of something that went wrong on this rank and was dealt with."""
        self._records.tell(
            IncidentRecord(generation=self._generation, rank=self._rank, step=step, kind=kind, message=message)
        )

    def ran_out_of_memory(self, device_kind: str, message: str) -> None:
        """Memory ran out in the step in hand, and training ends here: have later groups give fewer rows.

        Outside of a step, as while evaluating, it says nothing about shares.
        """
        step = self.in_hand
        if step is None or step.closed or not step.num_rows:
            return
        self._records.tell(
            IncidentRecord(
                generation=self._generation,
                rank=self._rank,
                step=step.plan.step,
                kind="out_of_memory",
                message=f"memory ran out at {step.num_rows} rows on {device_kind}, which ends this group ({message})",
                limits=KindLimit(device=device_kind, num_rows=step.num_rows),
            )
        )

    def activity(self) -> Activity:
        """Say where the loop is; asked from another thread, so that the loop need not say it."""
        step = self.in_hand
        if step is None:
            return Activity(doing=f"between batches, before step {self.position.step}")
        where = f"at step {step.plan.step}"
        if step.timer.reducing:
            return Activity(doing=f"{where}, reducing its gradient", waits_for=self.reduction_name)
        if step.num_reductions:
            return Activity(doing=f"{where}, after its backward pass")
        return Activity(doing=f"{where}, in its {'backward' if step.backward_seen else 'forward'} pass")

    @property
    def reduction_name(self) -> str:
        """What a reduction is called in the words of those that wait for it."""
        step = self.in_hand
        return "a gradient" if step is None else f"the gradient of step {step.plan.step}"

    # --- inside

    def _end(self) -> None:
        """The loop is done with the step in hand, on every rank at the same place; they may agree on something."""
        if self.in_hand is not None and self.in_hand.num_reductions:
            for look in self.at_step_end:
                look(self.in_hand)

    def _consume(self, step: StepInHand) -> None:
        if not step.consumed:
            step.consumed = True
            total_rows = step.plan.total_rows
            self.position = step.plan.after
            self._reference_steps += self._reference_steps_of(step.plan)
            self._rows_consumed += total_rows
            self.own_rows_since_sync += step.num_rows
            self.total_rows_since_sync += total_rows

    def _reference_steps_of(self, plan: Plan) -> int:
        return 1 if self.reference_batch is None else plan.reference_steps(self.reference_batch)

    def _flags(self, plan: Plan) -> StepFlag:
        flags = StepFlag.NONE
        sizes = plan.allocation.local_batch_sizes
        if self._last_sizes is not None and sizes != self._last_sizes:
            self._settling = self._options.settle_steps
        self._last_sizes = sizes
        if self._num_steps < self._options.warm_up_steps or self._settling > 0 or not self.is_timed:
            flags |= StepFlag.WARM_UP
        if self._gap:
            flags |= StepFlag.AFTER_GAP
        if plan.partial:
            flags |= StepFlag.PARTIAL
        self._num_steps += 1
        self._settling = max(self._settling - 1, 0)
        self._gap = False
        return flags

    def _pending_record(self, step: StepInHand, step_s: float) -> PendingRecord:
        once = step.num_reductions == 1
        norms = step.norms
        skipped = StepFlag.SKIPPED in step.flags
        measured = once and norms.sound and norms.local_sq is not None and not skipped
        known = partial(
            StepRecord,
            generation=self._generation,
            epoch=step.plan.epoch,
            rank=self._rank,
            step=step.plan.step,
            allocation_version=step.plan.allocation.version,
            num_rows=step.num_rows,
            data_s=step.info.data_s,
            step_s=step_s,
            num_groups=norms.num_groups if measured else int(step.share_weight > 0),
            num_norm_steps=norms.num_steps if measured else 1,
            peak_memory_bytes=self._peak_memory(),
        )
        return PendingRecord(
            known=known,
            timer=step.timer,
            flags=step.flags,
            local_sq=DeferredScalar(norms.local_sq) if measured and norms.local_sq is not None else None,
            local_factor=norms.factor,
            global_sq=DeferredScalar(norms.global_sq) if measured and norms.global_sq is not None else None,
            scale=DeferredScalar(step.scale) if step.scale is not None else None,
            loss=DeferredScalar(step.loss) if step.loss is not None else None,
        )

    def _peak_memory(self) -> int | None:
        if self.device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def need_in_hand(self, what: str) -> StepInHand:
        """Return the batch in hand.

        Raises:
            ConfigError: there is none.
        """
        if self.in_hand is None:
            raise ConfigError(f"{what} works on the batch that session.loader(...) handed out, and there is none")
        return self.in_hand


def _reason(step: StepInHand) -> str:
    """Guess why no gradient was seen, and say what to do."""
    if step.opaque_output is not None:
        return (
            f"It returned {step.opaque_output}, in which no tensor with a gradient was found: return tensors, or "
            "tuples, lists, mappings or dataclasses of them"
        )
    return "Call the model that session.prepare returned, and iterate session.eval_loader(...) to evaluate"
