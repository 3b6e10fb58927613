"""One run of a matrix: who trains what, where, with which seed; and what came of it, as one flat row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from experiments._harness import Row, Scalar

__all__ = ["TRACE", "Cell", "Result"]

TRACE = "trace"
"""Name of the learner that makes progress by measured noise scales; any other is a task of real SGD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A run. Equal cells give equal results, whatever ran before.

    Attributes:
        method: see ``experiments.lab.methods``.
        workload: whose step times, see ``scenario.workload_names``.
        cluster: as ``scenario.parse_cluster`` reads it.
        seed: of noise, episodes, gradients, initial weights and the order of rows.
        learner: ``"trace"``, or the task that real SGD trains on.
        global_batch_size: the user's reference batch ``M0``.
        network: kind of device whose measured all-reduce times count, or ``"none"``.
        noise: ``"quiet"``, ``"dedicated"`` or ``"shared"``.
        disturbance: who slows down when, see ``experiments.lab.worlds``; ``"none"``, ``"random:1"`` (episodes per 1,000
            worker-steps), ``"lbb"``, ``"dlb"``, ``"alibaba:3"`` (a recorded job, under ``"quiet"`` noise).
        shape: what the workers' smooth curves lack, see ``experiments.lab.worlds``: ``"plain"``, ``"tiles:32"`` (rows),
            ``"contention:0.6"`` (between the two workers of a host).
        charges: what control costs beside the steps, see ``sim.charges_of``: ``"none"``, ``"measured"``, ...
        search: who answers the policy's searches: ``"helper"``, the live process with the real Ax, or ``"none"``.
        options: of the policy, beside those that the method sets.
    """

    method: str
    workload: str
    cluster: str
    seed: int = 0
    learner: str = TRACE
    global_batch_size: int = 256
    network: str = "T4"
    noise: str = "dedicated"
    disturbance: str = "none"
    shape: str = "plain"
    charges: str = "none"
    search: str = "none"
    options: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A name that is the same in every process: the method, and a digest of all the rest."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.method}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def row(self) -> Row:
        """Return the cell as columns; options become one column of text."""
        return asdict(self) | {"options": ",".join(f"{name}={value}" for name, value in sorted(self.options.items()))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a run.

    Attributes:
        tta_s: virtual seconds to the target; None where it was not reached.
        total_s: virtual seconds of the whole run.
        num_steps: optimizer steps of the whole run.
        num_rows: rows of the whole run.
        final_metric: the validation metric at the end (fraction correct, or perplexity); None for a trace.
        smallest_batch: smallest global batch that was run, an epoch's last apart.
        largest_batch: largest.
        num_switches: allocations that were put in place after the first.
        imbalance: mean over steps of ``max t / mean t - 1``.
        rii: resource inefficiency, ``1 - sum B_k / (sum T_k sum_i max_b b / t_i(b))``, see ``docs/results.md``.
        rii_wait: part of the workers' time spent waiting for the slowest and for the reduction,
            ``sum (T_k - t_ik) / (n sum T_k)``.
        charged_s: virtual seconds charged for control: switches, probes, searches.
        swept_s: virtual seconds of the sweep that found the best fixed batch, which are not in ``total_s``.
        evaluated_s: virtual seconds at each look at the validation metric; empty for a trace.
        metrics: what was seen then.
        lost_s: parts of the loss against the oracle, by name; they sum to ``total - oracle``. Empty: none was asked.
    """

    tta_s: float | None
    total_s: float
    num_steps: int
    num_rows: int
    final_metric: float | None = None
    smallest_batch: int
    largest_batch: int
    num_switches: int = 0
    imbalance: float
    rii: float
    rii_wait: float
    charged_s: float = 0.0
    swept_s: float = 0.0
    evaluated_s: tuple[float, ...] = ()
    metrics: tuple[float, ...] = ()
    lost_s: Mapping[str, float] = field(default_factory=dict)

    def row(self) -> Row:
        """Return the result as columns, without what was seen on the way."""
        values: dict[str, Scalar] = {
            name: value for name, value in asdict(self).items() if not isinstance(value, Mapping | tuple)
        }
        return values | {f"lost_{name}_s": value for name, value in self.lost_s.items()}

    def to_json(self) -> str:
        """Return the result as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Return what ``to_json`` wrote."""
        fields = json.loads(text)
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
