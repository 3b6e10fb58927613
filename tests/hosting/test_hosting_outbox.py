"""What waits for the telemetry queue: kept while the queue takes none, bounded, and honest about what is lost."""

from __future__ import annotations

from batches import first_allocation, records

from rex_ray.core.types import StepRecord
from rex_ray.hosting.outbox import Outbox


def some(count: int, first: int = 0) -> list[StepRecord]:
    return records(0, range(first, first + count), first_allocation())


def test_what_waits_while_the_queue_is_away_is_sent_when_it_is_back_and_at_the_end_whatever_it_is() -> None:
    outbox = Outbox()
    outbox.put(some(3))
    assert len(outbox.take(0.0)) == 3
    assert outbox.failed(3, 0.0), "news"
    outbox.put(some(2, first=3))
    assert outbox.take(0.1) == [], "it took none a moment ago"
    assert outbox.take(0.1, is_last=True) == some(2, first=3), "an incident that ends the group is among the last"
    assert not outbox.failed(2, 0.1)
    outbox.put(some(2, first=5))
    assert outbox.take(0.6) == [], "ever longer pauses"
    assert [record.step for record in outbox.take(1.2)] == [5, 6]
    assert outbox.arrived()
    assert outbox.num_dropped == 3 + 2


def test_a_queue_that_answers_nothing_is_sent_no_more_than_eight_batches_and_the_oldest_records_give_way() -> None:
    outbox = Outbox()
    for step in range(8):
        outbox.put(some(1, first=step))
        assert len(outbox.take(0.0)) == 1
    outbox.put(some(5000))
    assert outbox.take(1e6) == []
    outbox.arrived()
    sent = outbox.take(1e6)
    assert [record.step for record in sent] == list(range(5000 - 4096, 5000))
    assert outbox.num_dropped == 5000 - 4096
