"""What a run's controller had learnt by its end, read back from its journal."""

from __future__ import annotations

from rex_ray.control.journal import Journal
from rex_ray.control.replay import restore
from rex_ray.core.step_time import StepTimeBook

__all__ = ["learnt_book"]

_WAY_DOWN = ("inner", "split", "book")
"""How states nest: a wrapper's, a composition's, a split's."""


def learnt_book(journal: Journal) -> StepTimeBook | None:
    """Return the step-time book of a run, from its last snapshot and the events since; None where nothing is learnt.

    Raises:
        ConfigError: the journal names a policy or an option that this rex_ray does not have.
    """
    state: object = restore(journal).state.policy_state
    while state is not None and not isinstance(state, StepTimeBook):
        state = next((getattr(state, name) for name in _WAY_DOWN if hasattr(state, name)), None)
    return state
