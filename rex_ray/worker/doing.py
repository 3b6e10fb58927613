"""Where the loop is, in words for those that wait for it."""

from __future__ import annotations

from rex_ray.worker.group.last_words import Activity
from rex_ray.worker.step import StepInHand

__all__ = ["activity_of", "reduction_name"]


def reduction_name(step: StepInHand | None) -> str:
    """Return what a reduction is called in the words of those that wait for it."""
    return "a gradient" if step is None else f"the gradient of step {step.plan.step}"


def activity_of(step: StepInHand | None, next_step: int) -> Activity:
    """Say where the loop is; asked from another thread, so that the loop need not say it.

    Args:
        step: the step in hand.
        next_step: the one after it, or the next where none is in hand.
    """
    if step is None:
        return Activity(doing=f"between batches, before step {next_step}")
    where = f"at step {step.plan.step}"
    if step.timer.reducing:
        return Activity(doing=f"{where}, reducing its gradient", waits_for=reduction_name(step))
    if step.num_reductions:
        return Activity(doing=f"{where}, after its backward pass")
    return Activity(doing=f"{where}, in its {'backward' if step.backward_seen else 'forward'} pass")
