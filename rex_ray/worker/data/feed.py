"""The session's data side: joins the ranks to the controller, makes the training loader, keeps epochs apart."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rex_ray.core.errors import ConfigError, RexError
from rex_ray.core.types import Allocation, OptimizerFamily, WorkerSpec
from rex_ray.worker.data.loader import (
    TrainLoader,
    batches_drawn_ahead,
    check_loader_options,
    check_map_style,
    make_data_loader,
    wants_epoch,
)
from rex_ray.worker.data.sampler import ElasticSampler, Position
from rex_ray.worker.data.schedule import Schedule
from rex_ray.worker.group import joining
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.group.switch import Switch
from rex_ray.worker.link import ControlLink
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.saving import state
from rex_ray.worker.tracker import StepTracker

__all__ = ["Feed"]


class Feed:
    """Where the batches come from, and where in the data training stands.

    Args:
        tracker: holds the position.
        options: the worker's intervals and limits.
        link: rank 0 joins the controller by it, and asks it for allocations.
        values: ranks to agree with at the start.
        control: ranks to agree with about switches, used for nothing else.
        generation: identity of the worker group.
        restored: the save that training resumes from.
    """

    def __init__(
        self,
        *,
        tracker: StepTracker,
        options: WorkerOptions,
        link: ControlLink,
        values: SideGroup,
        control: SideGroup,
        generation: str,
        restored: Mapping[str, Any] | None,
    ) -> None:
        self._tracker = tracker
        self._options = options
        self._link = link
        self._values = values
        self._control = control
        self._generation = generation
        self._restored = restored
        self._loader: TrainLoader | None = None
        self._schedule: Schedule | None = None
        self._switch: Switch | None = None
        self._epoch_loop: tuple[int, int] | None = None
        self.dataset_size: int | None = None
        self.seed: int = options.seed
        if restored is not None:
            tracker.position = state.position_of(restored)
            self.seed = restored["position"]["seed"]

    @property
    def allocation(self) -> Allocation | None:
        """Shares of the batch in hand, else of the next one; None before the loader is made."""
        step = self._tracker.in_hand
        if step is not None:
            return step.plan.allocation
        return None if self._schedule is None else self._schedule.at(self._tracker.position.step)

    @property
    def at_the_end(self) -> bool:
        """Whether the last epoch's last sample is consumed."""
        if self._epoch_loop is None or self.dataset_size is None:
            return False
        epoch, num_epochs = self._epoch_loop
        return epoch == num_epochs - 1 and self._tracker.position.cursor >= self.dataset_size

    def loader(
        self,
        dataset: Any,
        spec: WorkerSpec,
        optimizer: OptimizerFamily,
        end_pass: Callable[[], None],
        options: dict[str, Any],
    ) -> TrainLoader:
        """Make the training loader, and join the controller with it.

        Args:
            dataset: the user's data set.
            spec: who this rank is.
            optimizer: what its gradient is given to.
            end_pass: called on every rank when an epoch's last batch is consumed.
            options: the user's DataLoader options.

        Raises:
            ConfigError: see ``Session.loader``.
        """
        if self._loader is not None:
            raise ConfigError(
                "session.loader was called before, and a session has one training loader, whose batches are steps; "
                "use session.eval_loader for other data"
            )
        check_loader_options(options)
        num_rows = check_map_style(dataset, "session.loader")
        reference = joining.reference_batch(self._options, num_rows, self._values.size)
        self._check_restored(num_rows)
        ahead = batches_drawn_ahead(options)
        member = joining.Member(spec=spec, dataset_size=num_rows, ahead=ahead, optimizer=optimizer)
        members = joining.gather_members(self._values, member)
        resumed = None if self._restored is None else state.allocation_of(self._restored)
        info = joining.group_info(self._generation, members, reference, self._tracker.position.step, resumed)
        self._schedule = Schedule(joining.join(self._values, self._link, info, self._options))
        self.dataset_size = num_rows
        self._tracker.reference_batch = reference
        sampler = ElasticSampler(
            dataset_size=num_rows,
            rank=self._values.rank,
            seed=self.seed,
            schedule=self._schedule,
            carry_epoch=wants_epoch(dataset),
        )
        self._switch = Switch(
            group=self._control,
            link=self._link,
            schedule=self._schedule,
            next_undrawn=lambda: sampler.next_undrawn,
            ahead=max(member.ahead for member in members),
            interval_steps=self._options.control_interval_steps,
        )
        self._loader = TrainLoader(
            dataset=dataset,
            data_loader=make_data_loader(dataset, sampler, options),
            sampler=sampler,
            switch=self._switch,
            tracker=self._tracker,
            global_batch_size=reference,
            start_pass=self._start_pass,
            end_pass=end_pass,
        )
        return self._loader

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield epoch numbers from the position's on; each new epoch begins at its first sample."""
        self._leave_complete_epoch()
        try:
            yield from self._epochs_up_to(num_epochs)
        finally:
            self._epoch_loop = None

    def _epochs_up_to(self, num_epochs: int) -> Iterator[int]:
        while (epoch := self._tracker.position.epoch) < num_epochs:
            self._epoch_loop = (epoch, num_epochs)
            yield epoch
            self._tracker.left_loop()
            self._tracker.position = Position(epoch=epoch + 1, step=self._tracker.position.step)

    def _leave_complete_epoch(self) -> None:
        """Begin the next epoch if this one is complete: a loop over epochs was left by ``break``."""
        self._tracker.left_loop()
        position = self._tracker.position
        if self.dataset_size is not None and position.cursor >= self.dataset_size:
            self._tracker.position = Position(epoch=position.epoch + 1, step=position.step)

    def close(self, timeout_s: float, *, failed: bool) -> None:
        """Stop the loader processes; let the last control message end unless ranks may have died.

        Raises:
            LinkError: it did not end within the limit.
        """
        if self._loader is not None:
            self._loader.stop()
        if self._switch is not None and not failed:
            self._switch.close(timeout_s)

    def _start_pass(self) -> Position:
        if not self._tracker.prepared:
            raise ConfigError("call session.prepare(model, optimizer) before the loop: without it gradients are local")
        self._tracker.gap()
        self._tracker.left_loop()
        position = self._tracker.position
        if self._epoch_loop is not None and self.dataset_size is not None and position.cursor >= self.dataset_size:
            raise RexError(
                f"epoch {position.epoch} is complete, and session.loader was iterated again within it; one "
                "`for ... in loader` per epoch of session.epochs, and session.eval_loader to evaluate"
            )
        self._leave_complete_epoch()
        return self._tracker.position

    def _check_restored(self, num_rows: int) -> None:
        """Refuse to resume in other data: a cursor means nothing there.

        Raises:
            ConfigError: the training set has another size than the saved one.
        """
        if self._restored is None:
            return
        saved = self._restored["position"]["dataset_size"]
        if saved is not None and saved != num_rows:
            raise ConfigError(
                f"the save was made with a training set of {saved} rows and this one has {num_rows}; resume with the "
                "same data, or start a new run"
            )
        if self.seed != self._options.seed:
            warnings.warn(
                f"seed={self._options.seed} is without effect: the resumed run's orders are drawn from {self.seed}",
                stacklevel=4,
            )
