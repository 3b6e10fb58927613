"""What three ranks do together beside the gradient: timers, evaluation, saves, buffers, and leaving."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup, RankError
from scripted import MemoryReporter, Rows, ScriptedLink, opened, two_layers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from rex_ray.core.errors import ConfigError, InfeasibleError
from rex_ray.core.types import Allocation, StepRecord
from rex_ray.worker.link import GroupInfo

pytestmark = pytest.mark.dist

OWN_S = 0.04


class SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


def slow_inside_backward(rank: int) -> list[StepRecord]:
    """Ten steps; rank 1 takes twice as long inside backward."""
    link = ScriptedLink((4, 4, 4))
    with opened(link, warm_up_steps=2) as session:
        model = two_layers()
        ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _, inputs, targets in session.loader(Rows(120)):
            outputs = SleepInBackward.apply(ddp(inputs), OWN_S * (2 if rank == 1 else 1))
            F.mse_loss(outputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return link.steps[2:]


def test_e1_the_rank_slowed_inside_backward_is_named_while_wall_times_equalise(ranks: GlooGroup) -> None:
    records = ranks.run(slow_inside_backward)
    own = [statistics.median(record.data_s + record.compute_s for record in steps) for steps in records]
    wall = [statistics.median(record.step_s for record in steps) for steps in records]
    waited = [statistics.median(record.sync_s for record in steps) for steps in records]
    assert own[1] == pytest.approx(2 * OWN_S, rel=0.35)
    assert own[0] == pytest.approx(OWN_S, rel=0.35)
    assert own[2] == pytest.approx(OWN_S, rel=0.35)
    assert own[1] > 1.5 * max(own[0], own[2])
    assert max(wall) < 1.1 * min(wall)
    assert min(waited[0], waited[2]) > 0.6 * OWN_S > waited[1]


def norms_of_a_step(rank: int) -> tuple[StepRecord, float, int]:
    link, data = ScriptedLink((2, 0, 10)), Rows(12)
    with opened(link, norm_interval_steps=1) as session:
        model = two_layers()
        ddp, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _, inputs, targets in session.loader(data):
            F.mse_loss(ddp(inputs), targets).backward()
            reduced = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
            own = two_layers()
            F.mse_loss(own(inputs), targets).backward()
            local = sum(float(p.grad.square().sum()) for p in own.parameters() if p.grad is not None)
    return link.steps[0], reduced if rank == 0 else local, len(inputs)


def test_norms_of_unequal_ranks_are_of_their_unweighted_gradients(ranks: GlooGroup) -> None:
    (first, reduced, _), (empty, _, no_rows), (last, local, num_rows) = ranks.run(norms_of_a_step)
    assert first.global_sq_norm == pytest.approx(reduced)
    assert last.global_sq_norm is None
    assert last.weighted_sq_norm == pytest.approx(num_rows * local)
    assert last.num_groups == 1
    assert no_rows == empty.num_rows == empty.num_groups == 0
    assert empty.weighted_sq_norm == 0.0


def evaluate_seven_rows(rank: int) -> tuple[float, list[int], list[int], float]:
    with opened() as session:
        seen, total, count = [], 0.0, 0
        for ids, inputs, _ in session.eval_loader(Rows(7), local_batch_size=2):
            seen += ids.tolist()
            total += float(inputs[:, 0].sum())
            count += len(ids)
        histogram = torch.bincount(torch.tensor(seen), minlength=7)
        return session.pool(total, count), seen, session.pool_sum(histogram).tolist(), session.pool(0, 0)


def test_a10_seven_rows_on_three_ranks_give_the_single_process_metric(ranks: GlooGroup) -> None:
    results = ranks.run(evaluate_seven_rows)
    assert sorted(row for _, seen, *_ in results for row in seen) == list(range(7))
    for mean, _, histogram, nothing in results:
        assert mean == pytest.approx(float(Rows(7).inputs[:, 0].mean()), abs=1e-12)
        assert histogram == [1] * 7
        assert math.isnan(nothing)  # no row, no ratio


def agree_to_save(rank: int) -> tuple[list[dict[str, Any]], int, list[int]]:
    """Only rank 0's clock says that a save is due; the others' never would."""
    link, reporter = ScriptedLink(), MemoryReporter()
    with opened(link, reporter, checkpoint_interval_s=0.05 if rank == 0 else 1e6) as session:
        model = two_layers()
        ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        loader = session.loader(Rows(36))
        for epoch in session.epochs(4):
            for _, inputs, targets in loader:
                F.mse_loss(ddp(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            if epoch == 1:
                time.sleep(0.06)
            session.report({"epoch": epoch})
    positions = [state["position"] for _, state in reporter.saves if state is not None]
    return positions, len(link.metrics), [len(state["rng"]["cpu"]) for _, state in reporter.saves if state is not None]


def test_ranks_save_together_by_rank_0s_clock_and_always_at_the_end(ranks: GlooGroup) -> None:
    results = ranks.run(agree_to_save)
    assert results[0][0] == results[1][0] == results[2][0]
    epochs = [position["epoch"] for position in results[0][0]]
    assert 2 in epochs
    assert epochs[-1] == 4
    assert [num_metrics for _, num_metrics, _ in results] == [4, 0, 0]
    assert set(results[2][2]) == {3}


def batch_norm_statistics(rank: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """One step at momentum 1: the running mean becomes that of the batch. Rank 0 alone evaluates in between."""
    with opened(ScriptedLink((2, 4, 6))) as session:
        model = nn.Sequential(nn.BatchNorm1d(6, momentum=1.0), nn.Linear(6, 1)).double()
        ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        data = Rows(12)
        for _, inputs, targets in session.loader(data):
            F.mse_loss(ddp(inputs), targets).backward()
            optimizer.step()
            if rank == 0:
                with torch.no_grad():
                    ddp.eval()
                    ddp(inputs)
                    session.unwrap(ddp)(inputs)
                    ddp.train()
    norm = model[0]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    return norm.running_mean, data.inputs.mean(0), session.unwrap(ddp) is model


def test_batch_norm_statistics_agree_weighted_by_rows_and_rank_0_evaluates_alone(ranks: GlooGroup) -> None:
    for running, whole, unwrapped in ranks.run(batch_norm_statistics):
        assert torch.allclose(running, whole, rtol=0, atol=1e-12)
        assert unwrapped


def take_wrapped_models(rank: int) -> tuple[bool, str]:
    wrapped = DistributedDataParallel(two_layers())
    with opened() as session:
        model, _ = session.prepare(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.01))
        with pytest.raises(ConfigError, match="one model"):
            session.prepare(two_layers(), torch.optim.SGD(wrapped.parameters(), lr=0.01))
    hooked = DistributedDataParallel(two_layers())
    hooked.register_comm_hook(None, allreduce_hook)
    with opened() as session:
        try:
            session.prepare(hooked, torch.optim.SGD(hooked.parameters(), lr=0.01))
        except ConfigError as error:
            return model is wrapped, str(error)
    return model is wrapped, "accepted"


def test_a_wrapped_model_is_taken_as_it_is_unless_it_has_a_hook(ranks: GlooGroup) -> None:
    for same, message in ranks.run(take_wrapped_models):
        assert same
        assert "session.register_comm_hook" in message


def give_different_data(rank: int) -> str:
    with opened() as session:
        try:
            session.loader(Rows(40 + rank))
        except ConfigError as error:
            return str(error)
    return "accepted"


def test_training_sets_of_different_sizes_are_refused_on_every_rank(ranks: GlooGroup) -> None:
    assert all("[40, 41, 42] rows" in message for message in ranks.run(give_different_data))


class RefusingLink(ScriptedLink):
    def join(self, group: GroupInfo, timeout_s: float) -> Allocation:
        raise InfeasibleError("no room for these minima")


def be_refused(rank: int) -> tuple[str, float]:
    began = time.monotonic()
    with opened(RefusingLink()) as session:
        try:
            session.loader(Rows(40))
        except InfeasibleError as error:
            return str(error), time.monotonic() - began
    return "accepted", time.monotonic() - began


def test_a_controllers_refusal_is_heard_by_every_rank_at_once(ranks: GlooGroup) -> None:
    for message, seconds in ranks.run(be_refused):
        assert message == "no room for these minima"
        assert seconds < 5.0


def pool_unlike(rank: int, unlike: str) -> Any:
    values: Any = {
        "types": 0 if rank else torch.tensor(2.5),
        "types the other way": 2.5 if rank == 1 else 0,
        "none yet": 0 if rank else torch.tensor([1, 2]),
        "shapes": torch.ones(2 + rank),
    }[unlike]
    with opened() as session:
        return session.pool_sum(values).tolist()


@pytest.mark.parametrize(("unlike", "total"), [("types", 2.5), ("types the other way", 2.5), ("none yet", [1, 2])])
def test_a_rank_that_saw_nothing_pools_its_plain_zero(ranks: GlooGroup, unlike: str, total: Any) -> None:
    assert ranks.run(pool_unlike, unlike) == [total] * 3


def test_shapes_that_have_no_sum_are_refused_on_every_rank(ranks: GlooGroup) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(pool_unlike, "shapes")
    assert all(r"rank 0: [2], rank 1: [3], rank 2: [4]" in (text or "") for text in caught.value.errors)
