"""What is known of a cluster before anything trains on it, and what to think of it; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rex_ray.worker.preflight.facts import WorkerFacts
from rex_ray.worker.preflight.judging import Finding, judge

__all__ = ["Examination", "NodeFacts", "Probe", "chosen_nodes", "findings_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What the scheduler knows of a node.

    Attributes:
        node_id: Ray's name for it.
        label: value of the label that names its kind of device, None without one.
        num_cpus: CPUs in all.
        num_gpus: GPUs in all.
    """

    node_id: str
    label: str | None
    num_cpus: float
    num_gpus: float

    @property
    def can_train(self) -> bool:
        """Whether a worker could be placed there at all."""
        return self.num_cpus >= 1 or self.num_gpus >= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a probe on one node said.

    Attributes:
        node: where it was placed.
        facts: its report; None if it gave none.
        error: why it gave none.
    """

    node: NodeFacts
    facts: WorkerFacts | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What is known of a cluster.

    Attributes:
        nodes: the live ones.
        probes: one per kind of node.
        backend: of the reduction; None if there was none.
        all_reduce_s: how long it took; None if there was none, or it failed.
        all_reduce_error: why it failed.
        findings: what stands out, the gravest first.
    """

    nodes: tuple[NodeFacts, ...]
    probes: tuple[Probe, ...]
    backend: str | None = None
    all_reduce_s: float | None = None
    all_reduce_error: str | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def workers(self) -> list[WorkerFacts]:
        """Reports of the probes that gave one; a finding's ranks count these."""
        return [probe.facts for probe in self.probes if probe.facts is not None]

    @property
    def verdict(self) -> Literal["fine", "warnings", "cannot work"]:
        """The gravest of the findings, in words."""
        severities = {finding.severity for finding in self.findings}
        return "cannot work" if "fatal" in severities else "warnings" if "warning" in severities else "fine"


def chosen_nodes(nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
    """Return one node per kind; two where all nodes are of one kind, so that there is a network to try."""
    groups: dict[tuple[str | None, bool], list[NodeFacts]] = {}
    for node in nodes:
        if node.can_train:
            groups.setdefault((node.label, node.num_gpus >= 1), []).append(node)
    most = 2 if len(groups) == 1 else 1
    return [node for group in groups.values() for node in group[:most]]


def findings_of(found: Examination, device_label: str) -> list[Finding]:
    """Judge an examination; pure."""
    findings = judge(found.workers)
    trainable = [node for node in found.nodes if node.can_train]
    if not trainable:
        findings.append(
            Finding(severity="fatal", text="no live node has a CPU or a GPU to train on; add nodes to the cluster")
        )
    for probe in found.probes:
        if probe.error is not None:
            findings.append(
                Finding(
                    severity="fatal" if not found.workers else "warning",
                    text=f"node {_named(probe.node)} could not be looked at: {probe.error}",
                )
            )
    unlabelled = [node for node in trainable if node.label is None]
    if unlabelled:
        some = len(unlabelled) < len(trainable)
        findings.append(
            Finding(
                severity="warning" if some else "note",
                text=f"{len(unlabelled)} of {len(trainable)} nodes have no label {device_label} "
                f"({', '.join(_named(node) for node in unlabelled[:5])}), so no selector finds them and their kind is "
                f"the GPU's own name, or cpu; start them with `ray start --labels {device_label}=KIND`",
            )
        )
    if found.all_reduce_error is not None:
        findings.append(Finding(severity="fatal", text=found.all_reduce_error))
    order = ("fatal", "warning", "note")
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _named(node: NodeFacts) -> str:
    return f"{node.node_id[:8]} ({node.label or 'no label'})"
