"""Running a cell: the production controller in virtual time, or a control that knows the answer."""

from __future__ import annotations

from dataclasses import replace

from experiments.lab.cells import TRACE, Cell, Result
from experiments.lab.fixed import chosen, is_open, pilot_cells
from experiments.lab.trace import play_trace

__all__ = ["play"]


def play(cell: Cell) -> Result:
    """Run a cell; a fixed control without a batch plays the sweep that finds it first.

    Raises:
        ConfigError: a name that there is not.
        RuntimeError: a trace's target is out of reach.
    """
    if is_open(cell):
        found = {pilot.key: play(pilot) for pilot in pilot_cells(cell)}
        settled, swept_s = chosen(cell, found)
        return replace(play(settled), swept_s=swept_s)
    if cell.learner == TRACE:
        return play_trace(cell)
    # Torch is slow to import, and traces need none.
    from experiments.lab.sgd import play_sgd  # noqa: PLC0415

    return play_sgd(cell)
