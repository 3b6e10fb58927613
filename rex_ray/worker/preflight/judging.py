"""What to think of the workers' reports: pure, so that any mix of machines can be judged anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rex_ray.core.errors import ConfigError
from rex_ray.worker.group.last_words import named_ranks
from rex_ray.worker.preflight.facts import WorkerFacts

__all__ = ["Dtype", "Finding", "common_dtype", "judge", "refuse_dtype", "refuse_mix"]

Dtype: TypeAlias = Literal["bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something about the workers that a user should know.

    Attributes:
        severity: ``"fatal"`` cannot work, ``"warning"`` may fail or cost much, ``"note"`` is as it should be.
        text: what, on which ranks, and what to do.
    """

    severity: Literal["fatal", "warning", "note"]
    text: str


def judge(workers: Sequence[WorkerFacts]) -> list[Finding]:
    """Return what stands out among the workers, in rank order of ``workers``; the gravest first."""
    findings: list[Finding] = []
    for name, read, severity, remedy in _VERSIONS:
        groups = _grouped(workers, read)
        if len(groups) > 1:
            findings.append(Finding(severity=severity, text=f"{name} differs: {_told(groups)}. {remedy}"))
    types = _grouped(workers, lambda worker: worker.device_type)
    if len(types) > 1:
        findings.append(
            Finding(
                severity="fatal",
                text=f"some workers have a GPU and some do not: {_told(types)}. One process group has one backend; use "
                "ScalingConfig(use_gpu=True), or a label selector that keeps to one",
            )
        )
    if "bfloat16" not in {common_dtype(workers)} and any(worker.bf16 for worker in workers):
        lacking = [rank for rank, worker in enumerate(workers) if not worker.bf16]
        findings.append(
            Finding(
                severity="note",
                text=f"{named_ranks(lacking)} ({_kinds(workers, lacking)}) computes no bfloat16 natively, so "
                f"session.autocast(dtype='auto') uses {common_dtype(workers) or 'no lower precision'} on all ranks",
            )
        )
    order = ("fatal", "warning", "note")
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def common_dtype(workers: Sequence[WorkerFacts]) -> Dtype | None:
    """Return the lower precision that every worker computes natively, None if there is none.

    bfloat16 before float16, which needs a gradient scaler; float16 on CUDA only.
    """
    if all(worker.bf16 for worker in workers):
        return "bfloat16"
    if all(worker.fp16 and worker.device_type == "cuda" for worker in workers):
        return "float16"
    return None


def refuse_dtype(workers: Sequence[WorkerFacts], dtype: str) -> None:
    """Refuse a precision that some worker's GPU only emulates; on a CPU it is for trying out, and allowed.

    Raises:
        ConfigError: names the ranks, and what all of them have.
    """
    lacking = [
        rank
        for rank, worker in enumerate(workers)
        if worker.device_type == "cuda" and not (worker.bf16 if dtype == "bfloat16" else worker.fp16)
    ]
    if lacking:
        common = common_dtype(workers)
        instead = "leave autocast out" if common is None else f"all ranks have {common}: use it, or dtype='auto'"
        raise ConfigError(
            f"dtype={dtype} was asked for, and {named_ranks(lacking)} ({_kinds(workers, lacking)}) computes it in no "
            f"hardware; {instead}"
        )


def refuse_mix(what: str, by_rank: Sequence[str], remedy: str) -> None:
    """Refuse ranks that differ in what must be one.

    Raises:
        ConfigError: names who has what.
    """
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(by_rank):
        groups.setdefault(value, []).append(rank)
    if len(groups) > 1:
        raise ConfigError(f"{what} differ between ranks: {_told(groups)}. {remedy}")


def _major_minor(text: str) -> str:
    return ".".join(text.partition("+")[0].split(".")[:2])


def _torch(worker: WorkerFacts) -> str | None:
    return _major_minor(worker.torch)


def _nccl(worker: WorkerFacts) -> str | None:
    return worker.nccl


def _cuda(worker: WorkerFacts) -> str | None:
    return worker.cuda


def _rex_ray(worker: WorkerFacts) -> str | None:
    return worker.rex_ray


def _python(worker: WorkerFacts) -> str | None:
    return _major_minor(worker.python)


def _driver(worker: WorkerFacts) -> str | None:
    return None if worker.driver is None else worker.driver.split(".", maxsplit=1)[0]


_Severity: TypeAlias = Literal["fatal", "warning", "note"]
_VERSIONS: tuple[tuple[str, Callable[[WorkerFacts], str | None], _Severity, str], ...] = (
    ("torch", _torch, "warning", "Collectives and saves may not fit: install one version on every node"),
    ("NCCL", _nccl, "warning", "Ranks with two versions hang or fail at start-up: install one torch build everywhere"),
    ("CUDA", _cuda, "warning", "Install the same torch build on every node"),
    ("rex_ray", _rex_ray, "warning", "Ranks must agree on what they say to one another: install one version"),
    ("Python", _python, "warning", "Ray moves pickled code between workers: use one minor version"),
    ("the NVIDIA driver", _driver, "note", "That alone does no harm if each is new enough for torch's CUDA"),
)


def _grouped(workers: Sequence[WorkerFacts], read: Callable[[WorkerFacts], str | None]) -> dict[str, list[int]]:
    """Group ranks by what they report; those that report nothing have no part in a mix."""
    groups: dict[str, list[int]] = {}
    for rank, worker in enumerate(workers):
        value = read(worker)
        if value is not None:
            groups.setdefault(value, []).append(rank)
    return groups


def _told(groups: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{value} on {named_ranks(ranks)}" for value, ranks in groups.items())


def _kinds(workers: Sequence[WorkerFacts], ranks: Sequence[int]) -> str:
    return ", ".join(dict.fromkeys(workers[rank].kind for rank in ranks))
