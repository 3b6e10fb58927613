"""Device profiles: how long a kind of device takes for a step of a workload, as public traces measured it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression

from rex_ray.core.curves import StepTimeCurve
from rex_ray.core.errors import ConfigError, nearest_name_hint
from rex_ray.core.split import SplitPlan, exact_split
from rex_ray.core.types import FloatArray, read_only

__all__ = [
    "DeviceProfile",
    "Source",
    "device_names",
    "load_profile",
    "nearest_device_hint",
    "optimal_split",
    "profile_names",
    "workload_names",
]

# Points at each end that carry the straight continuation beyond the measurements.
_END_POINTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The public file that figures were copied from."""

    repo: str
    commit: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceProfile:
    """One device running one workload alone.

    Attributes:
        device: kind of device, e.g. ``"T4"``.
        workload: e.g. ``"resnet50"``.
        local_batch_sizes: measured sizes in rows, increasing.
        step_time_s: seconds per step at each size, as published (not always increasing).
        max_local_batch_size: most rows that fit the device: the largest size that the source ran.
        source: where the figures come from.
        curve: the same as a curve that can be evaluated and inverted.
    """

    device: str
    workload: str
    local_batch_sizes: tuple[int, ...]
    step_time_s: tuple[float, ...]
    max_local_batch_size: int
    source: Source
    curve: StepTimeCurve

    def own_time_s(self, num_rows: npt.ArrayLike) -> FloatArray:
        """Return the own time in seconds for each count of rows (any shape).

        Published points are made non-decreasing (isotonic regression) and joined by straight lines. Below the
        smallest point the curve runs to zero rows along the straight line through the smallest three, ending
        between 10 % and 100 % of the smallest time; above the largest it follows the line through the largest
        three, rising by no less than half the average time per row there.
        """
        return self.curve.predict_s(num_rows)

    @property
    def peak_rows_per_s(self) -> float:
        """Rows per second at the size that suits the device best, within its memory."""
        rows = np.arange(1, self.max_local_batch_size + 1)
        return float((rows / self.own_time_s(rows)).max())


def load_profile(device: str, workload: str) -> DeviceProfile:
    """Return a shipped profile.

    Raises:
        ConfigError: unknown device or workload, or a pair that no source measured; names the nearest.
    """
    known = _profiles()
    if device not in device_names():
        raise ConfigError(f"unknown device {device!r}{nearest_device_hint(device, device_names())}")
    if workload not in workload_names():
        raise ConfigError(f"unknown workload {workload!r}{nearest_name_hint(workload, workload_names())}")
    if (device, workload) not in known:
        measured = ", ".join(name for kind, name in profile_names() if kind == device)
        raise ConfigError(f"no public source measured {workload!r} on {device!r} (measured there: {measured})")
    return known[device, workload]


def nearest_device_hint(device: str, known: Sequence[str]) -> str:
    """Return the nearest name and, unless that is the same in other letters, all that there are.

    An L4 is no mistyped T4: whoever has one needs to hear that nobody has measured it.
    """
    hint = nearest_name_hint(device, known)
    is_same = device.casefold() in {name.casefold() for name in known}
    if is_same or hint.startswith(" (known"):
        return hint
    return f"{hint}; there are step times of {', '.join(sorted(known))}"


def profile_names() -> tuple[tuple[str, str], ...]:
    """Return every (device, workload) that has a profile, sorted."""
    return tuple(sorted(_profiles()))


def device_names() -> tuple[str, ...]:
    """Return the kinds of device that have a profile."""
    return tuple(shipped_tables()["devices"])


def workload_names() -> tuple[str, ...]:
    """Return the workloads that have a profile."""
    return tuple(shipped_tables()["workloads"])


def optimal_split(
    profiles: Sequence[DeviceProfile],
    global_batch_size: int,
    scales: Sequence[float] | None = None,
    multiple: int = 1,
) -> SplitPlan:
    """Return the true optimum of an emulated cluster: the exact split on the true curves, within the memory caps.

    Args:
        profiles: one per rank.
        global_batch_size: rows to split.
        scales: present factor on each rank's times (a static difference or a slowdown), default 1.
        multiple: what every share is a multiple of.

    Raises:
        InfeasibleError: the caps leave no room for ``global_batch_size``.
    """
    factors = [1.0] * len(profiles) if scales is None else scales
    curves = [profile.curve.scaled(factor) for profile, factor in zip(profiles, factors, strict=True)]
    caps = [profile.max_local_batch_size for profile in profiles]
    return exact_split(curves, global_batch_size, upper=caps, multiple=multiple)


@cache
def shipped_tables() -> dict[str, Any]:
    """Return ``profiles.toml`` as parsed."""
    text = resources.files("rex_ray.scenario").joinpath("profiles.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def _profiles() -> dict[tuple[str, str], DeviceProfile]:
    return {(row["device"], row["workload"]): _profile(row) for row in shipped_tables()["profiles"]}


def _profile(row: dict[str, Any]) -> DeviceProfile:
    rows = np.asarray(row["local_batch_sizes"], dtype=np.float64)
    level = cast(FloatArray, isotonic_regression(np.asarray(row["step_time_s"], dtype=np.float64)).x)
    low, high = rows[:_END_POINTS], rows[-_END_POINTS:]
    _, intercept = np.polyfit(low, level[:_END_POINTS], 1)
    slope, _ = np.polyfit(high, level[-_END_POINTS:], 1)
    start = float(np.clip(intercept, 0.1 * level[0], level[0]))
    beyond = level[-1] + max(float(slope), 0.5 * level[-1] / rows[-1]) * rows[-1]
    curve = StepTimeCurve(
        knot_rows=read_only([0.0, *rows.tolist(), 2 * rows[-1]], np.float64),
        knot_s=read_only([start, *level.tolist(), beyond], np.float64),
        max_trusted_rows=int(row["max_local_batch_size"]),
    )
    return DeviceProfile(
        device=row["device"],
        workload=row["workload"],
        local_batch_sizes=tuple(row["local_batch_sizes"]),
        step_time_s=tuple(row["step_time_s"]),
        max_local_batch_size=int(row["max_local_batch_size"]),
        source=Source(**row["source"]),
        curve=curve,
    )
