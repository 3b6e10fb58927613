"""How often to ask for what is not done: a wrapper may hold a decision back for ever, and others wait behind it."""

from __future__ import annotations

__all__ = ["PATIENT_STEPS", "is_due"]

PATIENT_STEPS, ASK_AGAIN_STEPS = 64, 16
"""What was asked for at so many steps and not taken up is asked for only now and then: until it comes, others'
decisions must not wait for it. A switch takes far fewer steps, and what stands for longer is held back on purpose."""


def is_due(num_steps: int) -> bool:
    """Return whether to ask at the ``num_steps``-th step of the asking, from 1."""
    return num_steps <= PATIENT_STEPS or num_steps % ASK_AGAIN_STEPS == 0
