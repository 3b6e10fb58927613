"""How long Ray Train waits for a worker group: shorter than it would by itself, unless the user says how long.

All of it are environment variables that Ray documents and that its controller takes from the driver.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ray.train import FailureConfig, ScalingConfig

__all__ = ["quick_restarts", "shorter_waits"]

_LOOKS = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
_START = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"


def shorter_waits(scaling: ScalingConfig, failures: FailureConfig) -> Mapping[str, str]:
    """Return the settings under which a group is back soon after a loss.

    Looks at the workers, by which a death is found out and a report is taken in, come every second instead of every
    other. A group that may have fewer workers gives up after 5 s instead of 60 on room that is not there: for up to
    20 s after a node died, Ray still counts it, and tries in vain to start workers on it. A group of a fixed size has
    nothing better to try, so it waits as ever; and so does one whose user counts such failures.
    """
    waits = {_LOOKS: "1"}
    if scaling.min_workers < scaling.max_workers and failures.controller_failure_limit == -1:
        waits[_START] = "5"
    return waits


@contextmanager
def quick_restarts(scaling: ScalingConfig, failures: FailureConfig | None) -> Iterator[None]:
    """Have ``shorter_waits`` in the environment, but for what stands there already."""
    waits = shorter_waits(scaling, failures or FailureConfig())
    added = {name: value for name, value in waits.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
