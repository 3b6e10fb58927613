"""What a run's controller had learnt by its end, read back from its journal."""

from __future__ import annotations

from rex_ray.control.journal import Journal
from rex_ray.control.reading import Recent
from rex_ray.control.replay import restore
from rex_ray.core.step_time import StepTimeBook
from rex_ray.policies import learnt

__all__ = ["learnt_book"]


def learnt_book(journal: Journal) -> StepTimeBook | None:
    """Return the step-time book of a run, from its last snapshot and the events since; None where nothing is learnt.

    Raises:
        ConfigError: the journal names a policy or an option that this rex_ray does not have.
    """
    return learnt.learnt_book(restore(Recent.of(journal)).state.policy_state)
