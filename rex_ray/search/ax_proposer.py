"""Bayesian optimisation with Ax: where to look next. The only module that imports Ax; it costs seconds.

A search space cannot be changed, so every search has a client of its own, which is given the trials that are known.
The same seed and the same objectives give the same proposals. Checked with ax-platform 1.1.0 and 1.3.1.
"""

from __future__ import annotations

import math
import warnings

from ax.api.client import Client
from ax.api.configs import RangeParameterConfig

from rex_ray.search.space import MAX_SHIFT, Point, SplitSpace

__all__ = ["AxProposer"]

# The plan, what runs and shares by speed are mostly known already; the rest of the four is drawn from a Sobol sequence.
_INITIAL_TRIALS = 4
_METRIC = "objective"


class AxProposer:
    """Proposes points of a space.

    Args:
        space: where to look.
        quantum: of every point that it proposes.
        seed: every random choice follows from it.
    """

    def __init__(self, space: SplitSpace, quantum: int, seed: int) -> None:
        self._names = [f"z{number}" for number in range(space.num_shifts)]
        self._is_exact = space.problem.kind == "model"
        self._open: tuple[int, Point] | None = None
        self._quantum = quantum
        self._client = Client(random_seed=seed)
        self._client.configure_experiment(
            parameters=[
                RangeParameterConfig(name=name, parameter_type="float", bounds=(-MAX_SHIFT, MAX_SHIFT))
                for name in self._names
            ]
        )
        self._client.configure_optimization(objective=f"-{_METRIC}")
        self._client.configure_generation_strategy(
            method="fast",
            initialization_budget=_INITIAL_TRIALS,
            initialize_with_center=False,
            use_existing_trials_for_initialization=True,
            initialization_random_seed=seed,
        )

    def propose(self) -> Point:
        """Return where to look next; it must be told before the next call."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about numerics of fits to few points; nobody could act on them
            ((index, values),) = self._client.get_next_trials(max_trials=1).items()
        point = Point(shifts=tuple(float(values[name]) for name in self._names), quantum=self._quantum)
        self._open = (index, point)
        return point

    def tell(self, point: Point, objective: float) -> None:
        """Take a judged point, the proposed one or another; ``inf`` where it cannot be run."""
        if self._open is not None and self._open[1] == point:
            index, self._open = self._open[0], None
        else:
            index = self._client.attach_trial(parameters=dict(zip(self._names, point.shifts, strict=True)))
        if not math.isfinite(objective):
            self._client.mark_trial_abandoned(trial_index=index)
            return
        # Curves are exact; the noise of measured times is inferred.
        value = (objective, 0.0) if self._is_exact else objective
        self._client.complete_trial(trial_index=index, raw_data={_METRIC: value})
