"""What the two ends of the helper's pipes say to each other: one JSON object a line, never a pickle.

A search goes by a number that is given once, so that what is still on its way for a search that was called off can
never be taken for an answer to a later one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rex_ray.core.curves import StepTimeCurve
from rex_ray.core.search_problem import SearchProblem
from rex_ray.core.types import read_only

__all__ = [
    "Failed",
    "Finished",
    "Message",
    "Reply",
    "TrialAsked",
    "decode",
    "encode",
    "objective_from",
    "objective_to",
    "problem_from",
    "problem_to",
    "reply_from",
]

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialAsked:
    """A measured search wants a candidate run and timed, and waits to be told."""

    search_id: str
    trial: int
    local_batch_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A search ended; ``cpu_s`` is what it took of the helper's processor time, without importing Ax."""

    search_id: str
    local_batch_sizes: tuple[int, ...]
    objective: float
    num_trials: int
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A search ended without an answer."""

    search_id: str
    reason: str


Reply: TypeAlias = TrialAsked | Finished | Failed


def encode(message: Message) -> bytes:
    """Return a message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return a line's message.

    Raises:
        ValueError: it is none.
    """
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"not a message: {line[:80]!r}")  # noqa: TRY004 - the line's fault, whatever is wrong with it
    return message


def problem_to(problem: SearchProblem) -> Message:
    """Return a problem as plain JSON; floats keep every bit."""
    return {
        "kind": problem.kind,
        "plan": problem.plan,
        "incumbent": problem.incumbent,
        "lower": problem.lower,
        "upper": problem.upper,
        "shapes": [
            {"rows": shape.knot_rows.tolist(), "s": shape.knot_s.tolist(), "trusted": shape.max_trusted_rows}
            for shape in problem.shapes
        ],
        "shape_of": problem.shape_of,
        "scales": problem.scales,
        "max_trials": problem.max_trials,
        "multiple": problem.local_batch_multiple,
    }


def problem_from(data: Message) -> SearchProblem:
    """Return the problem that ``problem_to`` was given."""
    shapes = tuple(
        StepTimeCurve(
            knot_rows=read_only(shape["rows"], np.float64),
            knot_s=read_only(shape["s"], np.float64),
            max_trusted_rows=int(shape["trusted"]),
        )
        for shape in data["shapes"]
    )
    return SearchProblem(
        kind=data["kind"],
        plan=_sizes(data["plan"]),
        incumbent=_sizes(data["incumbent"]),
        lower=_sizes(data["lower"]),
        upper=_sizes(data["upper"]),
        shapes=shapes,
        shape_of=_sizes(data["shape_of"]),
        scales=tuple(float(scale) for scale in data["scales"]),
        max_trials=int(data["max_trials"]),
        local_batch_multiple=int(data["multiple"]),
    )


def reply_from(message: Message, search_id: str) -> Reply:
    """Return what the helper said of a search.

    Raises:
        ValueError: it is nothing that a helper says; a KeyError or TypeError where parts are missing or odd.
    """
    match message["op"]:
        case "trial":
            return TrialAsked(
                search_id=search_id, trial=int(message["trial"]), local_batch_sizes=_sizes(message["sizes"])
            )
        case "finished":
            return Finished(
                search_id=search_id,
                local_batch_sizes=_sizes(message["sizes"]),
                objective=float(message["objective"]),
                num_trials=int(message["num_trials"]),
                cpu_s=float(message["cpu_s"]),
            )
        case "failed":
            return Failed(search_id=search_id, reason=str(message["reason"]))
        case other:
            raise ValueError(f"unknown message {other!r}")


def objective_to(objective: float) -> float | None:
    """An objective as JSON has it: a refused trial (``inf``, or NaN from a mishap) is null."""
    return objective if math.isfinite(objective) else None


def objective_from(value: float | None) -> float:
    """The objective that ``objective_to`` was given."""
    return math.inf if value is None else float(value)


def _sizes(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
