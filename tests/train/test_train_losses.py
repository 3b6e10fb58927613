"""What a run makes of workers that failed: the controller is told, and a mistake that comes again ends it."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

from rex_ray.core.errors import ConfigError, DataError
from rex_ray.train.loss_teller import LossTeller


def control(told: list[Any]) -> Any:
    """Stand in for the actor's handle, which answers at once."""
    answer: Future[str] = Future()
    answer.set_result("g")
    return SimpleNamespace(
        generation=SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: answer)),
        lost=SimpleNamespace(remote=lambda generation, ranks: told.append((generation, ranks))),
    )


def raised(error: Exception) -> dict[int, Exception]:
    return {1: RuntimeError("its peer has gone"), 0: UserExceptionWithTraceback(error, f"...\n{error}")}


def test_the_same_config_error_twice_in_a_row_ends_the_run_and_no_other_error_does() -> None:
    told: list[Any] = []
    teller = LossTeller(control(told))
    for error in (
        ConfigError("lr=-1"),
        DataError("row 5"),
        DataError("row 5"),
        ConfigError("lr=-1"),
        ConfigError("lr=-2"),
        RuntimeError("a worker was killed"),
        ConfigError("lr=-2"),
    ):
        teller.after_exception(None, raised(error))
    with pytest.raises(ConfigError, match=r"lr=-2 .*started again"):
        teller.after_exception(None, raised(ConfigError("lr=-2")))
    assert [(generation, sorted(ranks)) for generation, ranks in told] == [("g", [0, 1])] * 8
