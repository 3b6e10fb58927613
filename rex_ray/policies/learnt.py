"""What a policy has learnt of kinds of device, whichever its parts and wrappers are."""

from __future__ import annotations

from rex_ray.core.step_time import StepTimeBook
from rex_ray.core.types import LearntShape

__all__ = ["learnt_book", "learnt_shapes"]

_WAY_DOWN = ("inner", "split", "book")
"""How states nest: a wrapper's, a composition's, a split's."""


def learnt_book(policy_state: object | None) -> StepTimeBook | None:
    """Return the step-time book in a policy's memory; None where it learns no curves."""
    state = policy_state
    while state is not None and not isinstance(state, StepTimeBook):
        state = next((getattr(state, name) for name in _WAY_DOWN if hasattr(state, name)), None)
    return state


def learnt_shapes(policy_state: object | None) -> tuple[LearntShape, ...]:
    """Return what is known of each kind of device, sorted by kind; nothing where no curves are learnt."""
    book = learnt_book(policy_state)
    return () if book is None else book.shapes
