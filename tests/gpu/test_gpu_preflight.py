"""What a worker with a CUDA device reports of itself, and the look over NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_group import GlooGroup
from scripted import MemoryReporter, ScriptedLink, two_layers

from rex_ray.worker.link import IncidentRecord
from rex_ray.worker.opening import open_session
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.preflight.facts import collect

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
]


def test_a_card_reports_driver_capability_and_nccl() -> None:
    found = collect("card", torch.device("cuda"))
    major, minor = torch.cuda.get_device_capability()
    assert found.capability == f"{major}.{minor}"
    assert found.bf16 == (major >= 8)
    assert found.fp16
    assert (found.nccl or "").count(".") == 2
    assert (found.driver or "0").split(".")[0].isdecimal()
    assert (found.memory_bytes or 0) > 2**30


def looked(rank: int) -> tuple[list[str], str]:
    link, device = ScriptedLink((4,)), torch.device("cuda")
    options = WorkerOptions(global_batch_size=4, preflight_timeout_s=30.0)
    with open_session(
        options=options, device="card", node="here", link=link, reporter=MemoryReporter(), torch_device=device
    ) as session:
        model = two_layers().float()
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with session.autocast():
            dtype = str(model(torch.ones(2, 6, device=device)).dtype)
    return [record.message for record in link.records if isinstance(record, IncidentRecord)], dtype


def test_the_look_reduces_over_nccl_and_autocast_is_native() -> None:
    group: Any = GlooGroup(1, backend="nccl")
    try:
        ((told, dtype),) = group.run(looked, limit_s=60.0)
    finally:
        group.stop()
    assert "an all-reduce of 4 MiB took" in told[0]
    assert dtype == ("torch.bfloat16" if torch.cuda.get_device_capability()[0] >= 8 else "torch.float16")
