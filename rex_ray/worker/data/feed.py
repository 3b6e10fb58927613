"""The session's data side: joins the ranks to the controller, makes the training loader, keeps epochs apart."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rex_ray.core.errors import ConfigError, RexError
from rex_ray.core.types import Allocation, OptimizerFamily, WorkerSpec
from rex_ray.worker.data.dataloader import check_loader_options
from rex_ray.worker.data.loader import Course, Occasions, TrainLoader
from rex_ray.worker.data.make_source import SourceMaker, offered
from rex_ray.worker.data.sampler import Position
from rex_ray.worker.data.schedule import Schedule
from rex_ray.worker.data.source import Source
from rex_ray.worker.data.stream_end import WhenToEnd
from rex_ray.worker.group import joining
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.group.switch import Switch
from rex_ray.worker.link import ControlLink
from rex_ray.worker.notices import Notices
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.saving import state
from rex_ray.worker.tracker import StepTracker

__all__ = ["Feed"]

_log = logging.getLogger("rex_ray")


class Feed:
    """Where the batches come from, and where in the data training stands.

    Args:
        tracker: follows the batch in hand, and knows where training stands.
        notices: has the journal told of what is dealt with.
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
        notices: Notices,
        options: WorkerOptions,
        link: ControlLink,
        values: SideGroup,
        control: SideGroup,
        generation: str,
        restored: Mapping[str, Any] | None,
    ) -> None:
        self._tracker = tracker
        self._progress = tracker.progress
        self._notices = notices
        self._options = options
        self._link = link
        self._values = values
        self._control = control
        self._generation = generation
        self._restored = restored
        self._loader: TrainLoader | None = None
        self._source: Source | None = None
        self._schedule: Schedule | None = None
        self._switch: Switch | None = None
        self._epoch_loop: tuple[int, int] | None = None
        self.devices: tuple[str, ...] = ()
        self.dataset_size: int | None = None
        self.seed: int = options.seed if restored is None else restored["position"]["seed"]

    @property
    def allocation(self) -> Allocation | None:
        """Shares of the batch in hand, else of the next one; None before the loader is made."""
        step = self._tracker.in_hand
        if step is not None:
            return step.plan.allocation
        return None if self._schedule is None else self._schedule.at(self._progress.position.step)

    @property
    def at_the_end(self) -> bool:
        """Whether the last epoch's last sample is consumed."""
        if self._epoch_loop is None:
            return False
        epoch, num_epochs = self._epoch_loop
        return epoch == num_epochs - 1 and self._at_epochs_end

    @property
    def joined(self) -> bool:
        """Whether the loader is made, and the group known to the controller."""
        return self._loader is not None

    @property
    def is_whole(self) -> bool:
        """Whether what a save holds is all that there is between the last step and the next; alike on all ranks.

        What a loop of its own accumulates over several batches is in no save. At an epoch's end, the loop still has to
        report it, and resumes behind that report.
        """
        return not self._tracker.batches_since_update and not self._at_epochs_end

    @property
    def _at_epochs_end(self) -> bool:
        """Whether the position's epoch has no row left."""
        return self._source is not None and self._source.is_complete(self._progress.position)

    def loader(
        self,
        dataset: Any,
        spec: WorkerSpec,
        optimizer: OptimizerFamily,
        occasions: Occasions,
        end: WhenToEnd | None,
        options: dict[str, Any],
    ) -> TrainLoader:
        """Make the training loader, and join the controller with it.

        Args:
            dataset: the user's data set.
            spec: who this rank is.
            optimizer: what its gradient is given to.
            occasions: what others do between two batches.
            end: when an epoch of streams ends; None: with the last of them.
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
        offer = offered(dataset, end, options)
        reference = joining.reference_batch(self._options, offer.num_rows, self._values.size)
        member = joining.Member(
            spec=spec, dataset_size=offer.num_rows, ahead=offer.ahead, optimizer=optimizer, stream=offer.stream
        )
        members = joining.gather_members(self._values, member)
        self._schedule = self._join(members, offer.num_rows, reference)
        self._source = source = self._make_source(dataset, offer.num_rows, members, self._schedule, options)
        self._switch = Switch(
            group=self._control,
            link=self._link,
            schedule=self._schedule,
            next_undrawn=lambda: source.next_undrawn,
            ahead=max(member.ahead for member in members),
            interval_steps=self._options.control_interval_steps,
            save=occasions.save,
            snapshots=occasions.snapshots,
        )
        course = Course(
            switch=self._switch,
            tracker=self._tracker,
            progress=self._progress,
            reference_batch=reference,
            start_pass=self._start_pass,
            end_pass=occasions.end_pass,
        )
        self._loader = TrainLoader(source, course)
        return self._loader

    def _join(self, members: Sequence[joining.Member], num_rows: int | None, reference: int) -> Schedule:
        """Have the controller know the group, and return the schedule with its first shares."""
        self.devices = tuple(member.spec.device for member in members)
        resumed = None
        if self._restored is not None:
            state.check_same_data(self._restored, self._progress.position, num_rows, asked_seed=self._options.seed)
            resumed = state.allocation_of(self._restored, self.devices)
            state.tell_other_batch(self._restored, reference, resumed)
        step, multiple = self._progress.position.step, self._options.local_batch_multiple
        info = joining.group_info(self._generation, members, reference, step, resumed, multiple)
        schedule = Schedule(joining.join(self._values, self._link, info, self._options))
        self.dataset_size = num_rows
        self._progress.reference_batch = reference
        return schedule

    def _make_source(
        self,
        dataset: Any,
        num_rows: int | None,
        members: Sequence[joining.Member],
        schedule: Schedule,
        options: dict[str, Any],
    ) -> Source:
        """Make what batches come from; a stream may have to begin its epoch anew."""
        maker = SourceMaker(
            dataset=dataset,
            options=options,
            schedule=schedule,
            values=self._values,
            collective_timeout_s=self._options.collective_timeout_s,
            by_tokens=self._options.weight_by == "tokens",
            tell=self._notices.now,
        )
        if num_rows is not None:
            return maker.map_source(num_rows, self.seed)
        saved = None if self._restored is None else self._restored.get("stream")
        source, self._progress.position = maker.stream_source(members, self._progress.position, saved)
        return source

    def save_position(self) -> dict[str, Any]:
        """Return the position in plain values; an epoch's end is the next one's beginning."""
        position = self._progress.position
        if self._at_epochs_end:
            position = Position(epoch=position.epoch + 1, step=position.step)
        return state.save_position(position, self.dataset_size, self.seed)

    def save_source(self) -> dict[str, Any] | None:
        """Return what a save holds of the data beside the position. Collective."""
        return None if self._source is None else self._source.save(self._progress.position)

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield epoch numbers from the position's on; each new epoch begins at its first sample."""
        self._leave_complete_epoch()
        self._tell_if_nothing_is_left(num_epochs)
        try:
            while (epoch := self._progress.position.epoch) < num_epochs:
                self._epoch_loop = (epoch, num_epochs)
                yield epoch
                self._tracker.left_loop()
                self._progress.position = Position(epoch=epoch + 1, step=self._progress.position.step)
        finally:
            self._epoch_loop = None

    def _tell_if_nothing_is_left(self, num_epochs: int) -> None:
        """Say that a resumed run is over already; else it looks as if it had trained, and fast."""
        epoch = self._progress.position.epoch
        if self._restored is not None and epoch >= num_epochs and self._values.rank == 0:
            _log.warning(
                "session.epochs(%s) has nothing left to train: the run that was resumed has %s behind it; ask for more "
                "epochs, or give the run another name to begin anew",
                num_epochs,
                "1 whole epoch" if epoch == 1 else f"{epoch} whole epochs",
            )

    def _leave_complete_epoch(self) -> None:
        """Begin the next epoch if this one is complete: a loop over epochs was left by ``break``."""
        self._tracker.left_loop()
        if self._at_epochs_end:
            position = self._progress.position
            self._progress.position = Position(epoch=position.epoch + 1, step=position.step)

    def close(self, timeout_s: float, *, failed: bool) -> None:
        """Stop the loader processes; let the last control message end unless ranks may have died.

        Raises:
            LinkError: it did not end within the limit.
        """
        source = self._source
        if self._loader is not None:
            self._loader.stop()
        if source is not None and not failed:
            source.close(timeout_s)
        if self._switch is not None and not failed:
            self._switch.close(timeout_s)

    def _start_pass(self) -> Position:
        if not self._tracker.prepared:
            raise ConfigError("call session.prepare(model, optimizer) before the loop: without it gradients are local")
        self._tracker.gap()
        self._tracker.left_loop()
        position = self._progress.position
        if self._epoch_loop is not None and self._at_epochs_end:
            raise RexError(
                f"epoch {position.epoch} is complete, and session.loader was iterated again within it; one "
                "`for ... in loader` per epoch of session.epochs, and session.eval_loader to evaluate"
            )
        self._leave_complete_epoch()
        return self._progress.position
