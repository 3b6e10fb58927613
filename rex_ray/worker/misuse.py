"""What a loop did wrong with the batch in its hand, as errors that say so and what to do instead."""

from __future__ import annotations

import math

from rex_ray.core.errors import ConfigError, RexError
from rex_ray.worker.step import StepInHand

__all__ = ["check_whole_batch_seen", "no_batch", "unfinished_micro_batches", "unused_batch"]


def no_batch(what: str) -> ConfigError:
    """Return the error of a call that works on the batch in hand where there is none."""
    return ConfigError(f"{what} works on the batch that session.loader(...) handed out, and there is none")


def unfinished_micro_batches(step: StepInHand) -> RexError:
    """Return the error of a step whose loop over micro-batches never came to its last one."""
    return RexError(
        f"step {step.plan.step}: the loop over session.micro_batches ended before its last micro-batch, so "
        "this rank never reduced its gradient while the others wait for it; let the loop run to its end"
    )


def unused_batch(step: StepInHand) -> RexError:
    """Return the error of a step in which no gradient was seen."""
    return RexError(
        f"step {step.plan.step}: the next training batch was asked for, but no backward pass of the prepared "
        f"model used the last one. {_reason(step)}; every rank must use every batch, an empty one too, or the "
        "others wait for its gradient"
    )


def check_whole_batch_seen(step: StepInHand) -> None:
    """Refuse an update whose micro-batches do not add up to the batch.

    Raises:
        RexError: says what was seen, and what the batch holds.
    """
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


def _reason(step: StepInHand) -> str:
    """Guess why no gradient was seen, and say what to do."""
    if step.opaque_output is not None:
        return (
            f"It returned {step.opaque_output}, in which no tensor with a gradient was found: return tensors, or "
            "tuples, lists, mappings or dataclasses of them"
        )
    if step.called_since_reduction:
        return (
            "The model ran on it: leave no batch out, as for a loss that is not finite, since on_non_finite='skip' has "
            "all ranks leave out that step; and draw none ahead of the step that uses it, as a prefetcher does"
        )
    return "Call the model that session.prepare returned, and iterate session.eval_loader(...) to evaluate"
