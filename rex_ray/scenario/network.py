"""How long an all-reduce takes among ``n`` workers on different nodes."""

from __future__ import annotations

from dataclasses import dataclass

from rex_ray.core.errors import ConfigError, nearest_name_hint
from rex_ray.scenario.profiles import shipped_tables

__all__ = ["NetworkModel", "load_network", "measured_networks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkModel:
    """``base_s + per_worker_s (n - 2)`` seconds for two workers or more, nothing for one.

    The whole of it is counted after the last gradient (no overlap with the backward pass), so it adds the same
    time to every split and never favours one.
    """

    base_s: float = 0.0
    per_worker_s: float = 0.0

    def all_reduce_s(self, num_workers: int) -> float:
        """Return the seconds that one reduction of the gradient takes."""
        return 0.0 if num_workers < 2 else self.base_s + self.per_worker_s * (num_workers - 2)


def load_network(workload: str, device: str = "T4") -> NetworkModel:
    """Return the model fitted to a public cluster of one kind of device; a mixed cluster runs at its slowest link.

    Raises:
        ConfigError: no such cluster was measured; names those that were.
    """
    for row in shipped_tables()["networks"]:
        if (row["device"], row["workload"]) == (device, workload):
            return NetworkModel(base_s=row["base_s"], per_worker_s=row["per_worker_s"])
    known = [f"{row['workload']} on {row['device']}" for row in shipped_tables()["networks"]]
    name = f"{workload} on {device}"
    raise ConfigError(f"no measured all-reduce times for {name!r}{nearest_name_hint(name, known)}")


def measured_networks() -> tuple[tuple[str, str], ...]:
    """Return every (device, workload) whose all-reduce was measured."""
    return tuple((row["device"], row["workload"]) for row in shipped_tables()["networks"])
