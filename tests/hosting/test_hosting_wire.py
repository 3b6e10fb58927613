"""What is packed for the queue comes out as it went in."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.types import StepFlag, StepRecord
from rex_ray.hosting.wire import decode, encode
from rex_ray.worker.link import MetricRecord

seconds = st.floats(0.0, 1e6)
maybe_figure = st.none() | st.floats(allow_nan=False)

records = st.builds(
    StepRecord,
    generation=st.sampled_from(["a", "b"]),
    epoch=st.integers(0, 10**6),
    rank=st.integers(0, 4096),
    step=st.integers(0, 2**40),
    allocation_version=st.integers(0, 2**31),
    num_rows=st.integers(0, 2**31),
    data_s=seconds,
    compute_s=seconds,
    sync_s=seconds,
    step_s=seconds,
    weighted_sq_norm=maybe_figure,
    num_groups=st.integers(1, 64),
    num_norm_steps=st.integers(1, 2),
    global_sq_norm=maybe_figure,
    loss=maybe_figure,
    peak_memory_bytes=st.none() | st.integers(0, 2**45),
    flags=st.sampled_from([StepFlag.NONE, StepFlag.WARM_UP, StepFlag.WARM_UP | StepFlag.PARTIAL]),
)


@given(st.lists(records, max_size=20))
def test_records_survive_the_wire_in_order_and_in_kind(sent: list[StepRecord]) -> None:
    received = decode(encode(0, sent))
    assert received == sent
    for record in received:
        assert isinstance(record.step, int)
        assert isinstance(record.data_s, float)
        assert isinstance(record.flags, StepFlag)


@given(records)
def test_what_is_no_number_was_not_measured(record: StepRecord) -> None:
    assert decode(encode(0, [replace(record, loss=math.nan)])) == [replace(record, loss=None)]


def test_metrics_and_drops_travel_with_the_steps() -> None:
    metric = MetricRecord(generation="a", epoch=1, step=7, elapsed_s=2.0, metrics={"accuracy": 0.5})
    batch = encode(3, [metric], num_dropped=4)
    assert decode(batch) == []
    assert batch.metrics == (metric,)
    assert (batch.rank, batch.num_dropped) == (3, 4)
