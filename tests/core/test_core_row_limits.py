"""Limits learnt from workers that ran out of memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.row_limits import MARGIN, RowLimits
from rex_ray.core.types import Problem, WorkerSpec

WORKERS = tuple(WorkerSpec(rank=rank, device=device) for rank, device in enumerate(("T4", "T4", "V100")))
PROBLEM = Problem(workers=WORKERS, global_batch_size=48, max_global_batch_size=384, dataset_size=4096)


def test_d9_a_kind_that_never_held_so_much_falls_by_half_and_one_that_did_to_what_it_held() -> None:
    assert RowLimits().with_failure("T4", 40).most == {"T4": 20}
    held = RowLimits().with_run(WORKERS, (18, 30, 64))
    assert held.with_failure("T4", 40).most == {"T4": 30}
    assert held.with_failure("T4", 20).most == {"T4": int(MARGIN * 20)}, "it had held 30, and now fails at 20"


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from(("T4", "V100")), st.integers(0, 200)), max_size=30),
    st.integers(1, 90),
)
def test_d9_repeated_failures_keep_off_any_fixed_limit_within_few_restarts(
    story: list[tuple[bool, str, int]], fits: int
) -> None:
    """Whatever happened before, a kind that holds ``fits`` rows is within them after as few failures as halvings."""
    limits = RowLimits()
    for failed, device, rows in story:
        spec = WorkerSpec(rank=0, device=device)
        after = limits.with_failure(device, rows) if failed else limits.with_run([spec], [rows])
        assert all(after.most[kind] <= rows for kind, rows in limits.most.items()), "a limit never rises"
        limits = after
    num_failures, rows = 0, 200
    while (rows := min(rows, limits.most.get("A100", rows))) > fits:
        limits = limits.with_failure("A100", rows)
        num_failures += 1
    assert num_failures <= 8


def test_a_problem_is_bounded_per_kind_and_never_beyond_a_workers_own_bound() -> None:
    limits = RowLimits().with_failure("T4", 40)
    assert [worker.max_local_batch_size for worker in limits.within(PROBLEM).workers] == [20, 20, None]
    tighter = Problem(
        workers=(WorkerSpec(rank=0, device="T4", max_local_batch_size=7),),
        global_batch_size=4,
        max_global_batch_size=8,
        dataset_size=64,
    )
    assert limits.within(tighter) == tighter
    assert RowLimits().within(PROBLEM) is PROBLEM


def test_what_fits_nowhere_is_said_with_kinds_rows_and_remedies() -> None:
    limits = RowLimits().with_failure("T4", 20).with_failure("V100", 30)
    fault = limits.fault_of(limits.within(PROBLEM))
    assert fault is not None
    assert "global batch of 48 rows" in fault
    assert "T4 is given at most 10 rows, V100 is given at most 15 rows" in fault
    assert "3 workers hold 35 rows together" in fault
    assert "session.train_step" in fault
    roomy = RowLimits().with_failure("T4", 20)
    assert roomy.fault_of(roomy.within(PROBLEM)) is None, "a V100's memory is unknown, and may take the rest"


def test_no_more_kinds_are_kept_than_a_cluster_has() -> None:
    limits = RowLimits()
    for number in range(200):
        limits = limits.with_failure(f"host-{number}", 10).with_run([WorkerSpec(rank=0, device=f"h{number}")], [1])
    assert len(limits.most) == 64
    assert len(limits.ran) <= 128
