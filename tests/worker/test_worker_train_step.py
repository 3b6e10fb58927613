"""``session.train_step``: a whole step, exact, also where memory runs out in the middle of it while others wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scarce_memory import check, narrow_net, scarce_part
from scripted import MemoryReporter, Rows, ScriptedLink, opened, two_layers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rex_ray.core.errors import ConfigError, MemoryExhaustedError
from rex_ray.core.types import StepFlag
from rex_ray.worker.link import IncidentRecord, KindLimit
from rex_ray.worker.session import Session

Batch = Any

SHARES = (8, 50, 14)
BATCH = sum(SHARES)
NUM_ROWS = 5 * BATCH - 20  # the last step is a partial one
ROWS_THAT_FIT = (20, 20, 9, 2**40, 4)
"""On rank 1, step by step."""


def all_rows(session: Session, ids: torch.Tensor) -> torch.Tensor:
    """Return the ids that all ranks together hold."""
    seen = torch.zeros(NUM_ROWS, dtype=torch.int64)
    seen[ids] += 1
    return session.pool_sum(seen).nonzero().reshape(-1)


def mean_loss(model: nn.Module, rows: Batch) -> torch.Tensor:
    return F.mse_loss(model(rows[1]), rows[2])


def penalised_loss(model: nn.Module, rows: Batch) -> torch.Tensor:
    return mean_loss(model, rows) + 0.01 * sum(p.square().sum() for p in model.parameters())


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def incidents(link: ScriptedLink) -> list[IncidentRecord]:
    return [record for record in link.records if isinstance(record, IncidentRecord)]


def flagged(link: ScriptedLink) -> list[int]:
    """Steps whose times are no evidence, beside the first ones."""
    return [record.step for record in link.steps if StepFlag.WARM_UP in record.flags and record.step >= 2]


WRAPPINGS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "the session's own DDP": lambda net: net,
    "many buckets": lambda net: DistributedDataParallel(
        net, bucket_cap_mb=1e-5, gradient_as_bucket_view=True, broadcast_buffers=False
    ),
    "buffers broadcast, gradients copied": lambda net: DistributedDataParallel(net, bucket_cap_mb=1e-5),
}


def train_short_of_memory(
    rank: int, where: str, wrapping: str
) -> tuple[float, float, list[IncidentRecord], list[int], int | None]:
    """Train beside one process that holds all rows, with rank 1 short of memory.

    Returns how far weights and losses are off, what was told, which steps are no evidence, and the limit learnt.
    """
    data, link, worst_loss = Rows(NUM_ROWS), ScriptedLink(SHARES), 0.0
    net, alone = narrow_net(where), narrow_net("nowhere")
    net.register_buffer("counter", torch.zeros(1, dtype=torch.float64))
    part, own_optimizer = scarce_part(net), torch.optim.SGD(alone.parameters(), lr=0.1)

    def loss_of(model: nn.Module, rows: Batch) -> torch.Tensor:
        if where == "before the model":
            check(len(rows[1]), part.most_rows)
        output = model(rows[1])
        if where == "loss":
            check(len(output), part.most_rows)
        return F.mse_loss(output, rows[2])

    with opened(link, global_batch_size=BATCH, warm_up_steps=1) as session:
        session.prepare(WRAPPINGS[wrapping](net), torch.optim.SGD(net.parameters(), lr=0.1))
        for step, batch in enumerate(session.loader(data)):
            part.most_rows = ROWS_THAT_FIT[step] if rank == 1 else 2**40
            rows, expected = all_rows(session, batch[0]), float(mean_loss(alone, batch).detach())
            worst_loss = max(worst_loss, abs(float(session.train_step(batch, loss_of)) - expected))
            assert all(p.grad is None for p in net.parameters())
            mean_loss(alone, (rows, data.inputs[rows], data.targets[rows])).backward()
            own_optimizer.step()
            own_optimizer.zero_grad()
        assert session.step == 5
        limit = session._parts.limits.passes.most
    return float((flat(net) - flat(alone)).abs().max()), worst_loss, incidents(link), flagged(link), limit


@pytest.mark.dist
@pytest.mark.parametrize(
    ("where", "wrapping"),
    [
        ("before the model", "buffers broadcast, gradients copied"),
        ("forward", "buffers broadcast, gradients copied"),
        ("forward", "the session's own DDP"),
        ("loss", "many buckets"),
        *(("backward", wrapping) for wrapping in WRAPPINGS),
    ],
)
def test_d9_memory_that_runs_out_in_place_is_retried_exactly_while_the_others_wait(
    ranks: GlooGroup, where: str, wrapping: str
) -> None:
    results = ranks.run(train_short_of_memory, where, wrapping, limit_s=40.0)
    for rank, (weights_off, loss_off, told, no_evidence, limit) in enumerate(results):
        assert weights_off < 1e-10
        assert loss_off < 1e-10
        if rank != 1:
            assert (told, limit) == ([], None)
            continue
        assert limit is not None
        assert limit <= 4
        assert [incident.step for incident in told] == [0, 2, 4]
        assert {incident.kind for incident in told} == {"out_of_memory"}
        assert no_evidence == [2, 4]
        assert "in a pass of 50 rows" in told[0].message
        assert all(incident.limits is None for incident in told), "shares need no limit where passes have one"


def train_with_options(rank: int, option: str) -> float:
    """How far two steps with an option are from one process that has it too; rank 1's memory ends in backward."""
    data, torch_options = Rows(2 * BATCH), {"lr": 0.1}
    shares = (0, 50, 22) if option == "a rank without rows" else SHARES
    net, alone = narrow_net("backward", 20 if rank == 1 else 2**40), narrow_net("nowhere")
    loss = penalised_loss if option == "penalty" else mean_loss
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if option == "scaler" else None
    norm = 0.05 if option in ("clipping", "scaler") else None
    for model in (net, alone):
        if option == "frozen":
            model[0].requires_grad_(False)
        if option == "hook":
            model[0].weight.register_hook(lambda gradient: 3.0 * gradient)
    own_optimizer = torch.optim.SGD(alone.parameters(), **torch_options)
    with opened(ScriptedLink(shares), global_batch_size=BATCH) as session:
        session.prepare(net, torch.optim.SGD(net.parameters(), **torch_options), scaler=scaler)
        for batch in session.loader(data):
            rows = torch.zeros(2 * BATCH, dtype=torch.int64)
            rows[batch[0]] += 1
            rows = session.pool_sum(rows).nonzero().reshape(-1)
            assert session.train_step(batch, loss, max_grad_norm=norm).isnan() == (not len(batch[0]))
            loss(alone, (rows, data.inputs[rows], data.targets[rows])).backward()
            if norm is not None:
                assert nn.utils.clip_grad_norm_(alone.parameters(), norm) > norm
            own_optimizer.step()
            own_optimizer.zero_grad()
    return float((flat(net) - flat(alone)).abs().max())


