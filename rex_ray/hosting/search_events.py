"""From what the search helper says to what a controller hears: neither of them knows the other."""

from __future__ import annotations

from typing import assert_never

from rex_ray.control.events import SearchFailed, SearchFinished, TrialProposed
from rex_ray.search.protocol import Failed, Finished, Reply, TrialAsked

__all__ = ["event_of"]


def event_of(reply: Reply) -> TrialProposed | SearchFinished | SearchFailed:
    """Return a reply as an event."""
    match reply:
        case TrialAsked(search_id=search_id, trial=trial, local_batch_sizes=sizes):
            return TrialProposed(search_id=search_id, trial=trial, local_batch_sizes=sizes)
        case Finished(search_id=search_id, local_batch_sizes=sizes, objective=objective):
            return SearchFinished(search_id=search_id, local_batch_sizes=sizes, objective=objective)
        case Failed(search_id=search_id, reason=reason):
            return SearchFailed(search_id=search_id, reason=reason)
        case unknown:
            assert_never(unknown)
