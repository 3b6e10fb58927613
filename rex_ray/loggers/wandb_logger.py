"""Weights & Biases: one run in a project."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rex_ray.loggers.tracker import Tracker, need_package
from rex_ray.watch.seams import RunInfo

__all__ = ["WandbLogger"]


class WandbLogger(Tracker):
    """Logs metrics over the optimizer's step, the configuration, and the decisions as a table at the end.

    Names that W&B keeps for itself (``_step`` and the like), and ``step``, which is ours, go in below ``reported/``.

    The step is a figure of its own (``step``), not W&B's counter, which cannot go back where training does. A resumed
    run goes on with the W&B run of before; offline, that is another folder of the same run until it is synced.

    Args:
        project: the project; default: ``WANDB_PROJECT``, or W&B's own.
        init: further arguments of ``wandb.init``, e.g. ``{"mode": "offline", "tags": ["mixed"]}``.
        interval_s: shortest time between two points of rex_ray's figures.

    Raises:
        ConfigError: wandb is not installed.
    """

    kind = "wandb"

    def __init__(
        self, project: str | None = None, *, init: Mapping[str, Any] | None = None, interval_s: float = 10.0
    ) -> None:
        need_package("wandb", "wandb")
        super().__init__(interval_s)
        self._project = project
        self._init = dict(init or {})
        self._run: Any = None
        self._sentences: list[tuple[int, str]] = []

    def _open(self, run: RunInfo, known: str | None) -> str:
        import wandb  # noqa: PLC0415 - seconds, and only who asks pays them

        self._sentences = []
        arguments: dict[str, Any] = {
            "project": self._project,
            "name": run.name,
            "id": known or run.run_id,
            "resume": "allow",
            "config": {"policy": run.policy, **run.settings},
            "dir": str(Path(run.run_dir)) if run.run_dir else None,
            # A driver may train several runs, one after the other or at once.
            "reinit": "create_new",
            # What the program prints is its own; the progress line has no place in a tracker's log.
            "settings": wandb.Settings(console="off"),
        }
        self._run = wandb.init(**{**arguments, **self._init})
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        identity: str = self._run.id
        return identity

    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **{_key(name): value for name, value in figures.items()}})

    def _tell(self, step: int, text: str) -> None:
        self._sentences.append((step, text))

    def _close(self, reason: str) -> None:
        import wandb  # noqa: PLC0415

        if self._sentences:
            rows: list[Any] = [[step, text] for step, text in self._sentences]
            self._run.log({"rex/decisions": wandb.Table(columns=["step", "sentence"], data=rows)})
        self._run.summary["rex/ended"] = reason
        self._run.finish(exit_code=0 if reason == "finished" else 1)


def _key(name: str) -> str:
    return f"reported/{name}" if name == "step" or name.startswith("_") else name