@pytest.mark.dist
@pytest.mark.parametrize("option", ["penalty", "clipping", "scaler", "frozen", "hook", "a rank without rows"])
def test_d9_a_retried_step_keeps_what_else_a_step_has(ranks: GlooGroup, option: str) -> None:
    assert max(ranks.run(train_with_options, option)) < 1e-10


def token_gradients(rank: int, most_rows: int) -> float:
    """Rows of 0 to 5 tokens, the loss a mean over tokens; how far a step is from the mean over all ranks' tokens."""
    data = Rows(BATCH)
    counts = (data.inputs[:, 0] * 100).long().abs() % 6
    counts[:40] = 0  # so that whole passes have none

    def token_loss(model: nn.Module, rows: Batch) -> torch.Tensor:
        weights = counts[rows[0]].double()
        return ((model(rows[1]) - rows[2]).square().reshape(-1) * weights).sum() / weights.sum()

    net, alone = narrow_net("backward", most_rows), narrow_net("nowhere")
    options = {"global_batch_size": BATCH, "weight_by": "tokens", "seed": 5}
    with opened(ScriptedLink(SHARES), **options) as session:
        session.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
        for batch in session.loader(data):
            session.train_step(batch, token_loss, weight=lambda rows: int(counts[rows[0]].sum()))
    optimizer = torch.optim.SGD(alone.parameters(), lr=1.0)
    token_loss(alone, (torch.arange(BATCH), data.inputs, data.targets)).backward()
    optimizer.step()
    return float((flat(net) - flat(alone)).abs().max())


@pytest.mark.dist
def test_token_weights_are_exact_in_passes_some_of_which_have_no_token(ranks: GlooGroup) -> None:
    for most_rows in (2**40, 3):
        assert max(ranks.run(token_gradients, most_rows)) < 1e-10


