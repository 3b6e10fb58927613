"""Where a run lost its time against the oracle: every second of it under one name, and they add up exactly.

Step times are telescoped at the very same rows and noise: from the shares that ran, over those that had been published,
and those that were right for the world they were decided in, to the exact split for the world as it was. What is left
then are the batches: the learning rate that went with them, and that they were not the oracle's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from rex_ray.control.losses import Asked, Published, ShareLosses, answer_to, published
from rex_ray.control.notes import Decided
from rex_ray.core.apportion import rows_per_rank
from rex_ray.core.types import FloatArray, IntArray
from rex_ray.policies.limits import equal_shares
from rex_ray.scenario.learning import LearningCurve
from rex_ray.scenario.timeline import own_times
from rex_ray.sim.engine import SimulatedRun
from rex_ray.sim.learners import TraceLearner
from rex_ray.sim.scripted_oracle import ScriptedOracle
from rex_ray.sim.world import Scenario

__all__ = ["Ledger", "ledger"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Seconds lost to the oracle by cause; a part is negative where that made the run faster.

    Attributes:
        sensing_s: the published shares are right for a world that has changed since they were decided.
        lag_s: other shares of the same batch are published and not yet in effect.
        spline_s: the published shares are not the exact split for the world that they were decided in.
        exploration_s: the same before the run's first other shares than equal ones, and where shares are a trial's.
        unsplit_s: the same in a run that never asks for other shares than equal ones: nothing is being explored.
        growth_s: the batches were not the oracle's; with ``rate_s`` unknown, that as well.
        rate_s: the learning rate allowed less progress than the rows could make; None: nobody knows what they could.
        charged_s: control's own cost.
    """

    sensing_s: float
    lag_s: float
    spline_s: float
    exploration_s: float
    unsplit_s: float
    growth_s: float
    rate_s: float | None = None
    charged_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The whole loss."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the parts by name, in seconds."""
        shares = {
            "sensing": self.sensing_s,
            "lag": self.lag_s,
            "spline": self.spline_s,
            "exploration": self.exploration_s,
            "unsplit": self.unsplit_s,
        }
        rate = {} if self.rate_s is None else {"rate": self.rate_s}
        return {**shares, "growth": self.growth_s, **rate, "charged": self.charged_s}


