"""Seeds over processes, and what of a broken one is needed to break it.

Apart from the command: spawned processes import what they run by its name, and a package's ``__main__`` has none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from experiments.chaos.mishaps import FAULTS
from experiments.chaos.world import Outcome, run_seed

__all__ = ["run_all", "shrunk"]


def run_all(seeds: Sequence[int], num_events: int, without: frozenset[str], num_processes: int) -> list[Outcome]:
    """Run every seed for so many events."""
    run = partial(_run_quietly, num_events=num_events, without=without)
    if num_processes == 1:
        return [run(seed) for seed in seeds]
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(run, seeds))


def shrunk(outcome: Outcome, num_events: int, without: frozenset[str]) -> tuple[Outcome, frozenset[str]]:
    """Leave out every kind of fault without which the seed still breaks a law; return its last run and what is left."""
    waiting = [tuple(fault for fault in FAULTS if fault not in without)]
    while waiting:
        faults = waiting.pop()
        tried = _run_quietly(outcome.seed, num_events=num_events, without=without | {*faults})
        if tried.broken is not None:
            outcome, without = tried, without | {*faults}
        elif len(faults) > 1:
            middle = len(faults) // 2
            waiting += [faults[:middle], faults[middle:]]
    return outcome, without


def _run_quietly(seed: int, *, num_events: int, without: frozenset[str]) -> Outcome:
    """Run a seed without the warnings that every fault brings."""
    logging.getLogger("rex_ray").setLevel(logging.CRITICAL + 1)
    return run_seed(seed, num_events, without)
