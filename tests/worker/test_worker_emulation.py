from __future__ import annotations

import functools
import json
import pickle
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scripted import MemoryReporter
from torch import nn
from torch.utils.data import TensorDataset

from rex_ray.core.errors import ConfigError
from rex_ray.core.types import StepFlag, StepRecord
from rex_ray.scenario import Episode, NetworkModel, NoiseModel, load_profile
from rex_ray.worker.current import get_session
from rex_ray.worker.emulation import EmulationMeter, EmulationSpec, Emulator, emulated
from rex_ray.worker.link import NullLink
from rex_ray.worker.opening import open_session
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.step import StepInfo

SPEC = EmulationSpec(workload="resnet50", time_scale=0.2, network=NetworkModel(base_s=0.05))
DEVICES = ("T4", "V100")


class Recorder(NullLink):
    """Equal shares; keeps the records."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def send(self, records) -> None:
        self.records.extend(record for record in records if isinstance(record, StepRecord))


def small_loop(config) -> None:
    session = get_session()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = session.prepare(model, optimizer)
    data = TensorDataset(torch.randn(config["num_rows"], 4), torch.randn(config["num_rows"], 2))
    for inputs, targets in session.loader(data):
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(loop, *, device: str, num_rows: int, global_batch_size: int) -> list[StepRecord]:
    link = Recorder()
    options = WorkerOptions(global_batch_size=global_batch_size)
    with open_session(options=options, device=device, node="here", link=link, reporter=MemoryReporter()):
        loop({"num_rows": num_rows})
    return link.records


def own_s(record: StepRecord) -> float:
    return record.data_s + record.compute_s


def test_own_time_of_every_step_is_the_timelines_for_its_real_rows():
    spec = EmulationSpec(
        workload="resnet50",
        time_scale=0.1,
        noise=NoiseModel(sd=0.04),
        episodes=(Episode(rank=0, start_step=3, num_steps=4, factor=2.0),),
        network=NetworkModel(),
    )
    records = train(emulated(small_loop, spec), device="V100", num_rows=32 * 11 + 16, global_batch_size=32)
    timeline = spec.timeline("V100", 0)
    assert records[-1].num_rows == 16
    errors = [own_s(r) / timeline.own_time_s(r.step, r.num_rows) - 1 for r in records]
    assert min(errors) > -1e-3, "a step was shorter than its target"
    # A busy machine makes steps longer at its whim, so the upper bounds hold for the steps that it left alone.
    assert min(errors) < 0.05
    slow = min(own_s(r) for r in records if 3 <= r.step < 7)
    quick = min(own_s(r) for r in records[7:-1])
    assert slow / quick == pytest.approx(2.0, rel=0.2)


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    loop = pickle.loads(pickle.dumps(emulated(small_loop, SPEC)))
    records = train(loop, device=DEVICES[rank], num_rows=15 * 128, global_batch_size=128)
    times = [(own_s(r), r.sync_s, r.step_s) for r in records if not r.flags & StepFlag.WARM_UP]
    Path(folder, f"{rank}.json").write_text(json.dumps(times))
    dist.destroy_process_group()


@pytest.mark.dist
def test_each_rank_keeps_its_own_devices_time_and_the_step_the_slowest_ranks_plus_the_all_reduce(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(run_rank, args=(str(tmp_path),), nprocs=2)
    target = {rank: 0.2 * float(load_profile(DEVICES[rank], "resnet50").own_time_s(64)) for rank in (0, 1)}
    assert target[0] > 1.5 * target[1]
    for rank in (0, 1):
        own, sync, step = zip(*json.loads((tmp_path / f"{rank}.json").read_text()), strict=True)
        assert 0.999 * target[rank] < min(own) < 1.2 * target[rank]
        assert min(step) == pytest.approx(target[0] + 0.2 * 0.05, rel=0.25)
        assert min(sync) >= 0.2 * 0.05


def test_a_machine_that_is_too_slow_is_counted_and_told(caplog):
    spec = EmulationSpec(workload="resnet50", time_scale=1e-6)
    train(emulated(small_loop, spec), device="T4", num_rows=64, global_batch_size=8)
    assert "slower than its emulated T4 in 8 of 8 steps" in caplog.text


def test_meter_counts_overruns_and_never_sleeps_a_negative_time():
    meter = EmulationMeter()
    meter.sleep_until(time.perf_counter() - 0.25)
    assert (meter.num_steps, meter.num_overruns) == (1, 1)
    assert meter.overrun_s == pytest.approx(0.25, abs=0.05)
    meter.sleep_until(time.perf_counter() + 0.01)
    assert (meter.num_steps, meter.num_overruns) == (2, 1)
    assert 0 <= meter.worst_overshoot_s == meter.overshoot_s


def test_a_step_with_two_reductions_is_stretched_once():
    emulator = Emulator(SPEC.timeline("T4", 0), 0.0)
    now = time.perf_counter()
    for _ in range(2):
        emulator.last_gradient(StepInfo(step=5, num_rows=1, all_rows=(1,), began_s=now, data_s=0.0))
    assert emulator.meter.num_steps == 1


def test_the_emulated_loop_pickles():
    loop = pickle.loads(pickle.dumps(emulated(small_loop, SPEC)))
    assert isinstance(loop, functools.partial)


@pytest.mark.parametrize(
    ("spec", "devices", "words"),
    [
        (SPEC, ["T4", "V10"], "'V10'.*did you mean 'V100'"),
        (EmulationSpec(workload="resnet5"), ["T4"], "'resnet5'.*did you mean 'resnet50'"),
        (EmulationSpec(workload="resnet50", devices={"gpu-a": "A10"}), ["gpu-a"], "'A10'.*did you mean 'A100'"),
        (EmulationSpec(workload="resnet50", time_scale=0.0), ["T4"], "time_scale must be positive, got 0.0"),
    ],
)
def test_what_no_profile_answers_is_refused_before_training(spec, devices, words):
    with pytest.raises(ConfigError, match=words):
        spec.check(devices)


def test_labels_map_to_profiles_and_the_optimum_is_in_real_seconds():
    spec = EmulationSpec(workload="resnet50", devices={"small": "T4", "large": "V100"}, time_scale=0.5)
    spec.check(["small", "large"])
    plan = spec.optimum(["small", "small", "large", "large"], 256)
    assert sum(plan.local_batch_sizes) == 256
    small, _, large, _ = plan.local_batch_sizes
    slowest = max(spec.timeline("small", 0).quiet_time_s(small), spec.timeline("large", 0).quiet_time_s(large))
    assert plan.step_time_s == pytest.approx(slowest)
    assert spec.all_reduce_s(4) == 0.0
