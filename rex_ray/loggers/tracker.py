"""What all trackers share: which figures they are given, how often, and how a resumed run finds its tracker run."""

from __future__ import annotations

import json
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rex_ray.core.errors import ConfigError
from rex_ray.watch.seams import Ended, Happened, Progress, Reported, RunInfo, Sight

__all__ = ["Tracker", "need_package", "progress_figures"]

_IDS_FILE: Final = "trackers.json"
_ids_lock = threading.Lock()
_SHOWN_KINDS: Final = frozenset({"group", "decided", "applied", "measured", "withdrawn", "lost", "incident"})


def need_package(package: str, extra: str) -> None:
    """Make sure that a tracker's package is there, when the logger is made and not hours later.

    Raises:
        ConfigError: it is missing; the message says how to install it.
    """
    if find_spec(package) is None:
        raise ConfigError(f"the package {package!r} is not installed; run: pip install 'rex-ray[{extra}]'")


class Tracker(ABC):
    """A tracker's run, one per ``fit``: opened with the first thing seen, closed with the run.

    Metrics of ``session.report`` go in under their own names as they come, rex_ray's figures under ``rex/...`` at most
    every ``interval_s``. A run that is taken up again under its name goes on with its tracker run, where that allows.

    Args:
        interval_s: shortest time between two points of rex_ray's figures.
    """

    kind: str
    """Name of the tracker, under which a run's identity is kept."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._due_s = 0.0
        self._shown_step = -1
        self._newest_step = -1
        self._held: list[str] | None = []
        self._reason = "interrupted"

    def begin(self, run: RunInfo) -> None:
        """Open the tracker's run, the earlier one of this run if there was one."""
        self._due_s, self._shown_step, self._newest_step, self._reason = 0.0, -1, -1, "interrupted"
        self._held = []
        ids = Path(run.run_dir) / _IDS_FILE if run.run_dir else None
        known = _read_ids(ids).get(self.kind)
        identity = self._open(run, known)
        if ids is not None and identity != known:
            _write_id(ids, self.kind, identity)

    def see(self, sight: Sight) -> None:
        """Pass on what the tracker has a place for."""
        match sight:
            case Progress():
                self._take_progress(sight)
            case Reported():
                figures = _finite(sight.metrics)
                if figures:
                    self._newest_step = max(self._newest_step, sight.step)
                    self._log(sight.step, {"epoch": float(sight.epoch), **figures})
            case Happened():
                self._take_happening(sight)
            case Ended():
                self._reason = sight.reason

    def close(self) -> None:
        """Close the tracker's run."""
        self._close(self._reason)

    def _take_happening(self, sight: Happened) -> None:
        if sight.kind not in _SHOWN_KINDS:
            return
        if sight.kind == "group":
            self._take_group(sight)
        elif self._held is not None:
            # Before the first group nobody knows from which step on a resumed run goes on.
            self._held.append(sight.text)
        else:
            self._tell(max(sight.step, 0), sight.text)

    def _take_group(self, sight: Happened) -> None:
        step = sight.step + 1  # a group's sentence is about its first step
        if sight.step < self._newest_step:
            self._shown_step = self._newest_step = sight.step
            self._rewind(step)
        held, self._held = self._held or [], None
        for text in (*held, sight.text):
            self._tell(step, text)

    def _take_progress(self, progress: Progress) -> None:
        # Also once a step: a run that stands still has nothing new to draw.
        if progress.step <= self._shown_step or time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + self._interval_s
        self._shown_step = progress.step
        self._newest_step = max(self._newest_step, progress.step)
        self._log(progress.step, progress_figures(progress))

    # --- each tracker's own

    @abstractmethod
    def _open(self, run: RunInfo, known: str | None) -> str:
        """Open a run, going on with ``known`` if that is there; return its identity."""

    @abstractmethod
    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log finite figures at a step."""

    @abstractmethod
    def _tell(self, step: int, text: str) -> None:
        """Keep a sentence about a step."""

    def _rewind(self, step: int) -> None:  # noqa: B027 - most trackers keep both
        """Training goes back to ``step``: what was logged from there on is trained once more."""

    @abstractmethod
    def _close(self, reason: str) -> None:
        """Close the run; ``reason`` is that of ``Ended``, or ``"interrupted"``."""


def progress_figures(progress: Progress) -> dict[str, float]:
    """Return where a run stands as named figures, those that are known."""
    figures = {
        "rex/step_s": progress.step_s,
        "rex/rows_per_s": progress.rows_per_s,
        "rex/global_batch_size": float(progress.global_batch_size),
        "rex/lr_factor": progress.lr_factor,
        "rex/imbalance": progress.imbalance,
        "rex/num_changes": float(progress.num_changes),
        "rex/num_lost": float(progress.num_lost),
    }
    if progress.learning_rate is not None:
        figures["rex/learning_rate"] = progress.learning_rate * progress.lr_factor
    if progress.noise_scale is not None:
        figures["rex/noise_scale"] = progress.noise_scale
    for worker in progress.workers:
        figures[f"rex/own_s/rank_{worker.rank}"] = worker.own_s
        figures[f"rex/local_batch_size/rank_{worker.rank}"] = float(worker.local_batch_size)
    return _finite(figures)


def _finite(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}


def _write_id(path: Path, kind: str, identity: str) -> None:
    with _ids_lock:  # each tracker has its thread, and all keep theirs in one file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**_read_ids(path), kind: identity}, indent=2) + "\n", encoding="utf-8")


def _read_ids(path: Path | None) -> dict[str, str]:
    """Identities by tracker; what cannot be read is as good as none, and a new run is begun."""
    try:
        ids = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}
    except (OSError, ValueError):
        return {}
    return {str(kind): str(identity) for kind, identity in ids.items()} if isinstance(ids, dict) else {}
