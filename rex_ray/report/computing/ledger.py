"""Where a run lost its time against the best split of its own batches, by its own curves and speeds.

The causes, and the arithmetic, are those of the simulator's ledger (``rex_ray.sim.regret``). What a live run lacks is
the true world: here the fitted curves stand for it, times every worker's speed as ``spells`` found it, and each step
keeps its own noise. Nobody knows which batches would have been best, so they are taken as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from rex_ray.control.losses import Asked, Published, ShareLosses, answer_to, published
from rex_ray.core.apportion import rows_per_rank
from rex_ray.core.types import FloatArray
from rex_ray.report.computing.equal import equal_split
from rex_ray.report.computing.exact import ExactSplits
from rex_ray.report.computing.run_curves import GroupTimes, RunCurves
from rex_ray.report.facts import LedgerRow
from rex_ray.report.reading.schema import DecisionRow

__all__ = ["RunLedger", "ledger_of"]

_MEANINGS = {
    "sensing": "The shares in force were right for speeds that had changed since, and the change was not noticed yet.",
    "lag": "Better shares had been published and had not reached the workers yet.",
    "spline": "The published shares were not quite the best: the curves were still inexact when they were decided.",
    "exploration": "Equal shares at the start, before anything was known, and shares that were run to be timed.",
    "unsplit": "Shares were equal for the whole run, whatever the devices could do.",
    "switching": "The first steps after a change took longer than their rows and speeds explain.",
}
_BASE_MEANINGS = {
    "computing": "What the average worker computes (and reads) under the best split: no split makes it less.",
    "waiting": "Even the best split waits for whoever happens to be slowest in a step: noise that nobody can foresee, "
    "and shares that come in whole rows.",
    "reduction": "From the slowest worker's last gradient to the end of the step: all-reduce, optimizer, bookkeeping.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLedger:
    """A run's time in parts that sum to it exactly.

    Attributes:
        lost: beyond the best split.
        base: the best split's own.
        oracle_s: sum of ``base`` in seconds.
        trials_s: of the exploration, what trials took beyond the shares that they stood in for.
        switching_s: see ``lost``.
    """

    lost: tuple[LedgerRow, ...]
    base: tuple[LedgerRow, ...]
    oracle_s: float
    trials_s: float
    switching_s: float


def ledger_of(curves: RunCurves, decisions: Sequence[DecisionRow]) -> RunLedger:
    """Return the ledger of a run.

    Args:
        curves: its curves.
        decisions: of the whole run, in order.
    """
    starts = [int(group.data.versions.min()) for group in curves.groups]
    # Steps do not tell whose a decision is: a group that resumes from a save runs some of the last one's again.
    books = [
        _Books(
            group=group, decisions=[row for row in decisions if row.version is not None and start <= row.version < end]
        )
        for group, start, end in zip(curves.groups, starts, [*starts[1:], math.inf], strict=True)
    ]
    for book in books:
        book.enter()
    lost = {
        "sensing": sum(book.losses.sensing_s for book in books),
        "lag": sum(book.losses.lag_s for book in books),
        "spline": sum(book.losses.spline_s for book in books),
        "exploration": sum(book.losses.exploration_s for book in books),
        "unsplit": sum(book.losses.unsplit_s for book in books),
        "switching": sum(book.switching_s for book in books),
    }
    base = {
        "computing": sum(book.computing_s for book in books),
        "waiting": sum(book.waiting_s for book in books),
        "reduction": sum(book.rest_s for book in books),
    }
    run_s = curves.run_s
    return RunLedger(
        # What is left of rounding is no part.
        lost=_rows({name: s for name, s in lost.items() if abs(s) > 1e-12 * run_s}, _MEANINGS, run_s),
        base=_rows(base, _BASE_MEANINGS, run_s),
        oracle_s=sum(base.values()),
        trials_s=sum(book.trials_s for book in books),
        switching_s=lost["switching"],
    )


def _rows(parts: dict[str, float], meanings: dict[str, str], run_s: float) -> tuple[LedgerRow, ...]:
    return tuple(
        LedgerRow(name=name, seconds=seconds, fraction=seconds / run_s, meaning=meanings[name])
        for name, seconds in parts.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Consecutive steps of the same rows, shares and speeds: ``start <= step < stop``."""

    start: int
    stop: int
    answer: Published
    waited: tuple[int, ...]
    believed: tuple[int, ...]
    exact: tuple[int, ...]
    incumbent: tuple[int, ...]
    is_trial: bool


