"""A cluster in one line of text, ``4xT4,4xV100``, as a user writes it on a command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from rex_ray.core.errors import ConfigError
from rex_ray.scenario.profiles import device_names, nearest_device_hint

__all__ = ["MAX_WORKERS", "format_cluster", "parse_cluster"]

MAX_WORKERS = 1024
"""Far above any synchronous group; a mistyped count should not fill the memory."""

_MOST_DIGITS, _MOST_SHOWN = 10, 60
# A count comes first and greedily, so that 10xT4 is never a device of that name.
_ENTRY = re.compile(r"(?:(?P<count>\d+)\s*[xX*]\s*)?(?P<device>\w[\w.-]*)", re.ASCII)


def parse_cluster(text: str, known: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the kind of device of every rank, in the order written.

    Args:
        text: entries ``COUNTxDEVICE`` separated by commas; a lone ``DEVICE`` is one of it. ``4xT4,4xV100`` is four
            T4 as ranks 0 to 3 and four V100 as ranks 4 to 7.
        known: kinds that there are; default those that have a public profile.

    Raises:
        ConfigError: no entry, one that is neither, a count of 0, an unknown device (names the nearest), or
            more than ``MAX_WORKERS`` workers.
    """
    devices: list[str] = []
    kinds = device_names() if known is None else known
    for entry in text.split(","):
        found = _ENTRY.fullmatch(entry.strip())
        if found is None:
            raise _refusal(text, f"{_shown(entry.strip())} is not COUNTxDEVICE; write for example 4xT4,4xV100")
        device, digits = found["device"], found["count"] or "1"
        if device not in kinds:
            raise _refusal(text, f"unknown device {_shown(device)}{nearest_device_hint(device, kinds)}")
        count = int(digits) if len(digits) < _MOST_DIGITS else MAX_WORKERS + 1
        if count < 1:
            raise _refusal(text, "a count must be at least 1; leave out what there is none of")
        if len(devices) + count > MAX_WORKERS:
            raise _refusal(text, f"more than {MAX_WORKERS} workers; write a smaller count")
        devices += [device] * count
    return tuple(devices)


def format_cluster(devices: Sequence[str]) -> str:
    """Return the text that ``parse_cluster`` reads back to ``devices``."""
    return ",".join(f"{len(list(run))}x{device}" for device, run in groupby(devices))


def _refusal(text: str, why: str) -> ConfigError:
    return ConfigError(f"cluster {_shown(text)}: {why}")


def _shown(text: str) -> str:
    """Quote a user's text, cut where it is no use to anyone."""
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")
