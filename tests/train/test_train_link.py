"""A link, a queue and a control actor by themselves, without Ray Train around them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from batches import group, records
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.queue import Queue
from train_harness import journal_of, steps_of, wait_for

from rex_ray import InfeasibleError, LinkError, RexConfig
from rex_ray.core.types import Allocation
from rex_ray.train.control_actor import NAMESPACE, ControlActor
from rex_ray.train.link import RayLink
from rex_ray.train.local_cluster import LocalCluster
from rex_ray.worker.link import MetricRecord

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


class Rig:
    """A control actor with its queue, and the links that were made to them."""

    def __init__(self, journal_dir: Path, config: RexConfig, kind: type[ControlActor] = ControlActor) -> None:
        name = f"queue-{uuid.uuid4().hex}"
        self.journal_dir = journal_dir
        self.queue = Queue(actor_options={"num_cpus": 0, "name": name, "namespace": NAMESPACE})
        self.control = (
            ray.remote(kind)
            .options(num_cpus=0, max_restarts=-1, max_concurrency=100)
            .remote(config, name, str(journal_dir))
        )
        self.links: list[RayLink] = []
        self.status()

    def link(self, rank: int, world_size: int = 2) -> RayLink:
        self.links.append(RayLink(self.control, self.queue, rank, world_size))
        self.links[-1].started("g")
        return self.links[-1]

    def status(self) -> Any:
        return ray.get(self.control.status.remote(), timeout=30)

    def is_silent(self) -> bool:
        try:
            ray.get(self.control.status.remote(), timeout=0.5)
        except (RayActorError, GetTimeoutError):
            return True
        return False

    def finish(self) -> Any:
        return ray.get(self.control.finish.remote("finished"), timeout=30)

    def close(self) -> None:
        for link in self.links:
            link.close(1.0)
        for actor in (self.control, self.queue.actor):
            ray.kill(actor)


@pytest.fixture
def make_rig(cluster: LocalCluster, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(kind: type[ControlActor] = ControlActor) -> Rig:
        journal_dir = tmp_path / "journal"
        journal_dir.mkdir()
        rigs.append(Rig(journal_dir, RexConfig(global_batch_size=32), kind))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def test_records_go_out_and_a_better_allocation_comes_back(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    links = [rig.link(0), rig.link(1)]
    first = links[0].join(group(), 30.0)
    assert first.local_batch_sizes == (16, 16)
    assert links[0].latest() is None, "nothing is newer than what the group joined with"
    for step in range(20):
        for rank, link in enumerate(links):
            link.send(records(rank, [step], first))
    news = wait_for(links[0].latest, 20, "a new allocation")
    assert news.version == first.version + 1
    assert news.local_batch_sizes[0] < 16 < news.local_batch_sizes[1]
    for link in links:
        link.close(5.0)
    status = rig.finish()
    assert status.fault is None
    assert status.dropped == {}
    assert [step.step for step in steps_of(journal_of(rig.journal_dir))] == list(range(20))


class DeafActor(ControlActor):
    """Answers everything but the question for news."""

    async def latest(self, generation: str, version: int, save_number: int = -1) -> Allocation | None:
        await asyncio.sleep(3600)
        return None


def test_a_blocked_call_means_that_nobody_hears_of_a_switch_and_nobody_waits_for_it(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(DeafActor)
    links = [rig.link(0), rig.link(1)]
    first = links[0].join(group(), 30.0)
    for step in range(20):
        for rank, link in enumerate(links):
            link.send(records(rank, [step], first))
    wait_for(lambda: rig.status().allocation.version > first.version, 20, "a new allocation")
    assert rig.status().last_step == 19
    began = time.perf_counter()
    assert links[0].latest() is None
    for link in links:
        link.close(2.0)
    assert time.perf_counter() - began < 2 * 2.0 + 1.0
    assert rig.finish().fault is None


def test_evidence_of_another_group_is_dropped_and_counted(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    link = rig.link(0)
    first = link.join(group(), 30.0)
    link.send(records(0, [0], first, generation="earlier"))
    link.send([MetricRecord(generation="earlier", epoch=0, step=0, elapsed_s=1.0, metrics={"accuracy": 0.5})])
    wait_for(lambda: sum(rig.status().dropped.values()) == 2, 20, "the count of two drops")


def test_sending_never_waits_for_a_dead_queue(make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig()
    link = rig.link(0)
    first = link.join(group(), 30.0)
    ray.kill(rig.queue.actor)
    began = time.perf_counter()
    for step in range(10_000):
        link.send(records(0, [step], first))
    assert time.perf_counter() - began < 2.0
    time.sleep(2.0)
    link.send(records(0, [10_000], first))
    began = time.perf_counter()
    link.close(5.0)
    assert time.perf_counter() - began < 5.5
    told = [message for message in caplog.messages if "takes no records" in message]
    assert len(told) == 1, "said once, not at every put"
    assert rig.finish().fault is None


def test_a_dead_control_actor_is_a_link_error_within_the_limit(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    link = rig.link(0)
    ray.kill(rig.control, no_restart=True)
    wait_for(rig.is_silent, 30, "the actor's death")
    began = time.perf_counter()
    with pytest.raises(LinkError):
        link.join(group(), 2.0)
    assert time.perf_counter() - began < 3.0
    assert link.latest() is None


def test_a_group_that_was_not_heard_joins_when_the_actor_is_back(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    link = rig.link(0)
    ray.kill(rig.control, no_restart=False)
    wait_for(rig.is_silent, 10, "the actor's death")
    with pytest.raises(LinkError):
        link.join(group(), 0.05)
    news = wait_for(link.latest, 30, "the first allocation, late")
    assert news.local_batch_sizes == (16, 16)
    assert rig.status().num_restarts == 1


def test_bounds_that_no_allocation_meets_are_the_users_to_hear(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    with pytest.raises(InfeasibleError):
        rig.link(0).join(group(most_rows=10), 30.0)
    assert rig.status().fault is None
    assert rig.link(0).join(group(), 30.0).local_batch_sizes == (16, 16)
