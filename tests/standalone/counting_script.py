"""Started by torchrun: counts how often each row was trained on, and does what a test asks for on the way."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from row_counter import BATCH, SECONDS_PER_ROW, RowCounter, RowIds

from rex_ray import RexConfig
from rex_ray.standalone import training

LIMIT_S = 50.0  # below the ranks' own limit for one another


def servers() -> list[int]:
    """Return the control servers that this process has started and that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            is_server = b"rex_ray.standalone.server" in (path / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == os.getpid() and is_server:
            found.append(int(path.name))
    return found


def other_server(killed: int, journal: Path) -> int:
    """Wait for the next server, and for it to have gone on with the journal; return its process id."""
    deadline = time.monotonic() + LIMIT_S
    while (
        not (others := [pid for pid in servers() if pid != killed])
        or (journal / "events.jsonl").read_bytes().count(b'{"header":') < 2
    ):
        assert time.monotonic() < deadline, "the control server was not started again"
        time.sleep(0.05)
    return others[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-epochs", type=int, required=True)
    parser.add_argument("--kill-server-in-epoch", type=int)
    parser.add_argument("--kill-rank-1-at-step", type=int)
    parser.add_argument("--odd-seed-on-rank-1", action="store_true")
    asked = parser.parse_args()
    rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    config = RexConfig(
        global_batch_size=BATCH,
        max_global_batch_size=BATCH,
        seed=int(asked.odd_seed_on_rank_1 and rank == 1),
        checkpoint_interval_s=0.0,
        snapshot_interval_s=0.0,
        preflight=False,
    )
    told: dict[str, object] = {"servers": []}
    with training(config, output=asked.output) as session:
        model = RowCounter(SECONDS_PER_ROW[session.device_kind])
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=float(BATCH)))
        loader = session.loader(RowIds())
        first_step = session.step
        killed = None
        for epoch in session.epochs(asked.num_epochs):
            if rank == 0 and epoch == asked.kill_server_in_epoch:
                (killed,) = servers()
                os.kill(killed, signal.SIGKILL)
            for row_ids in loader:
                if rank == 1 and life == 0 and session.step == asked.kill_rank_1_at_step:
                    os.kill(os.getpid(), signal.SIGKILL)
                model(row_ids).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            counts = -session.unwrap(model).weight.detach()
            session.report({"fewest": float(counts.min()), "most": float(counts.max())})
            if killed is not None and epoch == asked.kill_server_in_epoch:
                told["servers"] = [killed, other_server(killed, asked.output / "rex_ray" / "journal")]
        assert session.allocation is not None
        told |= {
            "life": life,
            "first_step": first_step,
            "last_step": session.step,
            "shares": session.allocation.local_batch_sizes,
            "fewest": float(counts.min()),
            "most": float(counts.max()),
            "server_at_end": servers(),
        }
    if rank == 0:
        (asked.output / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