@dataclass(slots=True, kw_only=True, eq=False)
class _Books:
    """One group's; ``step`` is a place among its steps here."""

    group: GroupTimes
    decisions: Sequence[DecisionRow]
    losses: ShareLosses = field(default_factory=ShareLosses)
    switching_s: float = 0.0
    computing_s: float = 0.0
    waiting_s: float = 0.0
    rest_s: float = 0.0
    trials_s: float = 0.0

    def enter(self) -> None:
        """Enter all steps."""
        group, data = self.group, self.group.data
        pieces = tuple(self._pieces())
        lengths = np.array([piece.stop - piece.start for piece in pieces])
        rest_s = np.where(group.is_switch, np.median(group.rest_s), group.rest_s)

        def step_s(shares: list[tuple[int, ...]]) -> tuple[FloatArray, FloatArray]:
            own_s = group.own_s(np.repeat(np.array(shares, dtype=np.int64), lengths, axis=0))
            return own_s, own_s.max(axis=1) + rest_s

        modelled_s = group.own_s(data.num_rows).max(axis=1) + rest_s
        ran_s = np.where(group.is_switch, modelled_s, data.step_s)
        _, waited_s = step_s([piece.waited for piece in pieces])
        _, believed_s = step_s([piece.believed for piece in pieces])
        exact_own_s, exact_s = step_s([piece.exact for piece in pieces])
        _, incumbent_s = step_s([piece.incumbent for piece in pieces])
        cause = np.repeat([piece.answer.cause for piece in pieces], lengths)
        for name in ("spline", "exploration", "unsplit"):
            mine = cause == name
            self.losses.enter(
                name, ran_s=ran_s[mine], waited_s=waited_s[mine], believed_s=believed_s[mine], exact_s=exact_s[mine]
            )
        is_trial = np.repeat([piece.is_trial for piece in pieces], lengths)
        self.trials_s = float((ran_s - incumbent_s)[is_trial].sum())
        self.switching_s = float((data.step_s - ran_s)[group.is_switch].sum())
        mean_s = exact_own_s.mean(axis=1)
        self.computing_s = float(mean_s.sum())
        self.waiting_s = float((exact_own_s.max(axis=1) - mean_s).sum())
        self.rest_s = float(rest_s.sum())

    def _pieces(self) -> Iterator[_Piece]:
        """Cut the group's steps wherever anything but noise changes."""
        data, level = self.group.data, self.group.level
        num_steps = len(data.steps)
        exact = ExactSplits(self.group)
        versions, asked, in_force = self._asked()
        answers = published(asked, last_step=num_steps - 1, is_equal=self._is_equal, excess=exact.excess)
        moved = (np.diff(data.num_rows, axis=0) != 0).any(axis=1) | (np.diff(level, axis=0) != 0).any(axis=1)
        moved |= np.diff(data.versions) != 0
        borders = {0, num_steps, *(np.flatnonzero(moved) + 1).tolist()}
        borders |= {min(max(item.step + 1, 0), num_steps) for item in answers}
        index = {version: at for at, version in enumerate(versions)}
        newest = 0
        for start, stop in pairwise(sorted(borders)):
            while newest + 1 < len(answers) and answers[newest + 1].step < start:
                newest += 1
            rows = tuple(data.num_rows[start].tolist())
            total, version = sum(rows), int(data.versions[start])
            shares = in_force[version]
            # What runs has been asked for, even where the decision is dated after the step that first ran it.
            answer = answer_to(answers, max(newest, index[version]), sum(shares))
            yield _Piece(
                start=start,
                stop=stop,
                answer=answer,
                waited=rows if answer.shares == shares else rows_per_rank(total, answer.shares),
                believed=exact.shares(total, answer.world_step),
                exact=exact.shares(total, start),
                incumbent=self._incumbent(asked, index[version], rows),
                is_trial=asked[index[version]].kind == "trial",
            )

    def _asked(self) -> tuple[list[int], list[Asked], dict[int, tuple[int, ...]]]:
        """Return the group's versions, what each asked for, and the shares of those that ran."""
        data = self.group.data
        found: dict[int, Asked] = {}
        in_force: dict[int, tuple[int, ...]] = {}
        decided = {row.version: row for row in self.decisions if row.version is not None and row.after}
        totals = data.num_rows.sum(axis=1)
        ran, first, which = np.unique(data.versions, return_index=True, return_inverse=True)
        # The fullest step of each version, the last of those sorted by version and rows, has what was asked for.
        by_rows = np.lexsort((totals, which))
        fullest = by_rows[np.cumsum(np.bincount(which)) - 1]
        for version, start, full in zip(ran.tolist(), first.tolist(), fullest.tolist(), strict=True):
            row = decided.get(version)
            shares = row.after if row else tuple(data.num_rows[full].tolist())
            in_force[version] = shares
            found[version] = Asked(
                step=start - 1 if row is None else self._place(row), shares=shares, kind=row.kind if row else "first"
            )
        for version, row in decided.items():
            if version not in found and ran[0] < version and 0 <= self._place(row) < len(data.steps) - 1:
                found[version] = Asked(step=self._place(row), shares=row.after, kind=row.kind)
        versions = sorted(found)
        return versions, [found[version] for version in versions], in_force

    def _place(self, row: DecisionRow) -> int:
        """Return the place of the newest step that was known at a decision; -1: none of this group."""
        return int(np.searchsorted(self.group.data.steps, row.decided_at_step, side="right")) - 1

    def _is_equal(self, shares: tuple[int, ...]) -> bool:
        return shares == equal_split(self.group.data, sum(shares))

    def _incumbent(self, asked: Sequence[Asked], at: int, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Return what would have run in a trial's place: the newest shares before it that are none."""
        if asked[at].kind != "trial":
            return rows
        before = (item.shares for item in reversed(asked[:at]) if item.kind != "trial")
        shares = next((shares for shares in before if sum(shares) == sum(asked[at].shares)), None)
        return rows if shares is None else rows_per_rank(sum(rows), shares)
