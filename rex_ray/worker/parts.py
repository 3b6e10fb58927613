"""What a session is made of, put together once: each part is given what it needs, and none reaches for the session."""

from __future__ import annotations

from dataclasses import dataclass

from rex_ray.worker.data.feed import Feed
from rex_ray.worker.data.loader import Occasions
from rex_ray.worker.doing import activity_of
from rex_ray.worker.measuring.probes import RecordQueue
from rex_ray.worker.meeting import Meeting, Surroundings, meet
from rex_ray.worker.model.assembling import Assembly
from rex_ray.worker.model.model_side import ModelSide
from rex_ray.worker.notices import Notices
from rex_ray.worker.preflight.facts import WorkerFacts
from rex_ray.worker.preflight.look import gather_facts
from rex_ray.worker.preflight.precision import Precision
from rex_ray.worker.progress import Progress
from rex_ray.worker.saving import state
from rex_ray.worker.saving.collecting import Collector
from rex_ray.worker.saving.learnt_limits import LearntLimits
from rex_ray.worker.saving.saves import Saves, SavingRank
from rex_ray.worker.saving.snapshots import Snapshots, holders
from rex_ray.worker.schedule_teller import ScheduleTeller
from rex_ray.worker.tracker import StepTracker

__all__ = ["Parts", "put_together"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One rank's session, in its parts.

    Attributes:
        around: what the session was opened with.
        met: what the ranks found together.
        schedule: tells how far the loop is to go, at what rate.
        notices: says what is no measurement.
        tracker: the batch in hand, and where training stands.
        precision: what to autocast to.
        limits: what is known of memories.
        model_side: the prepared model.
        feed: the data.
        collector: what a save holds.
        saves: metrics and saves.
        occasions: what is done between two batches.
    """

    around: Surroundings
    met: Meeting
    schedule: ScheduleTeller
    notices: Notices
    tracker: StepTracker
    precision: Precision
    limits: LearntLimits
    model_side: ModelSide
    feed: Feed
    collector: Collector
    saves: Saves
    occasions: Occasions


def put_together(around: Surroundings) -> Parts:
    """Have the ranks meet, and make the parts of this rank's session. Collective.

    Raises:
        RexError: see ``meet``.
    """
    met = meet(around)
    schedule, notices, tracker = _books(around, met)
    options, link, restored = around.options, around.link, met.restored
    limits = LearntLimits(device_kind=around.device_kind, restored=restored, link=link)
    assembly = Assembly(
        tracker=tracker,
        notices=notices,
        options=options,
        values=met.values,
        torch_device=around.torch_device,
        pass_limit=limits.passes,
    )
    model_side = ModelSide(assembly)
    feed = Feed(
        tracker=tracker,
        notices=notices,
        options=options,
        link=link,
        values=met.values,
        control=met.control,
        generation=met.generation,
        restored=restored,
    )
    collector = Collector(
        group=met.values,
        tracker=tracker,
        feed=feed,
        model_side=model_side,
        generation=met.generation,
        limits=limits,
        restored=restored,
    )
    saves = Saves(
        SavingRank(
            reporter=around.reporter,
            link=link,
            group=met.values,
            tracker=tracker,
            notices=notices,
            feed=feed,
            generation=met.generation,
            collector=collector,
            snapshots=_snapshots(around, met, notices),
            interval_s=options.checkpoint_interval_s,
            retry_s=options.storage_retry_s,
        )
    )
    return Parts(
        around=around,
        met=met,
        schedule=schedule,
        notices=notices,
        tracker=tracker,
        precision=_precision(around, met, tracker),
        limits=limits,
        model_side=model_side,
        feed=feed,
        collector=collector,
        saves=saves,
        occasions=Occasions(end_pass=model_side.end_pass, save=saves.between_steps, snapshots=saves.snapshot_turns),
    )


def _books(around: Surroundings, met: Meeting) -> tuple[ScheduleTeller, Notices, StepTracker]:
    """Make what follows the loop and tells of it, and enter what the meeting found."""
    rank, generation = met.values.rank, met.generation
    progress = Progress(None if met.restored is None else state.position_of(met.restored))
    schedule = ScheduleTeller(generation, around.link.send, progress)
    records = RecordQueue(schedule.send if rank == 0 else around.link.send)
    notices = Notices(rank=rank, generation=generation, progress=progress, records=records)
    tracker = StepTracker(
        rank=rank,
        options=around.options,
        device=around.first_device,
        generation=generation,
        records=records,
        progress=progress,
    )
    # Presence speaks since before the ranks met, so it is told here of what there is to say from now on.
    around.presence.activity = lambda: activity_of(tracker.in_hand, progress.position.step)
    around.presence.on_long_wait = notices.long_wait
    if rank == 0 and met.looked is not None:
        notices.now("preflight", met.looked.in_words())
    if rank == 0 and met.resumed is not None:
        notices.resumed(met.resumed.in_words(progress.position, met.values.size), met.resumed.troubles)
    return schedule, notices, tracker


def _precision(around: Surroundings, met: Meeting, tracker: StepTracker) -> Precision:
    def facts() -> tuple[WorkerFacts, ...]:
        if met.looked is not None:
            return met.looked.workers
        return gather_facts(met.values, around.device_kind, tracker.device)

    return Precision(met.values, facts, lambda: tracker.device)


def _snapshots(around: Surroundings, met: Meeting, notices: Notices) -> Snapshots | None:
    """Agree on who keeps snapshots, where any are to be made. Collective."""
    if around.snapshot_place is None:
        return None
    nodes = met.values.gather_objects(around.node, "the ranks' nodes")
    return Snapshots(
        around.snapshot_place,
        keeps=met.values.rank in holders(nodes),
        interval_s=around.options.snapshot_interval_s,
        on_trouble=notices.snapshot_trouble,
    )
