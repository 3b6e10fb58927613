"""What every smaller mix of a cluster would take and cost: whether to rent all of it, less, or one kind alone."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rex_ray.cli.entries import enter_once
from rex_ray.cli.fleet import Fleet
from rex_ray.cli.words import duration
from rex_ray.core.errors import ConfigError, InfeasibleError, nearest_name_hint
from rex_ray.scenario import LearningCurve, format_cluster
from rex_ray.scenario.profiles import shipped_tables
from rex_ray.sim.oracle import Limits
from rex_ray.sim.step_times import StepTimes

__all__ = ["Mix", "advice", "all_mixes", "prices_of"]

_MOST_MIXES = 200
_SAME = 0.02
"""Times and costs within so much are the same to somebody who rents; profiles are no better than that."""


_MODERATE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A part of the cluster, to the target at the best batch of every moment and the exact split of each.

    Attributes:
        cluster: as ``parse_cluster`` reads it.
        num_workers: its workers.
        time_s: seconds to the target.
        smallest_batch: smallest global batch on the way.
        largest_batch: largest.
        usd: cost of renting it for so long; None where a price is missing.
        is_pareto: no other mix is as fast and as cheap; without prices, as fast and as small.
    """

    cluster: str
    num_workers: int
    time_s: float
    smallest_batch: int
    largest_batch: int
    usd: float | None
    is_pareto: bool = False


def prices_of(fleet: Fleet, overrides: Sequence[str]) -> dict[str, float]:
    """Return USD per hour by kind, where there is a price.

    Args:
        fleet: the devices.
        overrides: ``DEVICE=USD`` entries of the user's.

    Raises:
        ConfigError: an entry that is none or contradicts another, or one for a kind that the cluster does not have.
    """
    shipped = shipped_tables()["devices"]
    prices = {
        kind: float(row["usd_per_hour"]) for kind in fleet.profiles if "usd_per_hour" in (row := shipped.get(kind, {}))
    }
    given: dict[str, float] = {}
    for entry in overrides:
        kind, _, text = entry.partition("=")
        try:
            usd = float(text)
        except ValueError:
            usd = math.nan
        if not 0 <= usd < math.inf:
            raise ConfigError(f"--price {entry!r} is not DEVICE=USD per hour; write for example --price T4=0.5")
        if kind not in fleet.profiles:
            raise ConfigError(
                f"--price {entry!r}: no such device{nearest_name_hint(kind, fleet.profiles)} in the cluster"
            )
        enter_once(given, "--price", kind, usd, "{:g}".format)
    return prices | given


def all_mixes(
    fleet: Fleet, learning: LearningCurve, reference_batch_size: int, prices: Mapping[str, float]
) -> list[Mix]:
    """Return every mix that holds the reference batch, fastest first; of very many, an evenly thinned choice."""
    whole = Counter(fleet.devices)
    found = []
    for counts in itertools.product(*_choices(list(whole.values()))):
        devices = [kind for kind, count in zip(whole, counts, strict=True) for _ in range(count)]
        if not devices:
            continue
        try:
            limits = Limits(learning, StepTimes(fleet.ranks(devices), fleet.network), reference_batch_size)
        except InfeasibleError:
            continue
        time_s = limits.oracle_s
        usd = None
        if all(kind in prices for kind in devices):
            usd = sum(prices[kind] for kind in devices) * time_s / 3600
        low, high = limits.oracle_batches
        found.append(
            Mix(
                cluster=format_cluster(devices),
                num_workers=len(devices),
                time_s=time_s,
                smallest_batch=low,
                largest_batch=high,
                usd=usd,
            )
        )
    return _with_front(sorted(found, key=lambda mix: (mix.time_s, mix.num_workers)))


def advice(mixes: Sequence[Mix], devices: Sequence[str]) -> list[str]:
    """Return what a renter should know, in plain sentences."""
    kinds = Counter(devices)
    name = format_cluster([kind for kind, count in kinds.items() for _ in range(count)])
    whole = next((mix for mix in mixes if mix.cluster == name), None)
    if whole is None or len(mixes) == 1:
        return []
    said = []
    fastest = mixes[0]
    if fastest.time_s < (1 - _SAME) * whole.time_s:
        said.append(
            f"faster with less: {fastest.cluster} takes {duration(fastest.time_s)}, "
            f"{_less(fastest.time_s, whole.time_s)} less than the whole"
        )
    enough = min((mix for mix in mixes if mix.time_s <= (1 + _SAME) * whole.time_s), key=lambda mix: mix.num_workers)
    if enough.num_workers < whole.num_workers and enough != fastest:
        said.append(f"as fast with fewer: {enough.cluster} takes {duration(enough.time_s)}")
    for kind, count in kinds.items():
        alone = next((mix for mix in mixes if mix.cluster == f"{count}x{kind}"), None)
        if alone is not None and alone != whole and alone.time_s <= (1 + _SAME) * whole.time_s:
            said.append(f"one kind alone is enough: the {kind} alone take {duration(alone.time_s)}")
    said += _cheaper(mixes, whole)
    if not said:
        cheaper = " or cheaper" if whole.usd is not None else ""
        said.append(f"the whole cluster is the best choice: no smaller mix is as fast{cheaper}")
    return said


def _cheaper(mixes: Sequence[Mix], whole: Mix) -> list[str]:
    """Return the cheapest mix at no loss of time, at a moderate one, and at any."""
    if not whole.usd:
        return []
    said: list[str] = []
    named: set[str] = set()
    for most, what in ((1 + _SAME, "cheaper and no slower"), (_MODERATE, "cheaper"), (math.inf, "cheapest")):
        priced = ((mix.usd, mix) for mix in mixes if mix.usd is not None and mix.time_s <= most * whole.time_s)
        usd, best = min(priced, key=lambda pair: pair[0])
        if usd < (1 - _SAME) * whole.usd and best.cluster not in named:
            named.add(best.cluster)
            said.append(
                f"{what}: {best.cluster} costs {usd:.2f} USD, {_less(usd, whole.usd)} less than the whole, and takes "
                f"{best.time_s / whole.time_s:.2f} times as long"
            )
    return said


def _less(part: float, whole: float) -> str:
    return f"{100 * (1 - part / whole):.0f} %"


def _choices(counts: Sequence[int]) -> list[list[int]]:
    """Return the counts of each kind that are tried: all, or fewer of them where that is too many mixes."""
    for steps in (None, 16, 8, 4, 2, 1):
        tried = [_spaced(count, steps) for count in counts]
        if math.prod(len(choice) for choice in tried) <= _MOST_MIXES:
            return tried
    return tried


def _spaced(count: int, steps: int | None) -> list[int]:
    if steps is None or count <= steps:
        return list(range(count + 1))
    return sorted({round(count * part / steps) for part in range(steps + 1)})


def _with_front(mixes: Sequence[Mix]) -> list[Mix]:
    """Mark what no other mix beats in both time and cost (workers, where prices are missing)."""
    by_price = all(mix.usd is not None for mix in mixes)
    best, result = math.inf, []
    for mix in mixes:  # fastest first, so only cheaper ones follow on the front
        cost = (mix.usd or 0.0) if by_price else float(mix.num_workers)
        is_pareto = cost < best
        best = min(best, cost)
        result.append(
            Mix(
                cluster=mix.cluster,
                num_workers=mix.num_workers,
                time_s=mix.time_s,
                smallest_batch=mix.smallest_batch,
                largest_batch=mix.largest_batch,
                usd=mix.usd,
                is_pareto=is_pareto,
            )
        )
    return result
