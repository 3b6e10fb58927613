"""What happened, in one plain sentence each: what changed, why, what was hoped for, and later what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rex_ray.control.events import DrainNoticed, GroupStarted, MemoryLimited, SearchFailed, SearchFinished, WorkerLost
from rex_ray.control.notes import Applied, Decided, Measured, Refused, Withdrawn
from rex_ray.core.types import WorkerSpec

__all__ = [
    "about_applied",
    "about_decision",
    "about_drain",
    "about_group",
    "about_loss",
    "about_measured",
    "about_memory",
    "about_refused",
    "about_search_end",
    "about_withdrawn",
    "duration",
    "shares",
]

_MOST_SPELT: Final = 8
"""Shares of more workers than these are told by kind of device."""

_FLAT: Final = 0.005


def shares(local_batch_sizes: Sequence[int], workers: Sequence[WorkerSpec]) -> str:
    """Return shares in rank order, ``33/33/95/95``, or of many workers by kind: ``T4 32-33, V100 95``."""
    if len(local_batch_sizes) <= _MOST_SPELT or len(local_batch_sizes) != len(workers):
        return "/".join(map(str, local_batch_sizes))
    rows: dict[str, list[int]] = {}
    for worker, size in zip(workers, local_batch_sizes, strict=True):
        rows.setdefault(worker.device, []).append(size)
    return ", ".join(f"{device} {_range(sizes)}" for device, sizes in rows.items())


def duration(seconds: float) -> str:
    """Return a time as people say it: ``45 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def about_group(event: GroupStarted, first: Decided | None) -> str:
    """A worker group formed."""
    kinds: dict[str, int] = {}
    for worker in event.problem.workers:
        kinds[worker.device] = kinds.get(worker.device, 0) + 1
    num = event.problem.num_workers
    told = f"{num} worker{'s' if num > 1 else ''} ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})"
    told += f" begin at step {event.step}"
    if first is None or first.proposal is None:
        return told
    sizes = first.proposal.local_batch_sizes
    return f"{told} with {shares(sizes, event.problem.workers)} of {sum(sizes)} rows: {first.reason}"


def about_decision(note: Decided, before: Sequence[int], workers: Sequence[WorkerSpec], lr_factor: float) -> str:
    """The policy asked for something.

    Args:
        note: what for.
        before: shares that the group runs.
        workers: the group.
        lr_factor: factor on the learning rate that the group runs.
    """
    if note.proposal is None or note.kind == "world_size":
        return f"asks for another number of workers, because {note.reason}"
    after = note.proposal.local_batch_sizes
    told = _asked(note, before, after, workers)
    if note.proposal.lr_factor != lr_factor and note.kind != "search":
        told += f", learning rate x{note.proposal.lr_factor:.4g} instead of x{lr_factor:.4g}"
    told += f", because {note.reason}"
    if note.predicted_gain is not None:
        # What growth saves is time to progress: a row of a larger batch is worth less than it takes.
        what = "of the time to the same progress" if note.kind == "change_global_batch" else "of a step's time"
        told += f"; expects to save {note.predicted_gain:.1%} {what}"
    return told if note.version is not None or note.kind == "search" else f"advice only, not applied: {told}"


def about_refused(note: Refused) -> str:
    """The policy asked for what no group can run."""
    return f"what the policy asked for cannot be run and is left out: {note.reason}"


def about_applied(note: Applied, workers: Sequence[WorkerSpec]) -> str:
    """The group switched."""
    sizes = note.local_batch_sizes
    steps = f"{note.lag_steps} step{'s' if note.lag_steps != 1 else ''}"
    return f"runs {shares(sizes, workers)} of {sum(sizes)} rows from step {note.step} on, {steps} after the decision"


def about_measured(note: Measured, decided_step: int | None, kind: str | None) -> str:
    """What a change brought.

    Args:
        note: what was measured.
        decided_step: when it was decided, or None where that is forgotten.
        kind: what was decided, in the journal's words.
    """
    which = f"allocation {note.version}" if decided_step is None else f"the change decided at step {decided_step}"
    if abs(note.gain) < _FLAT:
        brought = "changed nothing in the time of a row"
    elif note.gain > 0:
        brought = f"saves {note.gain:.1%} of the time of a row"
    else:
        brought = f"costs {-note.gain:.1%} more time for a row"
    times = f"slowest worker {note.before_us / 1e3:.1f} ms before, {note.after_us / 1e3:.1f} ms after"
    hoped = "" if note.predicted_gain is None else f"; expected were {note.predicted_gain:.1%}"
    if hoped and kind == "change_global_batch":
        hoped += " of the time to the same progress, for which a row of a larger batch is worth less"
    return f"{which} {brought} ({times}){hoped}"


def about_withdrawn(note: Withdrawn) -> str:
    """A switch that did not come about."""
    waited = duration(note.waited_us / 1e6)
    return f"allocation {note.version} was not taken up within {waited}; the shares of before are published again"


def about_loss(event: WorkerLost, workers: Sequence[WorkerSpec]) -> str:
    """A rank died."""
    lost = next((worker for worker in workers if worker.rank == event.rank), None)
    what = "" if lost is None else f" ({lost.device}{f' on {lost.node}' if lost.node else ''})"
    return f"rank {event.rank}{what} was lost: {event.reason}"


def about_drain(event: DrainNoticed) -> str:
    """A node is about to be taken away."""
    when = "soon" if event.left_us is None else f"in {duration(event.left_us / 1e6)}"
    who = f"rank{'s' if len(event.ranks) > 1 else ''} {', '.join(map(str, event.ranks))}"
    return f"{who} will be taken away {when}: {event.reason}"


def about_memory(event: MemoryLimited) -> str:
    """A kind of device ran out of memory."""
    return f"rank {event.rank} ran out of memory at {event.num_rows} rows; later groups give {event.device} fewer"


def about_search_end(event: SearchFinished | SearchFailed) -> str:
    """A search ended."""
    if isinstance(event, SearchFailed):
        return f"a search failed, the exact split stands: {event.reason}"
    return "a search ended; the policy judges what it found"


def _asked(note: Decided, before: Sequence[int], after: Sequence[int], workers: Sequence[WorkerSpec]) -> str:
    now = shares(after, workers)
    if note.kind == "search":
        return f"searches for better shares than {now}"
    if note.kind == "trial":
        return f"tries {now} rows"
    if sum(before) != sum(after):
        verb = "grows" if sum(after) > sum(before) else "shrinks"
        return f"{verb} the global batch from {sum(before)} to {sum(after)} rows, shares {now}"
    if tuple(before) == tuple(after):
        return "keeps the shares"
    return f"moves the shares from {shares(before, workers)} to {now} rows"


def _range(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return str(low) if low == high else f"{low}-{high}"
