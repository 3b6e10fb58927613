"""How many rows a kind of device may be given, learnt from workers that ran out of memory.

What ``core.memory`` foresees from peaks is a doubt; this is a fact that cost a restart, so the group must not meet it
again: the limit falls at once to what is known to run, or by half, and never rises within a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rex_ray.core.types import Problem, WorkerSpec

__all__ = ["MARGIN", "RowLimits"]

MARGIN = 0.9
"""Part of a share that is left to a kind which runs out of memory at rows that it has run before: what is left over
after fragmentation, or a longer row, is not the same at every step."""

_MOST_KINDS = 64
"""Kinds that are remembered: a cluster has a handful, and a node label that is different on every machine is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """What is known of each kind of device, as one immutable value.

    Attributes:
        ran: the most rows that a worker of the kind was seen to run.
        most: the most rows that a worker of the kind is given; kinds that never ran out of memory are absent.
    """

    ran: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)

    def with_run(self, workers: Sequence[WorkerSpec], num_rows: Sequence[int]) -> RowLimits:
        """Return limits that know that every rank ran its ``num_rows`` rows."""
        ran = dict(self.ran)
        for worker, rows in zip(workers, num_rows, strict=True):
            if rows > ran.get(worker.device, 0) and (worker.device in ran or len(ran) < _MOST_KINDS):
                ran[worker.device] = int(rows)
        return self if ran == self.ran else replace(self, ran=ran)

    def with_failure(self, device: str, num_rows: int) -> RowLimits:
        """Return limits that know that a worker of a kind ran out of memory at ``num_rows`` rows."""
        ran = self.ran.get(device, 0)
        # Half, not a little less: every try costs a restart of the group, a row too few costs a little time.
        rows = max(ran, num_rows // 2) if ran < num_rows else int(MARGIN * num_rows)
        rows = min(rows, self.most.get(device, rows))
        if device not in self.most and len(self.most) >= _MOST_KINDS:
            return self
        return replace(self, ran={**self.ran, device: min(ran, rows)}, most={**self.most, device: rows})

    def within(self, problem: Problem) -> Problem:
        """Return the problem with no worker allowed more rows than its kind is given."""
        if not self.most:
            return problem
        return replace(problem, workers=tuple(self._bounded(worker) for worker in problem.workers))

    def fault_of(self, problem: Problem) -> str | None:
        """Say why a group whose workers are bounded cannot run its reference batch, or None.

        Only where a limit of ours is to blame; other bounds are refused where they are met.
        """
        bounds = [worker.max_local_batch_size for worker in problem.workers]
        known = [rows for rows in bounds if rows is not None]
        if not self.most or len(known) < len(bounds) or sum(known) >= problem.global_batch_size:
            return None
        kinds = sorted({worker.device for worker in problem.workers} & self.most.keys())
        said = ", ".join(f"{kind} is given at most {self.most[kind]} rows" for kind in kinds)
        return (
            f"a global batch of {problem.global_batch_size} rows does not fit this group any more: after running out "
            f"of memory, {said}, and {problem.num_workers} workers hold {sum(known)} rows together; lower "
            "global_batch_size, use more workers, or train with session.train_step, which cuts a share into passes "
            "that fit"
        )

    def _bounded(self, worker: WorkerSpec) -> WorkerSpec:
        most = self.most.get(worker.device)
        own = worker.max_local_batch_size
        if most is None or (own is not None and own <= most):
            return worker
        return replace(worker, max_local_batch_size=most)
