"""Whatever is put into the telemetry queue, nothing is decided on it and nobody dies of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from batches import first_allocation, records, started
from hypothesis import given, settings
from hypothesis import strategies as st

from rex_ray import RexConfig
from rex_ray.control.codec import CodecError
from rex_ray.control.commands import ApplyAllocation
from rex_ray.control.reading import read_journal
from rex_ray.control.replay import replay
from rex_ray.core.types import StepFlag
from rex_ray.hosting.control_host import ControlHost
from rex_ray.hosting.wire import Batch, checked, decode, encode
from rex_ray.worker.link import IncidentRecord, MetricRecord

CONFIG = RexConfig(global_batch_size=32, policy_options={"search": "off"})


class Memory:
    """A journal's files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def read(self) -> dict[str, bytes]:
        return self.files

    def append(self, chunks: Any) -> None:
        for name, data in chunks:
            self.files[name] = self.files.get(name, b"") + data


def host_with_group() -> tuple[ControlHost, Memory]:
    memory = Memory()
    host = ControlHost(CONFIG, memory, lambda _: None)
    host.handle(started())
    return host, memory


def train(host: ControlHost, steps: range) -> None:
    for step in steps:
        for rank in (0, 1):
            host.take(encode(rank, records(rank, [step], host.published or first_allocation())))


odd_figures = st.sampled_from(
    [float("nan"), float("inf"), -float("inf"), -1.0, 0.5, 1e300, -1e300, 2.0**53, 1e18, 5e-324]
)
odd_things = st.one_of(
    st.none(), st.integers(), st.text(), st.binary(), st.dictionaries(st.text(), st.integers()), odd_figures
)


@st.composite
def bent_batches(draw: st.DrawFn) -> Any:
    """A batch of two steps with odd figures in it, or odd parts, or something else altogether."""
    batch = encode(draw(st.integers(0, 3)), records(0, [3, 4], first_allocation()))
    kind = draw(st.sampled_from(["figures", "part", "thing", "width", "incident", "metric"]))
    if kind == "thing":
        return draw(odd_things)
    if kind == "part":
        return replace(
            batch, **{draw(st.sampled_from(Batch.__match_args__ or tuple(Batch.__slots__))): draw(odd_things)}
        )
    if kind == "width":
        return replace(batch, steps=np.full(draw(st.sampled_from([(2, 3), (40,), (2, 40)])), 1.0))
    if kind == "incident":
        odd = IncidentRecord(generation="g", rank=0, step=0, kind="storage", message="full")
        return replace(
            batch, incidents=(replace(odd, **{draw(st.sampled_from(["rank", "kind", "message"])): draw(odd_things)}),)
        )
    if kind == "metric":
        odd_metric = MetricRecord(generation="g", epoch=0, step=0, elapsed_s=1.0, metrics={"loss": 1.0})
        change = draw(st.sampled_from(["epoch", "elapsed_s", "metrics", "generation"]))
        return replace(batch, metrics=(replace(odd_metric, **{change: draw(odd_things)}),))
    steps = batch.steps.copy()
    for _ in range(draw(st.integers(1, 4))):
        steps[draw(st.integers(0, 1)), draw(st.integers(0, steps.shape[1] - 1))] = draw(odd_figures)
    return replace(batch, steps=steps)


@settings(max_examples=60, deadline=None)
@given(st.lists(bent_batches(), min_size=1, max_size=6))
def test_e10_odd_batches_are_dropped_and_counted_and_the_rest_is_judged_as_ever(batches: list[Any]) -> None:
    host, memory = host_with_group()
    train(host, range(3))
    for batch in batches:
        host.take(batch)
        host.tick(1.0)
    train(host, range(3, 60))
    assert host.fault is None
    host.end("finished")
    assert host.fault is None
    journal = read_journal(memory.files)
    assert replay(journal).is_identical
    for command in journal.commands:
        if isinstance(command, ApplyAllocation):
            assert sum(command.allocation.local_batch_sizes) >= 32
            assert len(command.allocation.local_batch_sizes) == 2
    assert sum(host.status().dropped.values()) >= sum(not isinstance(batch, Batch) for batch in batches)


@given(odd_things)
def test_what_is_no_batch_is_a_codec_error(thing: Any) -> None:
    with pytest.raises(CodecError):
        checked(thing)


def test_a_row_without_its_whole_numbers_is_no_record_and_a_time_that_is_none_reaches_the_assembler() -> None:
    batch = encode(0, records(0, range(5), first_allocation()))
    batch.steps[0, 3] = np.nan
    batch.steps[1, 0] = 7
    batch.steps[2, 3] = 0.5
    batch.steps[3, 7] = np.inf
    kept = decode(checked(batch))
    assert [record.step for record in kept] == [3, 4]
    assert np.isinf([kept[0].compute_s, kept[0].data_s, kept[0].sync_s]).any()
    assert kept[1].flags == StepFlag.NONE


def test_incidents_at_every_step_do_not_fill_the_disk() -> None:
    host, memory = host_with_group()
    for step in range(3000):
        told = IncidentRecord(generation="g", rank=0, step=step, kind="non_finite", message="x" * 10_000)
        host.take(encode(0, [told]))
    assert host.status().dropped["incident like many before"] > 2700
    assert sum(map(len, memory.files.values())) < 300 * 2500


def test_what_is_told_for_the_record_alone_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    host, _ = host_with_group()
    caplog.set_level("INFO", logger="rex_ray")
    for kind in ("preflight", "save", "storage"):
        host.take(encode(0, [IncidentRecord(generation="g", rank=0, step=0, kind=kind, message=f"told of {kind}")]))
    told = {line.getMessage().split()[-1]: line.levelname for line in caplog.records if "told of" in line.getMessage()}
    assert told == {"preflight": "INFO", "save": "INFO", "storage": "WARNING"}


def test_what_a_restarted_worker_dropped_is_added_to_what_its_predecessor_did() -> None:
    host, _ = host_with_group()
    for dropped in (3, 5, 5, 2):
        host.take(encode(1, [], num_dropped=dropped))
    for rank in range(5000):
        host.take(encode(rank, []))
    assert host.status().dropped["not taken by the queue"] == 5 + 2
    assert len(host._intake._drops_of) <= 4096
