"""Has people see a run while ``fit`` goes on: asks the control actor what there is to see."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import ray
from ray.exceptions import RayError

from rex_ray.core.errors import LinkError
from rex_ray.hosting.looking import ANSWER_LIMIT_S, chosen_watchers, looked_on, plain_settings
from rex_ray.train.telemetry import first_line
from rex_ray.watch.backlog import Mark, Shown
from rex_ray.watch.seams import RunInfo, Watcher

__all__ = ["chosen_watchers", "plain_settings", "watched"]


def watched(control: Any, watchers: Sequence[Watcher], run: RunInfo) -> AbstractContextManager[None]:
    """Show a run to its watchers while the body goes on, and its end after it; leave no thread behind.

    Args:
        control: handle of the control actor, which must outlive the body.
        watchers: who looks on.
        run: what they are told of it.
    """

    def ask(mark: Mark) -> Shown:
        try:
            shown: Shown = ray.get(control.sights.remote(mark), timeout=ANSWER_LIMIT_S)
        except RayError as error:
            raise LinkError(first_line(error)) from error
        return shown

    return looked_on(ask, watchers, run)
