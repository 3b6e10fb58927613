"""The hyperparameters of searches beyond the exact split."""

from __future__ import annotations

from dataclasses import dataclass

from rex_ray.core.errors import ConfigError
from rex_ray.policies.search.state import Patience

__all__ = ["SearchRules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRules:
    """Hyperparameters of a search part. Where no source is named, the value is a choice.

    Attributes:
        measured: whether candidates may be run at all; without it a search asks the curves alone.
        acts: whether what a search on the curves finds is asked for until the group runs it; without, it is said once.
        min_gain: what a search on the curves must promise over the present shares.
        num_sigmas: and by how many standard errors of those shares' own steps, as in ``SplineSplit``.
        min_measured_gain: what a measured winner must have saved over the incumbent.
        alpha: and the level of the rank test beside it.
        min_mismatch: relative error of a prediction from which on the curves are taken to be structurally wrong; and
            the least that other shares must be able to save, see ``hope``.
        max_distortion: error of some rank's predicted time beyond which the curves' word on other sizes is not used
            to tell a change of speed; a trigger takes smaller ones for what they are.
        watch_steps: clean steps that a prediction is compared with.
        settle_steps: clean steps of the same shares after which the split counts as settled: its first three reviews.
        trial_steps: clean steps that time a trial, and a leg of the duel.
        num_legs: legs of the duel.
        max_model_trials: candidates of a search on the curves.
        max_measured_trials: candidates of a measured one.
        autocorrelation: assumed lag-1 correlation of own times, as in ``SplineSplit``.
        hopeless: a trial all of whose first steps take this many times as long as the incumbent is given up.
        hopeless_steps: those first steps.
        jump: within a trial no rank's time changes by this factor, unless its speed did; the search ends.
        drift: nor does that of shares which ran before, in the duel.
        budget: fraction of all steps that trials may cost, as steps' worth of time lost against the incumbent.
        payback_steps: on top of it, a search may cost what it hopes to save within so many steps.
        model_distance_steps: least steps between two searches on the curves, however often something happens.
        distance_steps: steps between a search without success and the next, doubled each time
        max_distance_steps: up to this.
        patience_steps: a search or a switch that does not answer is given up after so many steps,
        patience_s: but not before their time comes to this.
        ask_again_steps: until then a search is asked for again so often; the controller knows one that runs.
    """

    measured: bool = True
    acts: bool = True
    min_gain: float = 0.03
    num_sigmas: float = 2.0
    min_measured_gain: float = 0.01
    alpha: float = 0.05
    min_mismatch: float = 0.05
    max_distortion: float = 0.2
    watch_steps: int = 16
    settle_steps: int = 25
    trial_steps: int = 10
    num_legs: int = 4
    max_model_trials: int = 15
    max_measured_trials: int = 10
    autocorrelation: float = 0.6
    hopeless: float = 1.2
    hopeless_steps: int = 3
    jump: float = 1.3
    drift: float = 1.15
    budget: float = 0.02
    payback_steps: int = 200
    model_distance_steps: int = 64
    distance_steps: int = 256
    max_distance_steps: int = 16_384
    patience_steps: int = 64
    patience_s: float = 60.0
    ask_again_steps: int = 16

    def __post_init__(self) -> None:
        for name in ("min_gain", "min_measured_gain", "min_mismatch", "budget"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"a search's {name} must be a fraction in [0, 1), got {value}")
        if not 0.0 < self.alpha < 0.5:
            raise ConfigError(f"a search's alpha must lie in (0, .5), got {self.alpha}")
        for name in ("trial_steps", "max_model_trials", "max_measured_trials", "distance_steps", "patience_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a search's {name} must be at least 1, got {getattr(self, name)}")
        if self.payback_steps < 0:
            raise ConfigError(f"a search's payback_steps must not be negative, got {self.payback_steps}")

    def allowance(self, step: int, worth: float) -> float:
        """Return how many steps' worth of time may have been lost to trials by ``step`` of the run.

        Args:
            step: steps of the run so far.
            worth: fraction of the step time that the present search may hope to save.
        """
        return self.budget * max(step, 0) + self.payback_steps * worth

    def is_out_of(self, patience: Patience) -> bool:
        """Whether something has been waited for long enough."""
        return patience.steps >= self.patience_steps and patience.waited_s >= self.patience_s
