"""The most that any method can give on a mix of devices, as one row of figures per cluster and workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rex_ray.core.errors import ConfigError, InfeasibleError, nearest_name_hint
from rex_ray.scenario.cluster import format_cluster
from rex_ray.scenario.learning import load_learning
from rex_ray.scenario.network import NetworkModel, Overlap, load_network, load_shapes, measured_networks
from rex_ray.scenario.profiles import DeviceProfile, Source, device_names, load_profile
from rex_ray.sim.oracle import FixedBatch, Limits
from rex_ray.sim.step_times import StepTimes

__all__ = ["NO_NETWORK", "ClusterLimits", "cluster_limits", "network_model"]

NO_NETWORK = "none"
"""Name of the network on which a reduction takes no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLimits:
    """What is attainable on one cluster, in seconds to the target.

    Attributes:
        cluster: as ``scenario.parse_cluster`` reads it.
        workload: what is trained.
        target: the metric that ends training, in words.
        network: whose measured all-reduce times are added to every step, or ``"none"``.
        reference_batch_size: ``M0``.
        largest_batch: the most that growth may reach.
        most_rows: the most that the workers' memory holds.
        oracle_s: the oracle's time.
        oracle_batches: its smallest and largest global batch on the way.
        oracle_by_doubling_s: its time when it may only double, or go to the largest batch.
        bsp_s: time of a fixed batch in equal shares, by batch; None where such shares do not fit.
        best_fixed_equal: the best fixed batch in equal shares; None where no share fits.
        best_fixed_filled: the same where full workers leave their rest to the others.
        best_fixed_balanced: the best fixed batch under the exact split.
        sources: where times and noise scales come from.
    """

    cluster: str
    workload: str
    target: str
    network: str
    reference_batch_size: int
    largest_batch: int
    most_rows: int
    oracle_s: float
    oracle_batches: tuple[int, int]
    oracle_by_doubling_s: float
    bsp_s: dict[int, float | None]
    best_fixed_equal: FixedBatch | None
    best_fixed_filled: FixedBatch
    best_fixed_balanced: FixedBatch
    sources: tuple[Source, ...]

    def saving(self, other_s: float) -> float:
        """Return the fraction of another's time that the oracle saves."""
        return 1.0 - self.oracle_s / other_s


def cluster_limits(
    devices: Sequence[str],
    workload: str,
    *,
    reference_batch_size: int | None = None,
    bsp_batches: Sequence[int] | None = None,
    network: str = "T4",
) -> ClusterLimits:
    """Compute the limits of one cluster.

    Args:
        devices: kind of device per rank.
        workload: see ``scenario.learning_names``.
        reference_batch_size: ``M0``: where training starts, and the smallest batch considered; default the source's
            own reference batch, or a row per worker where that is more.
        bsp_batches: fixed batches to compare with; default the reference batch and its doublings.
        network: see ``network_model``.

    Raises:
        ConfigError: an unknown name, a pair without a profile, or a reference batch that does not fit.
    """
    learning = load_learning(workload)
    profiles = [load_profile(device, workload) for device in devices]
    if not profiles:
        raise ConfigError("a cluster needs at least one worker; write for example 4xT4,4xV100")
    times = StepTimes(profiles, network_model(workload, network))
    reference = reference_batch_size or max(learning.reference_batch_size, len(profiles))
    try:
        limits = Limits(learning, times, reference)
    except InfeasibleError as error:
        raise ConfigError(f"{format_cluster(devices)} with {workload}: {error}") from error
    asked = _doublings(reference, limits.largest_batch) if bsp_batches is None else bsp_batches
    return ClusterLimits(
        cluster=format_cluster(devices),
        workload=workload,
        target=learning.target,
        network=network,
        reference_batch_size=reference,
        largest_batch=limits.largest_batch,
        most_rows=times.most_rows,
        oracle_s=limits.oracle_s,
        oracle_batches=limits.oracle_batches,
        oracle_by_doubling_s=limits.oracle_by_doubling_s,
        bsp_s={batch: limits.bsp_s(batch) if batch <= times.most_equal_rows else None for batch in asked},
        best_fixed_equal=limits.best_fixed_equal if reference <= times.most_equal_rows else None,
        best_fixed_filled=limits.best_fixed_filled,
        best_fixed_balanced=limits.best_fixed_balanced,
        sources=_sources(profiles, learning.source),
    )


def network_model(workload: str, network: str) -> NetworkModel:
    """Return the network of one kind of device, or none at all.

    Args:
        workload: whose gradients are reduced.
        network: ``"T4"``: the straight line fitted to that kind's cluster, one worker a node; ``"T4:4"``: interpolated
            between its measured shapes, four workers a node; either with ``"+overlap"``: reduced beside the backward
            pass, see ``scenario.Overlap``; ``"none"``.

    Raises:
        ConfigError: no all-reduce times were measured there; names those that were.
    """
    if network == NO_NETWORK:
        return NetworkModel()
    device, plus, option = network.partition("+")
    device, colon, per_node = device.partition(":")
    if (plus and option != "overlap") or (colon and not (per_node.isdecimal() and int(per_node) > 0)):
        raise ConfigError(f"network {network!r} is none of DEVICE, DEVICE:GPUS_PER_NODE, either with +overlap, or none")
    model = _by_shape(workload, device, int(per_node)) if colon else _by_line(workload, device)
    return replace(model, overlap=Overlap()) if plus else model


def _by_shape(workload: str, device: str, gpus_per_node: int) -> NetworkModel:
    return NetworkModel(shapes=load_shapes(workload, device), gpus_per_node=gpus_per_node)


def _by_line(workload: str, network: str) -> NetworkModel:
    measured = [device for device in device_names() if (device, workload) in measured_networks()]
    if network not in measured:
        raise ConfigError(
            f"no measured all-reduce times of {workload!r} on {network!r}"
            f"{nearest_name_hint(network, [*measured, NO_NETWORK])}"
        )
    return load_network(workload, network)


def _doublings(reference: int, largest: int) -> list[int]:
    batches = [reference]
    while 2 * batches[-1] <= largest:
        batches.append(2 * batches[-1])
    return batches


def _sources(profiles: Sequence[DeviceProfile], learning: Source) -> tuple[Source, ...]:
    found = {id(profile): profile.source for profile in profiles}
    return tuple(dict.fromkeys([*found.values(), learning]))
