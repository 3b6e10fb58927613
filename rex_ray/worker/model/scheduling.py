"""Learning-rate schedules that end where they should, whatever the global batch did.

A schedule is written for steps of the reference batch ``M0``, ``len(loader)`` of them per epoch. When the batch grows
an epoch has fewer steps, and a schedule that ticks once for each would stop short of its end. So it ticks by the rows
that were consumed: a step of ``B`` rows counts ``B / M0`` times, its fraction carried on within the epoch. A schedule
that is written in rows ticks once for each row of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch

from rex_ray.core.errors import ConfigError
from rex_ray.worker.tracker import StepTracker

__all__ = ["ReferenceScheduler", "Stepping"]

Stepping: TypeAlias = Literal["batch", "epoch", "sample"]

_BY_POSITION = (torch.optim.lr_scheduler.LambdaLR, torch.optim.lr_scheduler.OneCycleLR)
"""What computes its rate from how often it has ticked, and from nothing else: many ticks are one."""

_OWN = frozenset({"_scheduler", "_tracker", "_stepped", "_first_batch", "_ticked"})

_MOST_SKIPPED = 16
"""A loop may leave out batches that its gradient scaler skipped: 16 halvings take the usual first scale to 1."""


class ReferenceScheduler:
    """A scheduler whose ``step()``, called for each batch of the training loader, ticks in reference steps, or in rows.

    Called once per epoch it ticks once, as ever; and with arguments (a metric) it passes them on. Everything else is
    the scheduler's own.

    Args:
        scheduler: any object with ``step()`` and a state.
        tracker: knows the rows consumed.
        stepped: whether the loop steps it per batch or per epoch; ``"sample"``: per batch, or less often, a schedule
            that counts rows; None: told by whether a batch is in hand at the first call, and soon enough after the
            one before it not to be an epoch that was left early.

    Raises:
        ConfigError: another word for how it is stepped.
    """

    def __init__(self, scheduler: Any, tracker: StepTracker, stepped: Stepping | None = None) -> None:
        if stepped is not None and stepped not in get_args(Stepping):
            raise ConfigError(
                f"stepped={stepped!r} says neither 'batch' nor 'epoch' nor 'sample'; leave it out to have the first "
                "call tell which of the first two"
            )
        self._scheduler = scheduler
        self._tracker = tracker
        self._stepped = stepped
        self._first_batch = tracker.progress.num_batches
        self._ticked = self._now

    @property
    def wrapped(self) -> Any:
        """The scheduler that the script made."""
        return self._scheduler

    def __getattr__(self, name: str) -> Any:
        # A copy in the making has no attributes yet, and is asked for __setstate__ first.
        if name == "_scheduler" or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what is the scheduler's own on the scheduler, such as ``scheduler.T_max = ...``."""
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._scheduler, name, value)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Tick as often as reference steps have passed since the last call."""
        if args or kwargs:
            self._scheduler.step(*args, **kwargs)
            return
        if self._stepped is None:
            self._stepped = self._guess()
        now = self._now
        num_ticks = 1 if self._stepped == "epoch" else max(now - self._ticked, 0)
        self._ticked = max(self._ticked, now)
        if num_ticks > 1 and type(self._scheduler) in _BY_POSITION:
            self._scheduler.last_epoch += num_ticks - 1
            num_ticks = 1
        for _ in range(num_ticks):
            self._scheduler.step()

    @property
    def _now(self) -> int:
        """What has passed of what the schedule counts."""
        progress, in_hand = self._tracker.progress, self._tracker.in_hand
        return progress.rows(in_hand) if self._stepped == "sample" else progress.reference_steps(in_hand)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, and what it has not ticked for yet."""
        owed = self._now - self._ticked
        return {"scheduler": self._scheduler.state_dict(), "owed": owed, "stepped": self._stepped}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a state back; also a bare scheduler's."""
        if "owed" not in state_dict:
            self._scheduler.load_state_dict(state_dict)
            return
        self._scheduler.load_state_dict(state_dict["scheduler"])
        # What the loop says of this run counts for more than what an earlier one guessed.
        self._stepped = self._stepped or state_dict["stepped"]
        owed = state_dict["owed"] if (self._stepped == "sample") == (state_dict["stepped"] == "sample") else 0
        self._ticked = self._now - owed

    def _guess(self) -> Stepping:
        passed = self._tracker.progress.num_batches - self._first_batch
        return "batch" if self._tracker.in_hand is not None and passed <= _MOST_SKIPPED else "epoch"
