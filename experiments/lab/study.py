"""What an experiment on a matrix of cells hands over: figures for people, and all that they were made of."""

from __future__ import annotations

from dataclasses import dataclass

from experiments._harness import Findings
from experiments.lab.cells import Cell
from experiments.lab.tables import Comparison

__all__ = ["Study"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What an experiment found, and what its charts are drawn from.

    Attributes:
        findings: for the JSON, the terminal and the page.
        comparison: every cell.
        headline: the world that the charts show first.
        target: the metric that counts as trained there; None: nothing is trained there.
        metric: which: ``"accuracy"`` or ``"perplexity"``.
    """

    findings: Findings
    comparison: Comparison
    headline: Cell
    target: float | None = None
    metric: str = "accuracy"
