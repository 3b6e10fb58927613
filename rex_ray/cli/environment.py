"""What a bug report needs to know about the machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["describe_environment"]

_PACKAGES = ("rex-ray", "torch", "ray", "numpy", "scipy", "scikit-learn", "ax-platform", "pandas")


def describe_environment() -> dict[str, Any]:
    """Return versions, platform, memory and CUDA devices as plain values.

    Returns:
        ``packages`` (name to version, None where absent), ``python``, ``platform``, ``num_cpus`` (usable by this
        process), ``memory_bytes`` and ``devices`` (name, memory in bytes and compute capability each).
    """
    return {
        "packages": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "devices": _cuda_devices(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cuda_devices() -> list[dict[str, Any]]:
    import torch  # noqa: PLC0415  (a second to import; only this command pays for it)

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {
            "name": device.name,
            "memory_bytes": device.total_memory,
            "compute_capability": f"{device.major}.{device.minor}",
        }
        for device in found
    ]
