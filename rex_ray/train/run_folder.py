"""Where rex_ray keeps what it knows of a run of Ray Train's."""

from __future__ import annotations

import logging
from pathlib import Path

from ray.train import RunConfig

__all__ = ["run_directory"]

logger = logging.getLogger("rex_ray")


def run_directory(run_config: RunConfig) -> Path:
    """Return where rex_ray keeps what it knows of a run: ``<storage_path>/<name>/rex_ray``.

    The journal is appended to by the step, which object stores cannot do. So a run whose storage is no local path
    keeps its journal under ``~/ray_results`` on the driver's machine.
    """
    storage = str(run_config.storage_path).removeprefix("file://")
    is_local = "://" not in storage and run_config.storage_filesystem is None
    base = Path(storage).expanduser() if is_local else Path.home() / "ray_results"
    directory = base.absolute() / str(run_config.name) / "rex_ray"
    if not is_local:
        logger.info("storage %s cannot be appended to; the journal goes to %s", storage, directory)
    return directory
