from __future__ import annotations

from experiments import recovery
from experiments._recovery_loop import BATCH, NUM_ROWS, LoggedStep, logged_steps, undisturbed


def steps_of(generation: str, first_s: float, first: int, count: int) -> list[LoggedStep]:
    return [LoggedStep(at_s=first_s + k, step=first + k, num_workers=2, generation=generation) for k in range(count)]


def test_a_pause_is_from_the_last_step_of_a_group_to_the_first_of_the_next():
    steps = [*steps_of("a", 0.0, 0, 5), *steps_of("b", 20.0, 3, 4), *steps_of("c", 30.0, 7, 2)]
    first, second = recovery.pauses(steps)
    assert first.after.at_s - first.before.at_s == 16.0
    assert first.before.step - first.after.step + 1 == 2, "steps 3 and 4 were trained twice"
    assert second.before.step - second.after.step + 1 == 0
    assert recovery.pauses(steps[:3]) == []


def test_the_plain_loop_counts_each_row_once_an_epoch_and_its_trace_tells_orders_apart():
    metrics = undisturbed(3)
    assert (metrics["fewest"], metrics["most"], metrics["epochs"]) == (3.0, 3.0, 3.0)
    assert undisturbed(3) == metrics
    assert undisturbed(3, seed=1)["trace"] != metrics["trace"]
    assert NUM_ROWS % BATCH == 0, "a last batch of another size would count its rows otherwise"


def test_a_line_that_is_being_written_is_no_step_yet(tmp_path):
    assert logged_steps(tmp_path) == []
    (tmp_path / "steps").write_text("1.5 0 2 a\n2.5 1 2 a\n3.", encoding="utf-8")
    assert [step.step for step in logged_steps(tmp_path)] == [0, 1]
