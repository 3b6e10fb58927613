"""TensorBoard: event files in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rex_ray.loggers.tracker import Tracker, need_package
from rex_ray.watch.seams import RunInfo

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger(Tracker):
    """Writes scalars, the configuration, and each decision's sentence as text.

    A run that is resumed writes into the folder of before; steps that are trained once more take the place of those
    that were lost.

    Args:
        log_dir: folder of the event files; default: ``tensorboard`` in the run's own folder.
        interval_s: shortest time between two points of rex_ray's figures.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    kind = "tensorboard"

    def __init__(self, log_dir: str | Path | None = None, *, interval_s: float = 10.0) -> None:
        need_package("tensorboard", "tensorboard")
        super().__init__(interval_s)
        self._given = log_dir
        self._log_dir = ""
        self._settings = ""
        self._writer: Any = None

    def _open(self, run: RunInfo, known: str | None) -> str:
        del known  # the folder is its identity
        self._log_dir = str(self._given or Path(run.run_dir or run.name) / "tensorboard")
        rows = [f"| {name} | {value} |" for name, value in run.settings.items()]
        self._settings = "\n".join(["| setting | value |", "|---|---|", *rows])
        # Opened by the first point: only that tells from which step on what is there counts no more.
        self._writer = None
        return self._log_dir

    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        writer = self._writer_at(step)
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    def _tell(self, step: int, text: str) -> None:
        self._writer_at(step).add_text("rex/decisions", text, step)

    def _rewind(self, step: int) -> None:
        self._writer_at(step).close()
        self._writer = None
        self._writer_at(step)

    def _close(self, reason: str) -> None:
        del reason
        if self._writer is not None:
            self._writer.close()

    def _writer_at(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - seconds, and only who asks pays them

            self._writer = SummaryWriter(self._log_dir, purge_step=step, flush_secs=30)
            self._writer.add_text("rex/settings", self._settings, step)
        return self._writer
