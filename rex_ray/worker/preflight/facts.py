"""What a worker has, as it reports it. Collecting only; what to think of it is ``judging``'s."""

from __future__ import annotations

import os
import platform
import re
import socket
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

__all__ = ["WorkerFacts", "collect", "device_memory_bytes"]

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
# Native bf16 begins with Ampere; below it torch emulates it, slower than float32. Volta was the first with fast fp16,
# and every card since Pascal's P100 (6.0) computes in it.
_BF16_SINCE = (8, 0)
_FP16_SINCE = (6, 0)
_BF16_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """One worker's report.

    Attributes:
        host: the machine's name.
        kind: kind of device, as the scheduler calls it.
        device_type: ``"cuda"`` or ``"cpu"``.
        device_name: what the driver calls the device; None on a CPU.
        memory_bytes: the device's memory; on a CPU the machine's.
        capability: CUDA compute capability such as ``"8.0"``.
        driver: version of the NVIDIA driver.
        python: version.
        torch: version.
        cuda: version that torch was built for.
        nccl: version that torch bears.
        rex_ray: version.
        bf16: bfloat16 is computed natively.
        fp16: float16 is.
    """

    host: str
    kind: str
    device_type: str
    device_name: str | None = None
    memory_bytes: int | None = None
    capability: str | None = None
    driver: str | None = None
    python: str
    torch: str
    cuda: str | None = None
    nccl: str | None = None
    rex_ray: str
    bf16: bool = False
    fp16: bool = False


def collect(kind: str, device: torch.device) -> WorkerFacts:
    """Report this process's device and versions.

    Args:
        kind: kind of device, as the scheduler calls it.
        device: where the model computes.
    """
    on_cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if on_cuda else None
    capability = None if properties is None else (properties.major, properties.minor)
    return WorkerFacts(
        host=socket.gethostname(),
        kind=kind,
        device_type=device.type,
        device_name=None if properties is None else properties.name,
        memory_bytes=_host_memory() if properties is None else properties.total_memory,
        capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        driver=_driver() if on_cuda else None,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=_nccl() if on_cuda else None,
        rex_ray=_own_version(),
        bf16=_cpu_has_bf16() if capability is None else capability >= _BF16_SINCE,
        fp16=capability is not None and capability >= _FP16_SINCE,
    )


def device_memory_bytes(device: torch.device) -> int | None:
    """Return the device's whole memory, None where a process has no memory of its own to fill."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _driver() -> str | None:
    """The NVIDIA driver's version, from where the kernel module leaves it."""
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", _DRIVER_FILE.read_text(encoding="utf-8"))
    except OSError:
        return None
    return None if found is None else found[1]


def _nccl() -> str | None:
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _own_version() -> str:
    try:
        return version("rex-ray")
    except PackageNotFoundError:
        return "not installed"


def _cpu_has_bf16() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    flags = re.search(r"^flags\s*:(.*)$", text, flags=re.MULTILINE)
    return flags is not None and not _BF16_CPU_FLAGS.isdisjoint(flags[1].split())
