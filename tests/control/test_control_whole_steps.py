"""A step from whole arrays is the step that the assembler makes of its records, whatever the figures."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.control.assembly import StepAssembler
from rex_ray.control.whole_steps import WholeSteps
from rex_ray.core.observations import StepObserved
from rex_ray.core.types import StepFlag, StepRecord

TIMES = st.floats(0.0, 1e4) | st.sampled_from([-1.0, 0.0, float("nan"), float("inf"), 1e12])
NORMS = st.floats(0.0, 1e30) | st.sampled_from([float("nan"), float("inf"), 1e-300])


def as_values(step: StepObserved) -> dict[str, object]:
    values = {part.name: getattr(step, part.name) for part in fields(step)}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            assert not value.flags.writeable, name
            values[name] = (value.dtype.name, value.tolist())
    return values


@given(data=st.data(), num_workers=st.integers(1, 4), num_steps=st.integers(1, 3), measures=st.booleans())
def test_whole_steps_are_those_of_the_assembler(data, num_workers, num_steps, measures):
    def drawn(values: st.SearchStrategy, *shape: int) -> np.ndarray:
        size = int(np.prod(shape))
        return np.array(data.draw(st.lists(values, min_size=size, max_size=size))).reshape(shape)

    times_s = drawn(TIMES, 4, num_steps, num_workers)
    rows = drawn(st.integers(0, 512), num_workers)
    weighted, reduced = drawn(NORMS, num_steps, num_workers), drawn(NORMS, num_steps)
    groups = drawn(st.integers(0, 4), num_workers)
    flags = data.draw(st.sampled_from([StepFlag.NONE, StepFlag.WARM_UP, StepFlag.WARM_UP | StepFlag.PARTIAL]))
    whole = WholeSteps.of(generation="g", allocation_version=3, num_rows=rows, first_step=7, times_s=times_s)
    assembler = StepAssembler("g", num_workers, first_step=7)
    assembler.publish(3)
    for at in range(num_steps):
        records = [
            StepRecord(
                generation="g",
                epoch=2,
                rank=rank,
                step=7 + at,
                allocation_version=3,
                num_rows=int(rows[rank]),
                **dict(zip(("data_s", "compute_s", "sync_s", "step_s"), times_s[:, at, rank].tolist(), strict=True)),
                weighted_sq_norm=float(weighted[at, rank]) if measures else None,
                num_groups=int(groups[rank]),
                global_sq_norm=float(reduced[at]) if measures and rank == 0 else None,
                flags=flags,
            )
            for rank in range(num_workers)
        ]
        norms = (
            {"weighted_sq_norm": weighted[at], "num_groups": groups, "global_sq_norm": float(reduced[at])}
            if measures
            else {}
        )
        step = whole.observed(7 + at, epoch=2, flags=flags, **norms)
        assert [as_values(other) for other in assembler.add(records)] == ([] if step is None else [as_values(step)])


def test_a_step_with_a_negative_share_does_not_leave():
    whole = WholeSteps.of(
        generation="g", allocation_version=1, num_rows=[4, -1], first_step=0, times_s=np.ones((4, 1, 2))
    )
    assert whole.observed(0, epoch=0) is None
