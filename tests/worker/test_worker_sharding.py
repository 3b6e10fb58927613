"""FSDP2: a sharded model trains as one process would, its own times are told apart, and its saves are whole."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scripted import MemoryReporter, Rows, ScriptedLink, opened
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from rex_ray.core.errors import ConfigError, LinkError
from rex_ray.core.types import Allocation, StepFlag, StepRecord

pytestmark = pytest.mark.dist

SIZES = (3, 0, 9)
LATER = Allocation(version=1, local_batch_sizes=(8, 3, 1), lr_factor=1.5)
NUM_ROWS = 53
CLIP = 0.4


def network() -> nn.Sequential:
    """The same network on every call; 7 features divide over neither two nor three ranks."""
    torch.manual_seed(3)
    body = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh())
    return nn.Sequential(body, nn.Linear(7, 1)).double()


def sharded(model: nn.Sequential, over: Any = None) -> nn.Sequential:
    from torch.distributed.fsdp import fully_shard

    for module in (model[0], model):
        fully_shard(module, mesh=over or mesh())
    return model


def mesh() -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def train(rank: int, num_epochs: int, restored: Any = None) -> tuple[dict[str, torch.Tensor], Any, list[StepRecord]]:
    """Unequal shares and a share of none, a switch with another rate, micro-batches on one rank, clipping, Adam."""
    link = ScriptedLink(SIZES, {2: LATER}) if restored is None else ScriptedLink()
    reporter = MemoryReporter(restored)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"norm_interval_steps": 1, "checkpoint_interval_s": 0.0, "control_interval_steps": 1}
        with opened(link, reporter, **options) as session:
            model = sharded(network())
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            net, optimizer = session.prepare(model, optimizer)
            loader = session.loader(Rows(NUM_ROWS))
            for epoch in session.epochs(num_epochs):
                for batch in loader:
                    for _, inputs, targets in session.micro_batches(batch, 1 + (epoch > 0) * rank):
                        session.backward(F.mse_loss(net(inputs), targets))
                    nn.utils.clip_grad_norm_(net.parameters(), CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
                session.report({})
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return whole, reporter.saves[-1][1], link.steps


def alone(num_epochs: int, rates: list[float]) -> dict[str, torch.Tensor]:
    """One process with every step's rows; ``rates`` are the allocation's factors by step."""
    from rex_ray.worker.data.sampler import batch_rows, epoch_order

    model, data, step = network(), Rows(NUM_ROWS), 0
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(num_epochs):
        order, cursor = epoch_order(0, epoch, NUM_ROWS), 0
        while cursor < NUM_ROWS:
            rows = order[cursor : cursor + batch_rows(NUM_ROWS - cursor, 12, 3)]
            F.mse_loss(model(data.inputs[rows]), data.targets[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.param_groups[0]["lr"] = 0.01 * rates[step]
            optimizer.step()
            optimizer.zero_grad()
            cursor, step = cursor + len(rows), step + 1
    return dict(model.state_dict())


def farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_a_sharded_model_trains_as_one_process_and_resumes_on_fewer_ranks(ranks: GlooGroup, pair: GlooGroup) -> None:
    results = ranks.run(train, 2)
    records = results[0][2]
    rates = [1.5 if record.allocation_version else 1.0 for record in records]
    assert {1.0, 1.5} == set(rates[:5]), "the shares are switched within the first epoch"
    reference = alone(2, rates)
    for whole, _, _ in results:
        assert farthest(whole, reference) < 1e-10
    assert all(record.weighted_sq_norm is None for record in records), "norms of shards are not taken"
    first_epoch = ranks.run(train, 1)[0][1]
    resumed = pair.run(train, 2, first_epoch)
    # The later epoch's shares are equal ones of the saved batch: other weights, the same sum.
    assert farthest(resumed[0][0], reference) < 1e-10
    plain = network()
    plain.load_state_dict(first_epoch["model"])


def evaluate_few_rows(rank: int) -> tuple[float, int, list[float]]:
    """Four rows in batches of one over three ranks: one rank has a batch more. And running statistics are agreed on."""
    with opened(ScriptedLink(SIZES)) as session:
        body = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 1)).double()
        model = sharded(nn.Sequential(body, nn.Identity()))
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for _, inputs, targets in session.loader(Rows(24)):
            F.mse_loss(net(inputs), targets).backward()
            optimizer.step()
        statistics = body[1].running_mean.tolist()
        net.eval()
        data, total, count, num_batches = Rows(4), torch.zeros(()), 0, 0
        with torch.no_grad():
            for _, inputs, targets in session.eval_loader(data, local_batch_size=1):
                total = total + F.mse_loss(session.unwrap(net)(inputs), targets, reduction="sum")
                count, num_batches = count + len(targets), num_batches + 1
        pooled = session.pool(total, count)
        whole = nn.Sequential(nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 1)).double())
        state: Any = model.state_dict()
        whole.load_state_dict({name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in state.items()})
        whole.eval()
        alone = F.mse_loss(whole(data.inputs), data.targets).item()
    return pooled - alone, num_batches, statistics


def test_a_sharded_model_is_evaluated_by_all_ranks_in_step(ranks: GlooGroup) -> None:
    results = ranks.run(evaluate_few_rows)
    for error, num_batches, statistics in results:
        assert abs(error) < 1e-6
        assert num_batches == 2
        assert statistics == results[0][2]


def stay_away(rank: int) -> tuple[str, float]:
    """Rank 1 does not call the model, and waits for nobody. In a group of its own: what breaks is of no further use."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    elder = sharded(network())  # over a mesh that torch takes for the same
    with opened(ScriptedLink((4, 4, 4)), collective_timeout_s=2.0) as session:
        model = sharded(network(), DeviceMesh.from_group(dist.new_group(), "cpu"))
        net, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _, inputs, targets in session.loader(Rows(12)):
            began_s = time.monotonic()
            try:
                if rank == 1:
                    time.sleep(4.0)
                    break
                F.mse_loss(net(inputs), targets).backward()
            except LinkError as error:
                return str(error), time.monotonic() - began_s
    del elder
    return "", 0.0


