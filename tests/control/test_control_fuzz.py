"""Whatever a group sends, the controller of rex neither fails nor remembers what is not finite, and asks only for what
can be run. Everything that reaches it passed the assembler: whole steps of finite numbers, of any size."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rex_ray.control.commands import ApplyAllocation, StartSearch
from rex_ray.control.controller import Controller
from rex_ray.control.events import (
    Event,
    GroupStarted,
    SearchFailed,
    SearchFinished,
    StepObserved,
    TelemetryGap,
    Ticked,
    TrialProposed,
)
from rex_ray.control.notes import Refused
from rex_ray.control.vocabulary import CODEC
from rex_ray.core.apportion import rows_per_rank
from rex_ray.core.types import Problem, StepFlag, WorkerSpec, read_only
from rex_ray.policies.registry import make_policy

FLAGS = [StepFlag.NONE] * 20 + [StepFlag.WARM_UP, StepFlag.SKIPPED, StepFlag.AFTER_GAP, StepFlag.PARTIAL]
PARTS = ("growth", "split", "trigger", "search")


class Mischief:
    """A group that runs what it is told, at speeds and with gradients out of a bad dream."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        n = int(rng.choice([1, 2, 3, 4, 8]))
        most = [None if rng.random() < 0.5 else int(rng.integers(30, 400)) for _ in range(n)]
        rows = int(rng.integers(n, 25 * n))
        workers = tuple(
            WorkerSpec(
                rank=rank,
                device=str(rng.choice(["T4", "V100"])),
                min_local_batch_size=int(rng.integers(0, 3)),
                max_local_batch_size=most[rank],
                memory_bytes=None if rng.random() < 0.5 else 16 * 2**30,
            )
            for rank in range(n)
        )
        optimizer = "sgd" if rng.random() < 0.5 else "adam"
        self.problem = Problem(
            workers=workers,
            global_batch_size=rows,
            max_global_batch_size=8 * rows,
            dataset_size=100 * rows,
            optimizer=optimizer,
        )
        self.base_s, self.scale = rng.uniform(0.01, 0.05, n), np.ones(n)
        self.step, self.now_us = 0, 0
        self.allocation = self.pending = None
        self.searches: list[tuple[int, StartSearch]] = []

    def obey(self, commands) -> None:
        for command in commands:
            if isinstance(command, ApplyAllocation):
                if self.allocation is None:
                    self.allocation = command.allocation
                self.pending = (self.step + int(self.rng.integers(1, 12)), command.allocation)
            elif isinstance(command, StartSearch):
                self.searches.append((self.step + int(self.rng.integers(1, 30)), command))

    def events(self) -> list[Event]:
        if self.pending is not None and self.step >= self.pending[0]:
            self.allocation, self.pending = self.pending[1], None
        due = [item for item in self.searches if self.step >= item[0]]
        self.searches = [item for item in self.searches if self.step < item[0]]
        events = [self.observed(), *(self.answer(command) for _, command in due)]
        self.step += 1
        self.now_us += int(self.rng.integers(0, 300_000))
        if self.rng.random() < 0.3:
            events.append(Ticked(now_us=self.now_us))
        if self.rng.random() < 0.01:
            events.append(TelemetryGap(generation="g", last_step=self.step - 1, waited_us=10**7))
        return events

    def observed(self) -> StepObserved:
        rng, shares = self.rng, self.allocation.local_batch_sizes
        flags = FLAGS[int(rng.integers(len(FLAGS)))]
        rows = np.array(shares)
        if flags & StepFlag.PARTIAL:
            rows = np.array(rows_per_rank(max(1, int(sum(shares) * rng.random())), shares))
        own_us = self.own_us(rows)
        data_us = (own_us * rng.random()).astype(np.int64)
        loss = None if rng.random() < 0.1 else float(rng.choice([1.0, 1.1, 0.9, 50.0, 1e30]))
        return StepObserved(
            generation="g",
            epoch=self.step // 100,
            step=self.step,
            allocation_version=self.allocation.version,
            num_rows=read_only(rows, np.int64),
            data_us=read_only(data_us, np.int64),
            compute_us=read_only(own_us - data_us, np.int64),
            sync_us=read_only(own_us.max() - own_us, np.int64),
            step_us=read_only(np.full_like(own_us, own_us.max()), np.int64),
            flags=flags,
            loss=loss,
            peak_memory_bytes=read_only(np.where(rng.random(rows.size) < 0.1, -1, 10**9 + 2 * 10**7 * rows), np.int64),
            **(self.norms(rows) if rng.random() < 0.5 else {}),
        )

    def own_us(self, rows):
        rng = self.rng
        if rng.random() < 0.02:
            self.scale = np.exp(rng.normal(0, 0.7, rows.size) * (rng.random(rows.size) < 0.4))
        own_s = self.base_s * self.scale * (1 + 0.05 * rows) * np.exp(0.04 * rng.standard_normal(rows.size))
        whole = rng.random()
        if whole < 0.03:
            own_s = own_s * (0.0 if whole < 0.01 else 10 ** rng.uniform(-8, 8))
        return np.rint(own_s * 1e6).astype(np.int64)

    def norms(self, rows) -> dict[str, object]:
        noise = self.rng.chisquare(5, rows.size) / 5 * 10 ** self.rng.uniform(0, 4)
        weighted, reduced = noise + rows, 1.0 + float(noise.mean()) / rows.sum()
        size = float(self.rng.choice([1.0] * 20 + [0.0, 1e-300, 1e300]))
        lie = float(self.rng.choice([1.0] * 20 + [1e6]))
        return {
            "weighted_sq_norm": read_only(weighted * size, np.float64),
            "num_groups": read_only(rows > 0, np.int64),
            "global_sq_norm": float(min(reduced * size * lie, 1e308)),
        }

    def answer(self, search: StartSearch) -> Event:
        shares, n = list(search.problem.plan), self.problem.num_workers
        for _ in range(3):
            giver, taker, some = (*self.rng.integers(0, n, 2), int(self.rng.integers(0, 5)))
            shares[giver], shares[taker] = shares[giver] - some, shares[taker] + some
        sizes = tuple(int(share) for share in shares)
        kind = self.rng.random()
        if kind < 0.3:
            return SearchFailed(search_id=search.search_id, reason="a bad day")
        if kind < 0.6:
            return SearchFinished(search_id=search.search_id, local_batch_sizes=sizes, objective=float(-kind))
        self.searches.append((self.step + 25, search))
        return TrialProposed(search_id=search.search_id, trial=int(self.rng.integers(4)), local_batch_sizes=sizes)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_group_sends_rex_goes_on(seed):
    modes = np.random.default_rng((seed, 1)).choice(["auto", "auto", "auto", "advise", "off"], len(PARTS))
    controller = Controller(make_policy("rex", dict(zip(PARTS, modes.tolist(), strict=True))), seed=seed)
    group = Mischief(seed)
    group.obey(controller.handle(GroupStarted(generation="g", problem=group.problem)))
    for _ in range(250):
        for event in group.events():
            group.obey(controller.handle(event))
    assert not [note for note in controller.take_notes() if isinstance(note, Refused)]
    written = json.dumps(CODEC.encode(controller.state), allow_nan=False)
    assert '"float"' not in written, "a number that is not finite"
    assert json.dumps(CODEC.encode(CODEC.decode(json.loads(written)))) == written
