"""What a report is made from: one run as plain arrays and rows, whatever wrote its journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rex_ray.core.types import FloatArray, IntArray, Problem

__all__ = [
    "BoolArray",
    "DecisionRow",
    "EventRow",
    "FindingRow",
    "GroupData",
    "MetricPoint",
    "NoiseSeries",
    "RunData",
    "SearchRow",
    "TrialRow",
]

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupData:
    """The steps of one worker group in order; ``k`` steps, ``n`` ranks.

    Attributes:
        generation: the group's identity.
        devices: kind of device per rank.
        nodes: machine per rank, ``""`` where unknown.
        steps: step numbers, shape ``[k]``, rising.
        versions: allocation version per step, shape ``[k]``.
        num_rows: real rows, shape ``[k, n]``.
        own_s: data + compute in seconds, shape ``[k, n]``.
        step_s: wall time of the step in seconds, the mean over ranks, shape ``[k]``.
        partial: whether the rows are not what the allocation asks for (an epoch's last batch), shape ``[k]``.
        steady: whether the step's times are evidence about the steady state, shape ``[k]``.
        problem: what the policy was asked to solve: limits of shares, reference batch; None where unknown.
    """

    generation: str
    devices: tuple[str, ...]
    nodes: tuple[str, ...]
    steps: IntArray
    versions: IntArray
    num_rows: IntArray
    own_s: FloatArray
    step_s: FloatArray
    partial: BoolArray
    steady: BoolArray
    problem: Problem | None = None

    @property
    def num_workers(self) -> int:
        """Number of ranks ``n``."""
        return len(self.devices)

    @property
    def imbalance(self) -> FloatArray:
        """``max_i t_i / mean_i t_i - 1`` per step, shape ``[k]``; 0 where all took less than the clock tells."""
        mean_s = self.own_s.mean(axis=1)
        ratio: FloatArray = self.own_s.max(axis=1) / np.where(mean_s > 0, mean_s, np.inf) - (mean_s > 0)
        return ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """Metrics that the training loop reported, and when."""

    elapsed_s: float
    epoch: int
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRow:
    """One change that the policy asked for.

    Attributes:
        number: from 1, in the order of the journal; figures and table share it.
        kind: what was asked for, in the journal's words (``"first"``, ``"reallocate"``, ...).
        decided_at_step: newest complete step when it was decided.
        reason: the policy's own words.
        before: rows per rank that the group ran under, ``()`` before its first allocation.
        after: rows per rank that were asked for, ``()`` where it was no change of shares.
        version: allocation version, or None where nothing was published (``advise``, searches).
        applied_at_step: first complete step under it, or None if it never took effect.
        predicted_gain: fraction of step time that the policy expected to save, or None; for a change of the global
            batch, of the time to a reference row's worth of progress.
        measured_gain: fraction of a row's time that it did save, as the controller measured it, or None. Over a change
            of batch that is more than was predicted, since a row of a larger batch is worth less.
        lag_steps: steps from the newest one known at the decision to the first under it, or None.
        lr_factor: factor on the learning rate that was asked for with it.
        evidence: named figures behind it: statistics of tests, predicted times.
    """

    number: int
    kind: str
    decided_at_step: int
    reason: str
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    version: int | None = None
    applied_at_step: int | None = None
    predicted_gain: float | None = None
    measured_gain: float | None = None
    lag_steps: int | None = None
    lr_factor: float = 1.0
    evidence: Mapping[str, float] = field(default_factory=dict)

    @property
    def moved_rows(self) -> bool:
        """Whether shares changed by it: it took effect, and was not of the learning rate alone."""
        return self.applied_at_step is not None and self.before != self.after


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """Something that happened to the run, not by a decision of its policy.

    Attributes:
        step: newest complete step of the run by then, -1 before its first.
        kind: ``"lost"``, ``"incident"``, ``"group"``, ``"drain"``, ``"memory"``, ``"save"``, ``"slow"``,
            ``"recovered"`` or ``"note"``, which is nothing that went wrong.
        rank: whose it was, or None.
        text: what happened, in a sentence.
    """

    step: int
    kind: str
    rank: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRow:
    """What a part of the method judged, also where it changed nothing.

    Attributes:
        part: ``"growth"``, ``"split"``, ``"trigger"`` or ``"search"``.
        step: newest step known.
        verdict: the outcome in a word or two.
        count: how many times in a row the part came to it; the first and every power of two is in the journal.
        reason: the part's own words.
        evidence: named figures behind it.
        asks_for: rows per rank that a part without a say would have asked for, or ``()``.
        predicted_gain: what they would have saved, or None.
    """

    part: str
    step: int
    verdict: str
    count: int
    reason: str
    evidence: Mapping[str, float] = field(default_factory=dict)
    asks_for: tuple[int, ...] = ()
    predicted_gain: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """A candidate that a search had measured.

    Attributes:
        trial: its number.
        asked_at_step: newest step known when it was asked for.
        local_batch_sizes: rows per rank.
        objective: what was told back, log seconds: inf where it was refused, None where nothing was.
        slowest_s: the slowest worker's measured own time, or None where only the objective was told.
    """

    trial: int
    asked_at_step: int
    local_batch_sizes: tuple[int, ...]
    objective: float | None = None
    slowest_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRow:
    """One search for better shares.

    Attributes:
        search_id: its identity.
        kind: ``"model"`` or ``"measured"``.
        started_at_step: newest step known at its start.
        plan: what it set out from: the exact split on the curves.
        trials: in the order in which they were asked for.
        outcome: how it ended, in words; ``"open"`` if it did not.
        result: its candidate, or ``()``.
    """

    search_id: str
    kind: str
    started_at_step: int
    plan: tuple[int, ...]
    trials: tuple[TrialRow, ...] = ()
    outcome: str = "open"
    result: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoiseSeries:
    """The gradient noise scale over a run, at the end of each block of measured steps; shapes ``[m]``.

    Attributes:
        steps: last step of the block.
        batch: rows per step then.
        noise_scale: ratio of sums over the window of newest blocks, in rows; NaN where the noise hides the gradient.
        p_value: of the window's test that the noise scale is above twice the batch.
        window: most blocks in a window.
        block_steps: measured steps in a block.
    """

    steps: IntArray
    batch: IntArray
    noise_scale: FloatArray
    p_value: FloatArray
    window: int
    block_steps: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunData:
    """One run.

    Attributes:
        name: what people call it.
        policy: name of the policy.
        outcome: why it ended, or ``"unfinished"``.
        settings: what it was asked to do, as text, in the order of display.
        groups: one per worker group that completed a step, in order.
        metrics: in the order of their reports.
        decisions: in order.
        findings: what the parts judged, in order; empty in journals of before they were noted.
        searches: in the order of their starts.
        events: what happened to it, in order.
        noise: the noise scale over the run, or None where too few gradient norms were measured.
        notices: what else the controller had to say (gaps, drops, withdrawals), each one line.
    """

    name: str
    policy: str
    outcome: str
    settings: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[GroupData, ...] = ()
    metrics: tuple[MetricPoint, ...] = ()
    decisions: tuple[DecisionRow, ...] = ()
    findings: tuple[FindingRow, ...] = ()
    searches: tuple[SearchRow, ...] = ()
    events: tuple[EventRow, ...] = ()
    noise: NoiseSeries | None = None
    notices: tuple[str, ...] = ()
