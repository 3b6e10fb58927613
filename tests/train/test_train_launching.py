"""What ``launch`` refuses, before any worker is started."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from rex_ray import ConfigError, launch


def main(num_epochs: int, lr: float = 0.1) -> None:
    raise AssertionError(f"it ran with {num_epochs}, {lr}")


def keyword_only(*, num_epochs: int) -> None:
    raise AssertionError(f"it ran with {num_epochs}")


@pytest.mark.parametrize(
    ("function", "args", "told"),
    [
        (main, (), "missing a required argument: 'num_epochs'"),
        (main, (3, 0.1, "more"), "too many positional arguments"),
        (keyword_only, (), "missing a required"),
        (partial(main, 3), (0.1, 0.2), "too many positional arguments"),
    ],
)
def test_arguments_that_the_function_does_not_take_are_refused(function: Any, args: tuple[Any, ...], told: str) -> None:
    with pytest.raises(ConfigError, match="launch cannot call") as refused:
        launch(function, *args, num_workers=2, global_batch_size=64)
    assert told in str(refused.value)


def test_an_option_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="loggers"):
        launch(main, 3, num_workers=2, global_batch_size=64, loggers=[])