def normalise_and_drop(rank: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Batch normalisation and dropout, rank 1 short of memory; weights of two equal runs, and whether all is sound."""
    runs = []
    for _ in range(2):
        net = narrow_net("backward", 20 if rank == 1 else 2**40, normalise=True, dropout=0.3)
        torch.manual_seed(rank)
        with opened(ScriptedLink((8, 41, 2)), global_batch_size=51) as session:
            session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            for batch in session.loader(Rows(153)):
                session.train_step(batch, mean_loss)
        assert min(scarce_part(net).rows_seen) >= 2
        runs.append(flat(net))
    sound = net.training and all(bool(value.isfinite().all()) for value in net.state_dict().values())
    return runs[0], runs[1], sound


@pytest.mark.dist
def test_normalised_and_dropped_rows_are_cut_reproducibly_and_never_to_a_single_one(ranks: GlooGroup) -> None:
    results = ranks.run(normalise_and_drop)
    for once, again, sound in results:
        assert sound
        assert torch.equal(once, again)
        assert torch.equal(once, results[0][0]), "replicas are alike"


def fall_short_everywhere(rank: int, options: dict[str, bool]) -> str:
    """Every rank runs out of memory within the reduction of a DDP that cannot be gone on with."""
    net = narrow_net("backward", 4)
    with opened(ScriptedLink(SHARES), global_batch_size=BATCH) as session:
        session.prepare(DistributedDataParallel(net, **options), torch.optim.SGD(net.parameters(), lr=0.1))
        for batch in session.loader(Rows(BATCH)):
            with pytest.raises(MemoryExhaustedError) as caught:
                session.train_step(batch, mean_loss)
            session._tracker.in_hand = None
            return str(caught.value)
    return ""


@pytest.mark.dist
def test_what_ddp_could_not_go_on_with_is_refused_at_once(ranks: GlooGroup) -> None:
    for option in ("find_unused_parameters", "static_graph"):
        for text in ranks.run(fall_short_everywhere, {option: True}):
            assert f"{option} has DDP count" in text


# --- on one rank


def test_a_lone_worker_retries_and_its_step_is_the_one_that_was_cut_from_the_start() -> None:
    weights = []
    for most_rows, known in ((2**40, 9), (9, None)):
        net, link = narrow_net("backward", most_rows, dropout=0.4), ScriptedLink((32,))
        torch.manual_seed(1)
        with opened(link, global_batch_size=32) as session:
            session.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
            session._parts.limits.passes.most = known and 8
            for batch in session.loader(Rows(96)):
                session.train_step(batch, mean_loss)
        weights.append(flat(net))
    assert torch.equal(*weights), "random numbers are drawn as if nothing had failed"
    assert [incident.step for incident in incidents(link)] == [0], "and it is learnt once"


def test_norms_of_passes_are_those_of_micro_batches() -> None:
    records = []
    for cut_by in ("micro_batches", "train_step"):
        net, link = two_layers(), ScriptedLink((24,))
        with opened(link, global_batch_size=24, norm_interval_steps=1) as session:
            prepared, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            session._parts.limits.passes.most = 6
            for batch in session.loader(Rows(72)):
                if cut_by == "train_step":
                    session.train_step(batch, mean_loss)
                    continue
                for rows in session.micro_batches(batch, 4):
                    session.backward(mean_loss(prepared, rows))
                optimizer.step()
                optimizer.zero_grad()
        records.append([(r.num_groups, r.weighted_sq_norm, r.global_sq_norm, r.loss) for r in link.steps])
    ours, known = records
    assert len(ours) == 3
    assert ours[0][0] == 4
    for mine, theirs in zip(ours, known, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-10)


def test_a_limit_is_saved_and_begun_with_on_the_same_kind_of_device_only() -> None:
    reporter, net = MemoryReporter(), narrow_net("backward", 9)
    with opened(reporter=reporter, global_batch_size=32, checkpoint_interval_s=0.0) as session:
        session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for batch in session.loader(Rows(32)):
            session.train_step(batch, mean_loss)
        session.report({})
    saved = {**reporter.saves[-1][1], "registered": {}}
    assert saved["memory"] == {"pass_rows": {"test": 8}, "pass_fails_at": {"test": 16}, "share_rows": {}}
    saved["memory"]["share_rows"] = {"test": 12, "other": 3}
    link = ScriptedLink()
    with opened(link, MemoryReporter(saved), global_batch_size=8) as session:
        resumed = narrow_net("nowhere")
        session.prepare(resumed, torch.optim.SGD(resumed.parameters(), lr=0.1))
        with pytest.warns(UserWarning, match="differs from the 32 rows"):
            session.loader(Rows(32))
        assert (session._parts.limits.passes.most, session._parts.limits.passes.fails_at) == (8, 16)
    assert link.group is not None
    assert link.group.workers[0].max_local_batch_size == 12
    saved["memory"] = {"pass_rows": {"other": 8}}
    with opened(reporter=MemoryReporter(saved), global_batch_size=8) as session:
        assert session._parts.limits.passes.most is None


def test_a_share_that_cannot_be_cut_or_must_not_be_is_refused_with_a_reason() -> None:
    def scarce(model: nn.Module, rows: Batch) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

    def refusal(model: nn.Module, error: type[Exception], **options: Any) -> str:
        with opened(global_batch_size=8, **options) as session:
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in session.loader(Rows(8)):
                with pytest.raises(error) as caught:
                    session.train_step(batch, scarce)
                session._tracker.left_loop()
                return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        return ""

    assert "a pass of 1 rows, which cannot be cut any smaller" in refusal(two_layers(), MemoryExhaustedError)
    synchronised = nn.Sequential(two_layers(), nn.SyncBatchNorm(1))
    assert "SyncBatchNorm has every forward pass wait" in refusal(synchronised, MemoryExhaustedError)
    stopped = refusal(two_layers(), torch.OutOfMemoryError, on_out_of_memory="stop")
    assert "8 rows; not tried again, since on_out_of_memory='stop'" in stopped


def test_an_error_that_is_none_of_memory_passes_as_it_is() -> None:
    def broken(model: nn.Module, rows: Batch) -> torch.Tensor:
        raise ArithmeticError("the loop's own fault")

    link = ScriptedLink()
    net = two_layers()
    with opened(link, global_batch_size=8) as session:
        session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for batch in session.loader(Rows(8)):
            with pytest.raises(ArithmeticError, match="the loop's own fault"):
                session.train_step(batch, broken)
            session._tracker.left_loop()
            break
    assert incidents(link) == []


@pytest.mark.parametrize("policy", ["retry", "stop"])
def test_d9_a_plain_loop_that_runs_out_of_memory_tells_its_share_before_it_ends(policy: str) -> None:
    link = ScriptedLink()
    net = narrow_net("backward", 5)

    def loop() -> None:
        with opened(link, global_batch_size=8, on_out_of_memory=policy) as session:
            prepared, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            for batch in session.loader(Rows(8)):
                mean_loss(prepared, batch).backward()

    with pytest.raises(torch.OutOfMemoryError):
        loop()
    told = [incident.limits for incident in incidents(link)]
    assert told == ([KindLimit(device="test", num_rows=8)] if policy == "retry" else [])


def test_memory_that_runs_out_between_steps_says_nothing_of_shares() -> None:
    link, net = ScriptedLink(), two_layers()

    def loop() -> None:
        with opened(link, global_batch_size=8) as session:
            session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            for batch in session.loader(Rows(16)):
                session.train_step(batch, mean_loss)
            raise torch.OutOfMemoryError("while evaluating")

    with pytest.raises(torch.OutOfMemoryError):
        loop()
    assert incidents(link) == []


def test_what_no_step_can_be_made_of_is_refused() -> None:
    net = two_layers()
    with opened(global_batch_size=8) as session:
        with pytest.raises(ConfigError, match="prepare"):
            session.train_step(None, mean_loss)
        prepared, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for batch in session.loader(Rows(8)):
            with pytest.raises(ConfigError, match=r"max_grad_norm must be a norm such as 1\.0"):
                session.train_step(batch, mean_loss, max_grad_norm=0.0)
            with pytest.raises(ConfigError, match="give a function that counts the tokens"):
                session.train_step(batch, mean_loss, weight=3)  # type: ignore[arg-type]
            mean_loss(prepared, batch).backward()
            with pytest.raises(ConfigError, match="there are gradients already"):
                session.train_step(batch, mean_loss)
            optimizer.step()
