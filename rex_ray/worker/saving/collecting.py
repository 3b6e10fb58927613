"""What a save of this rank holds: the prepared parts, those that were registered, and where training stands."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch

from rex_ray.worker.data.feed import Feed
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.model.model_side import ModelSide
from rex_ray.worker.saving import state
from rex_ray.worker.saving.learnt_limits import LearntLimits
from rex_ray.worker.tracker import StepTracker
from rex_ray.worker.user_warning import warn

__all__ = ["Collector"]

_BESIDE_THE_MODEL: Final = frozenset({"scheduler", "scaler"})


class Collector:
    """Collects the state of a session.

    Args:
        group: ranks whose generators' states are saved, too.
        tracker: the position in the data.
        feed: the data side.
        model_side: makes buffers alike before a state is collected, and knows how far the learning rate has risen.
        generation: identity of the worker group.
        limits: what is known of memories.
        restored: the save that training resumes from.
    """

    def __init__(
        self,
        *,
        group: SideGroup,
        tracker: StepTracker,
        feed: Feed,
        model_side: ModelSide,
        generation: str,
        limits: LearntLimits,
        restored: Mapping[str, Any] | None,
    ) -> None:
        self._group = group
        self._tracker = tracker
        self._feed = feed
        self._model_side = model_side
        self._generation = generation
        self._limits = limits
        self._restored = restored
        self._prepared: state.Prepared | None = None
        self._restored_rates: list[dict[str, Any]] = []
        self._registered: dict[str, state.Stateful] = {}
        self._untold: frozenset[str] | None = None

    def prepare(self, parts: state.Prepared) -> None:
        """Save these parts from now on; they have just been loaded where there was something to load."""
        self._prepared = parts
        if self._restored is not None:
            groups = parts.optimizer.param_groups
            self._restored_rates = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            # What is loaded of these is taken out.
            self._untold = frozenset(self._saved_parts) | (self._restored.keys() & _BESIDE_THE_MODEL)

    def register(self, parts: Mapping[str, state.Stateful]) -> None:
        """Save these further parts by their names, and load what a save holds of them."""
        saved = self._saved_parts
        for name, part in parts.items():
            self._registered[name] = part
            if name in saved:
                state.load_part(name, part, saved[name])

    def has_registered(self, name: str) -> bool:
        """Whether something is saved under this name."""
        return name in self._registered

    def restore_rates(self, name: str) -> None:
        """Give the optimizer its loaded rates back, if a save held this scheduler.

        A scheduler begins by setting the rate to its first, and loading its state does not undo that.
        """
        if self._prepared is not None and name in self._saved_parts:
            for group, options in zip(self._prepared.optimizer.param_groups, self._restored_rates, strict=False):
                group.update(options)

    def collect(self) -> dict[str, Any]:
        """Return the whole state between two steps; every rank must call this.

        Its tensors are the parts' own where those hand them out: they change with the next step.
        """
        self._tell_unclaimed()
        self._tracker.gap()
        self._model_side.settle()
        self._model_side.agree_on_buffers()
        cuda = self._tracker.device.type == "cuda"
        return {
            **({} if self._prepared is None else self._prepared.save()),
            "registered": {name: part.state_dict() for name, part in self._registered.items()},
            "position": self._feed.save_position(),
            "stream": self._feed.save_source(),
            "reference_batch": self._tracker.progress.reference_batch,
            "lr_factor": self._model_side.lr_factor,
            **self._limits.save(self._group),
            "allocation": state.save_allocation(self._feed.allocation, self._feed.devices),
            "rng": {
                "cpu": self._group.gather(torch.get_rng_state(), "the save's generator states"),
                "cuda": self._group.gather(torch.cuda.get_rng_state(), "the save's generator states") if cuda else None,
            },
            "generation": self._generation,
        }

    @property
    def _saved_parts(self) -> Mapping[str, Any]:
        """What the save that training resumes from holds of registered parts."""
        return {} if self._restored is None else self._restored["registered"]

    def _tell_unclaimed(self) -> None:
        """Say, before the first save of a resumed run, which parts of it come to an end or begin afresh with it."""
        if self._untold is None:
            return
        lost, afresh = self._untold - self._registered.keys(), self._registered.keys() - self._untold
        self._untold = None
        if lost:
            warn(
                f"the save that training resumed from holds {_quoted(lost)}, which nobody took up: later saves are "
                "without it. Register it again (session.register, session.prepare), or have it deliberately gone"
            )
        if afresh:
            warn(f"the save that training resumed from holds no {_quoted(afresh)}, which began afresh")


def _quoted(names: Collection[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
