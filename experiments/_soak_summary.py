"""What half an hour of training under fire came to: pure arithmetic over what was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from experiments._harness import Row

__all__ = ["FAULTS", "Law", "Sample", "Soaked", "faults_in_turn", "growth_mib", "laws", "slope_mib_per_hour"]

FAULTS = ("worker", "control actor", "queue")
MOST_GROWTH_MIB = 32.0
"""A process whose memory grows by more between the run's second and last quarter leaks. Allocators keep some."""

MOST_GROWTH_SHARE = 0.1
MOST_JOURNAL_BYTES_PER_STEP = 400.0
"""Two workers' columns are some 30 bytes a step; decisions, metrics and snapshots come on top in a busy run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look.

    Attributes:
        at_s: since the run began.
        rss_mib: resident memory by kind of process, the largest of each kind.
        num_steps: optimizer steps so far, those done again included.
        journal_bytes: of the whole journal.
    """

    at_s: float
    rss_mib: Mapping[str, float]
    num_steps: int
    journal_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """What is known at the end.

    Attributes:
        samples: in order.
        faults: what was killed, in order.
        num_restarts: worker groups beyond the first.
        epochs: that the model was trained for.
        fewest: times that the row seen least was seen.
        most: times that the row seen most was.
        replica_differences: how often ranks found that their parameters differ.
        left: what was left behind.
    """

    samples: Sequence[Sample]
    faults: Sequence[str]
    num_restarts: int
    epochs: int
    fewest: float
    most: float
    replica_differences: int
    left: Sequence[str] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Something that must hold, and whether it does."""

    name: str
    holds: bool
    value: str

    def row(self) -> Row:
        """Return the law as a table's row."""
        return {"law": self.name, "holds": self.holds, "value": self.value}


def faults_in_turn(seed: int, count: int) -> list[str]:
    """Return which fault comes when: every kind once, in an order of its own, before any comes again."""
    rng = np.random.default_rng(seed)
    faults: list[str] = []
    while len(faults) < count:
        faults += [FAULTS[k] for k in rng.permutation(len(FAULTS))]
    return faults[:count]


def laws(soaked: Soaked) -> list[Law]:
    """Judge a run."""
    lost, doubled = max(soaked.epochs - soaked.fewest, 0.0), max(soaked.most - soaked.epochs, 0.0)
    found = [
        Law(name="every row once an epoch", holds=lost == doubled == 0, value=f"{lost:g} lost, {doubled:g} doubled"),
        Law(
            name="no drift between replicas",
            holds=soaked.replica_differences == 0,
            value=f"{soaked.replica_differences} differences",
        ),
        Law(
            name="a restart per killed worker, and no other",
            holds=soaked.num_restarts == list(soaked.faults).count("worker"),
            value=f"{soaked.num_restarts} restarts, {list(soaked.faults).count('worker')} workers killed",
        ),
        Law(name="nothing left behind", holds=not soaked.left, value=", ".join(soaked.left) or "nothing"),
    ]
    for kind in kinds_of(soaked.samples):
        growth, level = growth_mib(soaked.samples, kind), level_mib(soaked.samples, kind)
        found.append(
            Law(
                name=f"memory of {kind} is flat",
                holds=growth <= max(MOST_GROWTH_MIB, MOST_GROWTH_SHARE * level),
                value=f"{growth:+.1f} MiB on {level:.0f}",
            )
        )
    per_step = journal_bytes_per_step(soaked.samples)
    found.append(
        Law(
            name="the journal is bounded per step",
            holds=per_step <= MOST_JOURNAL_BYTES_PER_STEP,
            value=f"{per_step:.0f} bytes a step in the second half",
        )
    )
    return found


def kinds_of(samples: Sequence[Sample]) -> list[str]:
    """Return the kinds of process that were seen."""
    return list(dict.fromkeys(kind for sample in samples for kind in sample.rss_mib))


def level_mib(samples: Sequence[Sample], kind: str) -> float:
    """Return the median memory of a kind."""
    return float(np.median([sample.rss_mib[kind] for sample in samples if kind in sample.rss_mib]))


def growth_mib(samples: Sequence[Sample], kind: str) -> float:
    """Return how much a kind's median memory grew from the second quarter of the run to the last.

    The first quarter is left out: caches fill, and workers have not been restarted yet.
    """
    end_s = samples[-1].at_s
    early = [s.rss_mib[kind] for s in samples if kind in s.rss_mib and end_s / 4 <= s.at_s < end_s / 2]
    late = [s.rss_mib[kind] for s in samples if kind in s.rss_mib and s.at_s >= 3 * end_s / 4]
    return float(np.median(late) - np.median(early)) if early and late else 0.0


def slope_mib_per_hour(samples: Sequence[Sample], kind: str) -> float:
    """Return the slope of a kind's memory after the first quarter, by least squares."""
    end_s = samples[-1].at_s
    points = [(s.at_s, s.rss_mib[kind]) for s in samples if kind in s.rss_mib and s.at_s >= end_s / 4]
    if len({at_s for at_s, _ in points}) < 2:
        return 0.0
    times, values = np.array(points).T
    return float(np.polyfit(times / 3600.0, values, 1)[0])


def journal_bytes_per_step(samples: Sequence[Sample]) -> float:
    """Return the journal's growth per step in the second half of the run, when nothing is new any more."""
    middle, last = samples[len(samples) // 2], samples[-1]
    steps = last.num_steps - middle.num_steps
    return (last.journal_bytes - middle.journal_bytes) / steps if steps > 0 else 0.0
