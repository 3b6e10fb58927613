"""A loop over a shard of Ray Data that counts, over all workers, how often each row came."""

from __future__ import annotations

import time
from typing import Any

import ray.train
import torch
from torch import nn

from rex_ray import get_session

ROWS = 640
SECONDS_PER_ROW = {"T4": 0.003, "V100": 0.001}


def counting_shard_loop(config: dict[str, Any]) -> None:
    session = get_session()
    model = nn.Linear(1, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    loader = session.loader(ray.train.get_dataset_shard("train"))
    for _ in session.epochs(config["num_epochs"]):
        counts, own = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(session.world_size, dtype=torch.int64)
        for batch in loader:
            ids = batch["id"]
            time.sleep(SECONDS_PER_ROW[session.device_kind] * len(ids))
            model(ids.float().unsqueeze(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts += torch.bincount(ids, minlength=ROWS)
            own[session.rank] += len(ids)
        everyones, evaluated = session.pool_sum(counts), torch.zeros(ROWS, dtype=torch.int64)
        for batch in session.eval_loader(ray.train.get_dataset_shard("valid"), local_batch_size=50):
            evaluated += torch.bincount(batch["id"], minlength=ROWS)
        evaluated = session.pool_sum(evaluated)
        slow_rows = own if session.device_kind == "T4" else torch.zeros_like(own)
        session.report(
            {
                "fewest": int(everyones.min()),
                "most": int(everyones.max()),
                "evaluated_once": int((evaluated == 1).all()),
                "slow_rows": int(session.pool_sum(slow_rows).sum()),
            }
        )
