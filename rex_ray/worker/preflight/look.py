"""The look itself: every rank reports, all reduce a vector once, and rank 0 says what came of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rex_ray.core.errors import ConfigError, LinkError, RexError
from rex_ray.worker.group.presence import Presence
from rex_ray.worker.group.side_group import SideGroup, distributed
from rex_ray.worker.measuring.timing import now_s
from rex_ray.worker.preflight import facts
from rex_ray.worker.preflight.facts import WorkerFacts
from rex_ray.worker.preflight.judging import Finding, judge
from rex_ray.worker.preflight.table import text_table

__all__ = ["ALL_REDUCE_BYTES", "Look", "gather_facts", "look", "timed_all_reduce"]

_log = logging.getLogger("rex_ray")

ALL_REDUCE_BYTES = 4 * 2**20
"""Size of the vector that is reduced: a small model's gradient, and a moment on any network worth using."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the look found.

    Attributes:
        workers: every rank's report, in rank order.
        all_reduce_s: how long 4 MiB took on this rank; None for a rank alone.
        findings: what stands out.
    """

    workers: tuple[WorkerFacts, ...]
    all_reduce_s: float | None
    findings: tuple[Finding, ...]

    def in_words(self) -> str:
        """Return the look in a few lines: table, time and findings."""
        lines = [text_table(self.workers)]
        if self.all_reduce_s is not None:
            lines.append(f"an all-reduce of {ALL_REDUCE_BYTES >> 20} MiB took {1e3 * self.all_reduce_s:.1f} ms")
        lines += [f"{finding.severity}: {finding.text}" for finding in self.findings]
        return "\n".join(lines)


def gather_facts(group: SideGroup, kind: str, device: torch.device) -> tuple[WorkerFacts, ...]:
    """Return every rank's report, in rank order."""
    return tuple(group.gather_objects(facts.collect(kind, device), "every worker's device and versions"))


def look(group: SideGroup, kind: str, device: torch.device, limit_s: float) -> Look:
    """Have every rank report, and all reduce a vector over the gradient's own backend. Called on every rank.

    Args:
        group: all ranks.
        kind: this rank's kind of device.
        device: where its model computes.
        limit_s: of the reduction.

    Raises:
        ConfigError: the workers cannot train together.
        LinkError: the reduction did not end within the limit.
    """
    workers = gather_facts(group, kind, device)
    findings = judge(workers)
    if group.rank == 0:
        _tell(workers, findings)
    fatal = [finding.text for finding in findings if finding.severity == "fatal"]
    if fatal:
        raise ConfigError(" ".join(fatal))
    took_s = timed_all_reduce(device, limit_s, group.presence)
    if group.rank == 0 and took_s is not None:
        _log.info("an all-reduce of %d MiB took %.1f ms", ALL_REDUCE_BYTES >> 20, 1e3 * took_s)
    return Look(workers=workers, all_reduce_s=took_s, findings=tuple(findings))


def timed_all_reduce(device: torch.device, limit_s: float, presence: Presence) -> float | None:
    """Reduce a vector twice over the default group, and return the seconds of the second time, None if alone.

    The first time sets up connections, and NCCL does so inside the call, where no limit reaches it. So both run on a
    thread that is left behind if it hangs; the caller ends the process then.

    Raises:
        LinkError: it did not end within the limit, or the backend gave up.
        RexError: the sum is wrong.
    """
    if not distributed():
        return None
    backend = dist.get_backend()
    what = f"the preflight's all-reduce over {backend}"
    ended: list[float | RuntimeError | RexError] = []

    def reduce() -> None:
        try:
            ended.append(_reduced_twice(device))
        except (RuntimeError, RexError) as error:
            ended.append(error)

    thread = threading.Thread(target=reduce, name="rex_ray-preflight", daemon=True)
    began_s = now_s()
    with presence.waiting(what):
        thread.start()
        thread.join(limit_s)
        waited_s = now_s() - began_s
        if not ended:
            raise _with_advice(presence.lost(what, waited_s, limit_s=limit_s), backend)
        if isinstance(ended[0], RuntimeError):
            raise _with_advice(presence.lost(what, waited_s, limit_s=limit_s, error=ended[0]), backend)
    if isinstance(ended[0], RexError):
        raise ended[0]
    return ended[0]


def _reduced_twice(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    values = torch.ones(ALL_REDUCE_BYTES // 4, device=device)
    took_s = 0.0
    for _ in range(2):
        began_s = now_s()
        dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took_s = now_s() - began_s
    expected = float(dist.get_world_size() ** 2)
    if not bool((values == expected).all()):
        raise RexError(
            f"the preflight's all-reduce gave {values.unique().tolist()[:4]} instead of {expected:g}: the backend "
            f"{dist.get_backend()} adds wrongly between these machines; do not train on them"
        )
    return took_s


def _with_advice(error: LinkError, backend: str) -> LinkError:
    if backend != "nccl":
        return LinkError(
            f"{error}. Where every rank is there, look at firewalls between the nodes, and name the network interface "
            "with GLOO_SOCKET_IFNAME"
        )
    return LinkError(
        f"{error}. Where every rank is there, set NCCL_DEBUG=INFO to see where it stops, name the interface with "
        "NCCL_SOCKET_IFNAME, and try NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1"
    )


def _tell(workers: Sequence[WorkerFacts], findings: Sequence[Finding]) -> None:
    _log.info("workers:\n%s", text_table(workers))
    for finding in findings:
        _log.log(logging.INFO if finding.severity == "note" else logging.WARNING, "%s", finding.text)