def test_whoever_stays_away_from_a_sharded_pass_is_waited_for_within_the_limit_and_named(ranks: GlooGroup) -> None:
    results = ranks.run(stay_away)
    for rank in (0, 2):
        message, waited_s = results[rank]
        assert f"rank {rank} waited" in message
        assert "for the sharded parameters of step 0 (limit 2 s): rank 1 is alive" in message
        assert 1.5 < waited_s < 15.0, "at the limit, and not at the group's own of 20 s"


def be_refused(rank: int) -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def half(model: nn.Sequential) -> nn.Module:
        fully_shard(model[0], mesh=mesh())
        return model

    def ignoring(model: nn.Sequential) -> nn.Module:
        return fully_shard(model, mesh=mesh(), ignored_params={model[1].weight})

    def elder(model: nn.Sequential) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))

    messages = []
    for wrap in (half, ignoring, elder):
        with opened() as session:
            model = wrap(network())
            try:
                session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            except ConfigError as error:
                messages.append(str(error))
    with opened() as session:
        model = sharded(network())
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in session.loader(Rows(12)):
            for refused in (
                session.accumulate().__enter__,
                lambda: session.register_comm_hook(None, bf16_compress_hook),
            ):
                try:
                    refused()
                except ConfigError as error:
                    messages.append(str(error))
            break
    return messages


def test_what_would_leave_gradients_local_or_ranks_waiting_is_refused_by_name(ranks: GlooGroup) -> None:
    for messages in ranks.run(be_refused):
        half, ignoring, elder, accumulate, hook = messages
        assert "call fully_shard(model) after fully_shard of its parts" in half
        assert "'1.weight' of the sharded model is in no shard" in ignoring
        assert "FSDP1" in elder
        assert "session.micro_batches" in accumulate
        assert "reduce_dtype" in hook


def train_without_places_to_wrap(rank: int) -> tuple[list[StepFlag], list[str]]:
    """Another version of torch: what FSDP's waits are called is not known."""
    from rex_ray.worker.model import sharding

    known, sharding._WAITS = sharding._WAITS, {"another_name": "parameters"}
    try:
        with (
            warnings.catch_warnings(record=True) as caught,
            opened(link := ScriptedLink(SIZES), warm_up_steps=0) as session,
        ):
            warnings.simplefilter("always")
            model = sharded(network())
            net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for _, inputs, targets in session.loader(Rows(36)):
                F.mse_loss(net(inputs), targets).backward()
                optimizer.step()
            session.finish()
    finally:
        sharding._WAITS = known
    return [record.flags for record in link.steps], [str(warning.message) for warning in caught]


def test_where_waits_cannot_be_told_from_own_time_no_step_is_evidence(ranks: GlooGroup) -> None:
    for flags, told in ranks.run(train_without_places_to_wrap):
        assert flags
        assert all(StepFlag.WARM_UP in flag for flag in flags)
        assert any("shares stay as they are" in message for message in told)


def one_rank_sleeps(rank: int) -> list[tuple[float, float, StepFlag]]:
    """Rank 1 takes its time in each forward pass, where the others wait for its part of the parameters."""

    class Sleeper(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            time.sleep(0.15 * (rank == 1))
            return super().forward(inputs)

    with opened(link := ScriptedLink((4, 4, 4)), warm_up_steps=0, settle_steps=0) as session:
        torch.manual_seed(0)
        model = sharded(nn.Sequential(Sleeper(6, 7), nn.Linear(7, 1)).double())
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _, inputs, targets in session.loader(Rows(36)):
            F.mse_loss(net(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.finish()
    return [(record.compute_s, record.step_s, record.flags) for record in link.steps]


def test_waits_inside_a_sharded_models_passes_are_no_own_time(ranks: GlooGroup) -> None:
    steps = ranks.run(one_rank_sleeps)
    for rank, records in enumerate(steps):
        for own_s, step_s, _ in records[1:]:
            assert step_s > 0.14, "everyone takes as long as the slowest"
            assert own_s > 0.14 if rank == 1 else own_s < 0.5 * step_s
    assert StepFlag.NONE in [flags for _, _, flags in steps[0]], "they are evidence"
