"""What workers with two public kinds of card would report; neither is in the machine that runs the tests."""

from __future__ import annotations

import dataclasses

from rex_ray.worker.preflight.facts import WorkerFacts

V100 = WorkerFacts(
    host="a",
    kind="V100",
    device_type="cuda",
    device_name="Tesla V100-SXM2-16GB",
    memory_bytes=16 * 2**30,
    capability="7.0",
    driver="535.104.05",
    python="3.11.7",
    torch="2.6.0+cu124",
    cuda="12.4",
    nccl="2.21.5",
    rex_ray="0.1.0",
    bf16=False,
    fp16=True,
)
T4 = dataclasses.replace(V100, kind="T4", device_name="Tesla T4", memory_bytes=15 * 2**30, capability="7.5")
