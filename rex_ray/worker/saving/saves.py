"""``session.report``: metrics to the journal at once, a save now and then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rex_ray.worker.data.feed import Feed
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.link import ControlLink, MetricRecord, Reporter
from rex_ray.worker.measuring.timing import now_s
from rex_ray.worker.model.model_side import ModelSide
from rex_ray.worker.saving import state
from rex_ray.worker.tracker import StepTracker

__all__ = ["Saves"]


class Saves:
    """Metrics and saves of one rank.

    A save passes through the reporter on every rank at once, which in Ray Train is a barrier of seconds. So it is
    made only every so often, and ranks agree on it by rank 0's clock.

    Args:
        reporter: takes metrics and states.
        link: takes metrics for the journal, on rank 0.
        group: ranks to agree with.
        tracker: the step in hand and the position.
        feed: the data side.
        generation: identity of the worker group.
        interval_s: shortest time between two saves.
        model_side: makes buffers alike before a state is collected, and knows how far the learning rate has risen.
    """

    def __init__(
        self,
        *,
        reporter: Reporter,
        link: ControlLink,
        group: SideGroup,
        tracker: StepTracker,
        feed: Feed,
        generation: str,
        interval_s: float,
        model_side: ModelSide,
    ) -> None:
        self._reporter = reporter
        self._link = link
        self._group = group
        self._tracker = tracker
        self._feed = feed
        self._generation = generation
        self._interval_s = interval_s
        self._model_side = model_side
        self._opened_s = self._saved_s = now_s()
        self._unsaved: Mapping[str, Any] | None = None
        self._prepared: state.Prepared | None = None
        self._restored_rates: list[dict[str, Any]] = []
        self._restored_names: frozenset[str] = frozenset()
        self.registered: dict[str, state.Stateful] = {}

    def prepare(self, parts: state.Prepared, restored: Mapping[str, Any] | None) -> None:
        """Save these parts from now on; they have just been loaded where there was something to load."""
        self._prepared = parts
        if restored is not None:
            groups = parts.optimizer.param_groups
            self._restored_rates = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            self._restored_names = frozenset(restored["registered"])

    def restore_rates(self, name: str) -> None:
        """Give the optimizer its loaded rates back, if a save held this scheduler.

        A scheduler begins by setting the rate to its first, and loading its state does not undo that.
        """
        if self._prepared is not None and name in self._restored_names:
            for group, options in zip(self._prepared.optimizer.param_groups, self._restored_rates, strict=False):
                group.update(options)

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Journal the metrics, and save if that is due."""
        self._tracker.close()
        elapsed_s = now_s() - self._opened_s
        if self._group.rank == 0:
            record = MetricRecord(
                generation=self._generation,
                epoch=self._tracker.position.epoch,
                step=self._tracker.position.step,
                elapsed_s=elapsed_s,
                metrics={name: number for name, value in metrics.items() if (number := _number(value)) is not None},
            )
            self._link.send([record])
        due = now_s() - self._saved_s >= self._interval_s or self._feed.at_the_end
        with self._tracker.waiting():
            agreed = self._group.broadcast(torch.tensor([int(due)]), "session.report")
        if agreed.item():
            self._save(metrics)
        else:
            self._unsaved = dict(metrics)

    def finish(self) -> None:
        """Save what was reported last, if it was not saved; called on every rank when training is over."""
        if self._unsaved is not None:
            self._save(self._unsaved)

    def _save(self, metrics: Mapping[str, Any]) -> None:
        self._tracker.gap()
        self._model_side.agree_on_buffers()
        cuda = self._tracker.device.type == "cuda"
        saved = {
            **({} if self._prepared is None else self._prepared.save()),
            "registered": {name: part.state_dict() for name, part in self.registered.items()},
            "position": state.save_position(self._tracker.position, self._feed.dataset_size, self._feed.seed),
            "lr_factor": self._model_side.lr_factor,
            "allocation": state.save_allocation(self._feed.allocation),
            "rng": {
                "cpu": self._group.gather(torch.get_rng_state(), "the save's generator states"),
                "cuda": self._group.gather(torch.cuda.get_rng_state(), "the save's generator states") if cuda else None,
            },
        }
        self._reporter.report(metrics, saved)
        self._unsaved = None
        self._saved_s = now_s()


def _number(value: Any) -> float | None:
    """Return a metric as a number, None if it is no single one. Never raises: the other ranks already wait."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