def ledger(run: SimulatedRun, scenario: Scenario, *, oracle_s: float, learning: LearningCurve | None = None) -> Ledger:
    """Split ``run.total_s - oracle_s`` into its causes.

    Args:
        run: a whole run, from a fresh group on.
        scenario: the world that it ran in.
        oracle_s: what the oracle takes to the same end, see ``oracle_run``.
        learning: the curve that a ``TraceLearner`` made progress by; None: training itself did, and what a learning
            rate withholds cannot be told from what a batch does.
    """
    books = _Books(run=run, scenario=scenario)
    for piece in books.pieces():
        books.enter(piece)
    rate_s = None
    if learning is not None:
        used = _share_of_progress(run, learning, scenario.problem.global_batch_size)
        rate_s = float((books.exact_s * (1 - used)).sum())
    losses = books.losses
    known_s = losses.total_s + (rate_s or 0.0) + run.charged_s
    return Ledger(
        sensing_s=losses.sensing_s,
        lag_s=losses.lag_s,
        spline_s=losses.spline_s,
        exploration_s=losses.exploration_s,
        unsplit_s=losses.unsplit_s,
        growth_s=run.total_s - oracle_s - known_s,
        rate_s=rate_s,
        charged_s=run.charged_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Consecutive steps of the same rows, shares and speeds: ``start <= step < stop``."""

    start: int
    stop: int
    in_force: tuple[int, ...]
    published: Published


@dataclass(slots=True, kw_only=True, eq=False)
class _Books:
    run: SimulatedRun
    scenario: Scenario
    losses: ShareLosses = field(default_factory=ShareLosses)
    exact_s: FloatArray = field(init=False)
    _oracle: ScriptedOracle = field(init=False)
    _rows: IntArray = field(init=False)

    def __post_init__(self) -> None:
        run, lines = self.run, self.scenario.timelines
        self._oracle = ScriptedOracle(timelines=lines, network=self.scenario.network, num_steps=run.step_s.size)
        # An epoch's last rows may be fewer than workers, which no split of the oracle's knows.
        self._rows = np.maximum(run.num_rows, len(lines))
        self.exact_s = np.zeros_like(run.step_s)

    def pieces(self) -> Iterator[_Piece]:
        """Cut the run wherever anything but noise changes."""
        num_steps, switches = self.run.step_s.size, dict(self.run.allocations)
        asked = published(self._asked(), last_step=num_steps - 1, is_equal=self._is_equal, excess=self._excess)
        speeds = self._oracle.slowdowns
        borders = {0, num_steps, *switches, *(min(item.step + 1, num_steps) for item in asked)}
        borders |= set((np.flatnonzero(np.diff(self._rows)) + 1).tolist())
        borders |= set((np.flatnonzero((np.diff(speeds, axis=0) != 0).any(axis=1)) + 1).tolist())
        newest, in_force = 0, asked[0].shares
        for start, stop in pairwise(sorted(borders)):
            in_force = switches[start].local_batch_sizes if start in switches else in_force
            while newest + 1 < len(asked) and asked[newest + 1].step < start:
                newest += 1
            answer = answer_to(asked, newest, sum(in_force))
            yield _Piece(start=start, stop=stop, in_force=in_force, published=answer)

    def enter(self, piece: _Piece) -> None:
        """Enter a piece's seconds: from what ran to the exact split of the moment."""
        steps, rows, answer = slice(piece.start, piece.stop), int(self._rows[piece.start]), piece.published
        ran_s = self.run.step_s[steps]
        if piece.in_force == answer.shares:
            waited_s = ran_s
        else:
            waited_s = self._steps_s(rows_per_rank(int(self.run.num_rows[piece.start]), answer.shares), piece)
        believed_s = self._steps_s(self._oracle.shares(rows, answer.world_step), piece)
        exact_s = self._steps_s(self._oracle.shares(rows, piece.start), piece)
        self.losses.enter(answer.cause, ran_s=ran_s, waited_s=waited_s, believed_s=believed_s, exact_s=exact_s)
        self.exact_s[steps] = exact_s

    def _steps_s(self, shares: Sequence[int], piece: _Piece) -> FloatArray:
        """Return what a piece's steps would have taken with other shares, at the same noise."""
        return self.scenario.network.step_s(*own_times(self.scenario.timelines, piece.start, piece.stop, shares))

    def _quiet_s(self, shares: tuple[int, ...], step: int) -> float:
        speeds, lines = self._oracle.slowdowns[step].tolist(), self.scenario.timelines
        return max(
            line.quiet_time_s(rows, shares, slowdown=factor)
            for line, rows, factor in zip(lines, shares, speeds, strict=True)
        )

    def _asked(self) -> list[Asked]:
        """Return all shares that were asked for, in order, whether they ran or not."""
        decided = {note.version: note for note in self.run.notes if isinstance(note, Decided)}
        found: dict[int, Asked] = {}
        for first_step, allocation in self.run.allocations:
            note = decided.get(allocation.version)
            step = first_step - 1 if note is None else note.step
            kind = "first" if note is None else note.kind
            found[allocation.version] = Asked(step=step, shares=allocation.local_batch_sizes, kind=kind)
        for version, note in decided.items():
            if version is not None and note.proposal is not None and version not in found:
                found[version] = Asked(step=note.step, shares=note.proposal.local_batch_sizes, kind=note.kind)
        return [found[version] for version in sorted(found)]

    def _is_equal(self, shares: tuple[int, ...]) -> bool:
        return shares == equal_shares(self.scenario.problem, sum(shares))

    def _excess(self, shares: tuple[int, ...], step: int) -> float:
        """Return how many times as long as the exact split the shares take in the world of a step."""
        exact = self._oracle.shares(sum(shares), step)
        return self._quiet_s(shares, step) / self._quiet_s(exact, step)


def _share_of_progress(run: SimulatedRun, learning: LearningCurve, reference_batch_size: int) -> FloatArray:
    """Return the progress of every step as a part of what its rows could have made, shape ``[steps]``."""
    replayed = TraceLearner(learning=learning, reference_batch_size=reference_batch_size)
    switches = dict(run.allocations)
    shares, factor = [], 1.0
    for step, rows in enumerate(run.num_rows.tolist()):
        factor = switches[step].lr_factor if step in switches else factor
        before = replayed.progress_rows
        possible = rows * float(learning.efficiency(rows, replayed.noise_scale))
        replayed.advance(rows, factor)
        shares.append((replayed.progress_rows - before) / possible)
    return np.array(shares)
