"""A loop whose model counts the rows that it was trained on, and what the tests ask of a cluster and a journal."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from row_counter import BATCH, SECONDS_PER_ROW, RowCounter, RowIds

from experiments._leftovers import leftovers
from rex_ray import get_session
from rex_ray.control.events import StepObserved
from rex_ray.control.journal import Journal
from rex_ray.control.notes import Applied
from rex_ray.control.reading import read_journal
from rex_ray.hosting.journal_files import read_files


def counting_loop(config: dict[str, Any]) -> str:
    """Count rows for ``num_epochs``; report the fewest and the most times that a row of the model was counted."""
    session = get_session()
    model, optimizer = _prepared(session)
    loader = session.loader(RowIds())
    for _ in session.epochs(config["num_epochs"]):
        for batch, row_ids in enumerate(loader):
            if batch == 4 and config.get("raises"):
                raise ArithmeticError("the loop's own fault")
            model(row_ids).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        counts = -session.unwrap(model).weight.detach()
        session.report({"fewest": float(counts.min()), "most": float(counts.max())})
    return session.device_kind


def _prepared(session: Any) -> Any:
    model = RowCounter(SECONDS_PER_ROW[session.device_kind])
    return session.prepare(model, torch.optim.SGD(model.parameters(), lr=float(BATCH)))


def journal_of(journal_dir: Path) -> Journal:
    return read_journal(read_files(journal_dir))


def steps_of(journal: Journal) -> list[StepObserved]:
    return [event for event in journal.events if isinstance(event, StepObserved)]


def switches_of(journal: Journal) -> list[Applied]:
    """The changes of shares after each group's first allocation."""
    applied = [note for note in journal.notes if isinstance(note, Applied)]
    return applied[1:]


def wait_for(what: Callable[[], Any], limit_s: float, name: str) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"{name} did not happen within {limit_s} s"
        time.sleep(0.1)
    return found


def assert_nothing_left(limit_s: float = 15.0) -> None:
    wait_for(lambda: not leftovers(), limit_s, f"the end of {leftovers()}")


def control_actor() -> Any:
    """The control actor of the run that is under way, or None before there is one."""
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [actor for actor in named if actor["name"].startswith("rex_ray-control-")]
    return ray.get_actor(**names[0]) if names else None


def queue_actor() -> Any:
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [actor for actor in named if actor["name"].startswith("rex_ray-queue-")]
    return ray.get_actor(**names[0]) if names else None
