"""The examples of other libraries, on two ranks with unequal shares; ``python examples/NAME.py`` runs them on Ray."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
from gloo_group import GlooGroup
from launched import launched

# Each process imports these libraries first, which takes half a minute on a busy machine.
pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


def run_example(rank: int, name: str, args: tuple[Any, ...], shares: tuple[int, int], options: dict[str, Any]) -> Any:
    """Return what the example's loop returns; what it prints, if it returns nothing."""
    printed = io.StringIO()
    with launched(rank, shares=shares, **options), contextlib.redirect_stdout(printed):
        result = importlib.import_module(f"examples.{name}").main(*args)
    return printed.getvalue() if result is None else result


def results(pair: GlooGroup, library: str, name: str, *args: Any, shares: Any = (20, 44), **options: Any) -> list[Any]:
    pytest.importorskip(library)
    return pair.run(run_example, name, args, shares, options, limit_s=200.0)


def test_accelerate(pair: GlooGroup) -> None:
    first, second = results(pair, "accelerate", "accelerate_digits", 3)
    accuracies = [float(line.split()[-1]) for line in first.splitlines()]
    assert len(accuracies) == 3
    assert accuracies[-1] > 0.9
    assert second == ""  # printed once, not once a rank


def test_hugging_faces_trainer(pair: GlooGroup, tmp_path: Path) -> None:
    pair.run(go_to, str(tmp_path))
    first, second = results(pair, "transformers", "hf_trainer", 3, shares=(10, 22), weight_by="tokens")
    assert first == pytest.approx(second, rel=1e-6)
    assert first < 3.0  # ln 32 = 3.5 is chance


def go_to(rank: int, folder: str) -> None:
    os.chdir(folder)


def test_lightning(pair: GlooGroup) -> None:
    first, second = results(pair, "lightning", "lightning_digits", 3)
    assert first == second > 0.9


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_datasets(pair: GlooGroup, streaming: bool) -> None:
    for accuracy, num_rows in results(pair, "datasets", "hf_datasets", 3, streaming):
        assert accuracy > 0.8
        assert num_rows == 1797  # every row of the last epoch once
