"""MLflow: one run in an experiment."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any, Final

from rex_ray.loggers.tracker import Tracker, need_package
from rex_ray.watch.seams import RunInfo

__all__ = ["MLflowLogger", "mlflow_name"]

_TELL_S: Final = 60.0
_MOST_CHARACTERS: Final = 500
_MOST_PARAMS: Final = 100
_MOST_METRICS: Final = 1000
_MOST_NAME: Final = 250
_NOT_IN_NAMES: Final = re.compile(r"[^\w.\- /]", re.ASCII)


class MLflowLogger(Tracker):
    """Logs metrics, the configuration as parameters, and the decisions as a text artifact.

    MLflow refuses most punctuation in names: ``val/AR@100`` becomes ``val/AR_100``, and ``val/AR(100`` beside it
    ``val/AR_100_2``.

    It speaks to the server by a client of its own, so that it neither needs nor disturbs an active run of the
    program's.

    Args:
        experiment: name of the experiment, made if it is not there.
        tracking_uri: server or store; default: ``MLFLOW_TRACKING_URI``, or MLflow's own.
        tags: of the run.
        interval_s: shortest time between two points of rex_ray's figures.

    Raises:
        ConfigError: mlflow is not installed.
    """

    kind = "mlflow"

    def __init__(
        self,
        experiment: str = "rex_ray",
        *,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
        interval_s: float = 10.0,
    ) -> None:
        need_package("mlflow", "mlflow")
        super().__init__(interval_s)
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._tags = dict(tags or {})
        self._client: Any = None
        self._run_id = ""
        self._artifact = ""
        self._sentences: list[str] = []
        self._names: dict[str, str] = {}
        self._told_s = 0.0

    def _open(self, run: RunInfo, known: str | None) -> str:
        from mlflow import MlflowClient  # noqa: PLC0415 - seconds, and only who asks pays them

        self._client = MlflowClient(self._tracking_uri)
        self._sentences, self._told_s = [], 0.0
        # A resumed run has decisions of its own; those of before stay where they are.
        self._artifact = f"rex_ray/decisions-{run.run_id}.txt"
        self._run_id = self._found(known) or self._made(run)
        self._client.update_run(self._run_id, status="RUNNING")
        return self._run_id

    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # noqa: PLC0415

        now_ms = time.time_ns() // 1_000_000
        metrics = [Metric(self._name(name), value, now_ms, step) for name, value in figures.items()]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _MOST_METRICS])

    def _name(self, name: str) -> str:
        """Return the name that MLflow takes for ours, the same one every time, and for no two of ours the same."""
        if name not in self._names:
            made = plain = mlflow_name(name)
            number = 1
            while made in self._names.values():
                number += 1
                made = f"{plain[: _MOST_NAME - 8]}_{number}"
            self._names[name] = made
        return self._names[name]

    def _tell(self, step: int, text: str) -> None:
        self._sentences.append(f"step {step}: {text}")
        if time.monotonic() - self._told_s >= _TELL_S:
            self._write_sentences()

    def _close(self, reason: str) -> None:
        self._write_sentences()
        status = "FINISHED" if reason == "finished" else "KILLED" if reason == "interrupted" else "FAILED"
        self._client.set_terminated(self._run_id, status=status)

    def _write_sentences(self) -> None:
        self._told_s = time.monotonic()
        if self._sentences:
            self._client.log_text(self._run_id, "\n".join(self._sentences) + "\n", self._artifact)

    def _found(self, known: str | None) -> str | None:
        """Return the earlier run's identity, unless somebody has deleted it."""
        from mlflow.exceptions import MlflowException  # noqa: PLC0415

        if known is None:
            return None
        try:
            is_active = self._client.get_run(known).info.lifecycle_stage == "active"
        except MlflowException:
            return None
        return known if is_active else None

    def _made(self, run: RunInfo) -> str:
        from mlflow.entities import Param  # noqa: PLC0415

        experiment = self._client.get_experiment_by_name(self._experiment)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        tags = {"rex_ray.policy": run.policy, "mlflow.user": os.environ.get("USER", ""), **self._tags}
        made = self._client.create_run(experiment_id, run_name=run.name, tags=tags)
        params = [Param(self._name(name), str(value)[:_MOST_CHARACTERS]) for name, value in run.settings.items()]
        self._client.log_batch(made.info.run_id, params=params[:_MOST_PARAMS])
        identity: str = made.info.run_id
        return identity


def mlflow_name(name: str) -> str:
    """Return a name as MLflow takes it: letters, digits, ``_-. ``, and ``/`` between parts that are not dots alone."""
    parts = [part for part in _NOT_IN_NAMES.sub("_", name).split("/") if part.strip(".")]
    return "/".join(parts)[:_MOST_NAME].rstrip("/") or "_"
