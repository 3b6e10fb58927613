"""Saves that somebody outside asks for: all ranks make them before the same step, and only where nothing is lost."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scripted import MemoryReporter, Rows, ScriptedLink, opened, two_layers

from rex_ray.worker.link import IncidentRecord, SaveRequest
from rex_ray.worker.saving.state import allocation_of, shares_by_kind

NUM_ROWS, BATCH = 60, 12


class AskingLink(ScriptedLink):
    """Asks for a save at the given polls, or at each."""

    def __init__(self, at_polls: Mapping[int, str] | None) -> None:
        super().__init__(first=(2, 4, 6))
        self.at_polls = at_polls
        self.num_save_polls = 0

    def save_request(self) -> SaveRequest | None:
        self.num_save_polls += 1
        if self.at_polls is None:
            return SaveRequest(number=self.num_save_polls, reason="always")
        due = [poll for poll in self.at_polls if poll <= self.num_save_polls]
        return SaveRequest(number=max(due), reason=self.at_polls[max(due)]) if due else None


class Kept(MemoryReporter):
    """Keeps what a save held when it was made, as a storage would; the tensors train on."""

    def report(self, metrics: Mapping[str, Any], state: Mapping[str, Any] | None) -> None:
        if state is not None:
            file = io.BytesIO()
            torch.save(dict(state), file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        super().report(metrics, state)


def train(
    rank: int, at_polls: Mapping[int, str] | None, num_epochs: int, every: int = 1, by_hand: int | None = None
) -> tuple[list[tuple[Any, ...]], list[list[int]], list[str], list[Any]]:
    """Train; return what happened in order, this rank's rows per step, what was journalled, and the saves."""
    link, reporter = AskingLink(at_polls if rank == 0 else {}), Kept()
    happened: list[tuple[Any, ...]] = []
    rows: list[list[int]] = []
    with (
        opened(link, reporter, checkpoint_interval_s=1e6, control_interval_steps=1) as session,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        model = two_layers()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = session.loader(Rows(NUM_ROWS))
        for epoch in session.epochs(num_epochs):
            for ids, inputs, targets in loader:
                for metrics, state in reporter.saves[len([each for each in happened if each[0] == "save"]) :]:
                    happened.append(("save", state["position"]["epoch"], state["position"]["step"], dict(metrics)))
                rows.append(ids.tolist())
                F.mse_loss(model(inputs), targets).backward()
                if session.step % every == every - 1:
                    optimizer.step()
                    optimizer.zero_grad()
                if session.step == by_hand:
                    session.save("by hand")
            happened.append(("end", epoch))
            session.report({"epoch": epoch})
    incidents = [record.message for record in link.records if isinstance(record, IncidentRecord)]
    return happened, rows, incidents, reporter.saves


def saves_in(happened: list[tuple[Any, ...]]) -> list[int]:
    return [each[2] for each in happened if each[0] == "save"]


@pytest.mark.dist
def test_f5_all_ranks_save_before_one_step_and_any_group_goes_on_from_it(ranks: GlooGroup) -> None:
    told = ranks.run(train, {3: "a node goes"}, 2)
    happened, _, incidents, saves = told[0]
    assert len({tuple(saves_in(each[0])) for each in told}) == 1
    (step,) = saves_in(happened)
    assert 0 < step < NUM_ROWS // BATCH, "in the midst of the first epoch"
    assert [message.partition(" in ")[0] for message in incidents] == [f"saved before step {step}"]
    assert incidents[0].endswith("a node goes")

    seen = [row for each in told for ids in each[1][:step] for row in ids]
    again, rows, _, _ = train_on(saves[0][1])
    assert sorted([*seen, *rows]) == list(range(NUM_ROWS)), "every row once, by another number of workers"
    assert again == NUM_ROWS // BATCH - step


def train_on(state: Mapping[str, Any]) -> tuple[int, list[int], None, None]:
    """Finish the first epoch from a save, alone."""
    rows: list[int] = []
    with opened(ScriptedLink(), MemoryReporter(restored=state)) as session:
        model = two_layers()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = session.loader(Rows(NUM_ROWS))
        num_steps = 0
        for _ in session.epochs(1):
            for ids, inputs, targets in loader:
                rows.extend(ids.tolist())
                num_steps += 1
                F.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
    return num_steps, rows, None, None


@pytest.mark.dist
@pytest.mark.parametrize("every", [1, 2])
def test_no_save_at_an_epochs_end_nor_among_batches_that_are_accumulated(ranks: GlooGroup, every: int) -> None:
    told = ranks.run(train, None, 3, every)
    happened = told[0][0]
    assert all(each[0] == happened for each in told), "all ranks alike"
    steps = saves_in(happened)
    assert len(steps) >= 3
    assert all(step % every == 0 for step in steps), "what waits for an update is in no save"
    for number, (kind, *rest) in enumerate(happened):
        if kind == "save" and rest[0] > 0:
            assert ("end", rest[0] - 1) in happened[:number], "a resume would skip the evaluation of the epoch"


@pytest.mark.dist
def test_a_loop_can_save_by_itself_and_the_metrics_reported_last_go_along(ranks: GlooGroup) -> None:
    for happened, _, _, saves in ranks.run(train, {}, 2, 1, 7):
        assert saves_in(happened) == [8], "the step in hand is in it"
        assert saves[0][0] == {"epoch": 0}


@pytest.mark.parametrize(
    ("now", "shares"),
    [
        (["T4", "V100", "V100"], (3, 10, 11)),
        (["V100", "T4", "V100"], (10, 3, 11)),
        (["V100", "V100", "T4"], (10, 11, 3)),
        (["V100", "V100", "V100"], (24,)),
        (["T4", "V100"], (24,)),
    ],
)
def test_shares_go_to_the_kinds_that_they_were_for(now: list[str], shares: tuple[int, ...]) -> None:
    before = ["T4", "V100", "V100"]
    assert shares_by_kind((3, 10, 11), before, now) == shares
    saved = {"allocation": {"version": 4, "local_batch_sizes": [3, 10, 11], "lr_factor": 2.0, "devices": before}}
    resumed = allocation_of(saved, now)
    assert resumed is not None
    assert (resumed.local_batch_sizes, resumed.global_batch_size, resumed.lr_factor) == (shares, 24, 2.0)
    del saved["allocation"]["devices"]
    old = allocation_of(saved, now)
    assert old is not None
    assert old.local_batch_sizes == (3, 10, 11), "a save of before has no kinds"
