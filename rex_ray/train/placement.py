"""Where workers may go: label selectors per worker, and a check that the cluster can meet them at all."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.train import ScalingConfig
from ray.util.placement_group import placement_group, remove_placement_group

from rex_ray.core.errors import ConfigError

__all__ = [
    "Node",
    "check_elastic",
    "check_placement",
    "devices_asked_for",
    "label_selectors",
    "live_nodes",
    "selector_matches",
    "unplaced",
]

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_OPERATOR = re.compile(r"(?P<negated>!?)(?:in\((?P<values>.*)\)|(?P<value>.*))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A live node: its labels and its total resources, free or not."""

    labels: Mapping[str, str]
    resources: Mapping[str, float]


def label_selectors(devices: Mapping[str, int], device_label: str = "ray.io/accelerator-type") -> list[dict[str, str]]:
    """Turn workers per kind of device into one label selector per worker.

    Args:
        devices: such as ``{"T4": 2, "V100": 2}``.
        device_label: node label that bears the kind.

    Returns:
        A list for ``ScalingConfig(num_workers=<its length>, label_selector=...)``. Ray need not give rank ``i`` the
        ``i``-th node: a worker reads its kind from the node that it finds itself on.

    Raises:
        ConfigError: no device, or a count below 1.
    """
    if not devices:
        raise ConfigError("no devices were given; name them with their number of workers, such as {'T4': 2}")
    for device, count in devices.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"device {device!r} needs a whole number of workers of at least 1, got {count!r}")
    return [{device_label: device} for device, count in devices.items() for _ in range(count)]


def check_placement(scaling: ScalingConfig, timeout_s: float) -> None:
    """Wait until the live nodes could hold the smallest group that is asked for, were they free.

    Ray Train itself waits for ever for a node that never comes. While this waits it also asks for the room, so that
    an autoscaler hears of it.

    Args:
        scaling: the group asked for.
        timeout_s: how long to wait for nodes.

    Raises:
        ConfigError: no such nodes came; names what is missing and the labels that the cluster has.
    """
    selectors = _selector_per_worker(scaling)
    bundle = _resources_per_worker(scaling)
    if not unplaced(live_nodes(), selectors, bundle):
        return
    logger.info("waiting up to %.0f s for nodes that meet %s", timeout_s, _told(Counter(map(_text, selectors))))
    deadline = time.monotonic() + timeout_s
    with _asked_for(selectors, bundle):
        while missing := unplaced(nodes := live_nodes(), selectors, bundle):
            if time.monotonic() >= deadline:
                raise ConfigError(_complaint(nodes, missing, bundle, timeout_s))
            time.sleep(min(_POLL_S, max(deadline - time.monotonic(), 0.0)))


def check_elastic(scaling: ScalingConfig) -> None:
    """Refuse what keeps an elastic group from ever growing or shrinking.

    Raises:
        ConfigError: a list of label selectors with a range of workers: Ray Train gives a smaller group the first ones
            of the list, and waits for ever for the node that it has lost.
    """
    if scaling.min_workers < scaling.max_workers and isinstance(scaling.label_selector, list):
        kinds: dict[str, list[str]] = {}
        for selector in scaling.label_selector:
            for key, value in selector.items():
                kinds.setdefault(key, []).append(value)
        one = {key: f"in({', '.join(dict.fromkeys(values))})" for key, values in kinds.items()}
        raise ConfigError(
            f"num_workers={scaling.num_workers} with one label selector per worker cannot shrink: give one selector "
            f"for all, such as label_selector={one}"
        )


def devices_asked_for(scaling: ScalingConfig, device_label: str) -> list[str] | None:
    """Return the kind of device that each worker's selector pins, or None unless all of them pin one."""
    wanted = [selector.get(device_label, "") for selector in _selector_per_worker(scaling)]
    pinned = [value for value in wanted if value and not value.startswith(("!", "in("))]
    return pinned if len(pinned) == scaling.max_workers else None


def live_nodes() -> list[Node]:
    """Return the nodes that are alive."""
    return [Node(labels=n["Labels"], resources=n["Resources"]) for n in ray.nodes() if n["Alive"]]


def selector_matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with ``labels`` meets a selector in Ray's syntax: ``v``, ``!v``, ``in(v, w)``, ``!in(v, w)``."""
    return all(_value_matches(wanted, labels.get(key)) for key, wanted in selector.items())


def unplaced(
    nodes: Sequence[Node], selectors: Sequence[Mapping[str, str]], bundle: Mapping[str, float]
) -> Counter[str]:
    """Place workers on the nodes' total resources, the choosiest first, and return the selectors left over.

    Args:
        nodes: where they may go.
        selectors: one per worker; an empty one goes anywhere.
        bundle: resources that each worker takes.

    Returns:
        How often each selector, as text, found no room; empty if the whole group fits.
    """
    room = [dict(node.resources) for node in nodes]
    choices = [[k for k, node in enumerate(nodes) if selector_matches(s, node.labels)] for s in selectors]
    missing: Counter[str] = Counter()
    for worker in sorted(range(len(selectors)), key=lambda w: len(choices[w])):
        for k in choices[worker]:
            if all(room[k].get(name, 0.0) >= amount for name, amount in bundle.items()):
                for name, amount in bundle.items():
                    room[k][name] -= amount
                break
        else:
            missing[_text(selectors[worker])] += 1
    return missing


def _value_matches(wanted: str, value: str | None) -> bool:
    parsed = _OPERATOR.fullmatch(wanted)
    assert parsed is not None  # the pattern takes any text
    listed = parsed["values"]
    values = [item.strip() for item in listed.split(",")] if listed is not None else [parsed["value"]]
    return (value in values) != bool(parsed["negated"])


def _selector_per_worker(scaling: ScalingConfig) -> list[dict[str, str]]:
    """The selectors of the smallest group; Ray Train likewise takes the first ones of a list."""
    least: int = scaling.min_workers
    match scaling.label_selector:
        case None:
            return [{}] * least
        case dict() as one:
            return [one] * least
        case several:
            return list(several[:least])


def _resources_per_worker(scaling: ScalingConfig) -> dict[str, float]:
    """Ray Train's documented defaults: a CPU, or where GPUs are used a GPU; what is given replaces them."""
    given = scaling.resources_per_worker
    bundle = {"GPU": 1.0} if scaling.use_gpu else {"CPU": 1.0}
    if given is not None:
        bundle = {"GPU": 1.0} | dict(given) if scaling.use_gpu else dict(given)
    return {name: amount for name, amount in bundle.items() if amount > 0}


@contextmanager
def _asked_for(selectors: Sequence[Mapping[str, str]], bundle: Mapping[str, float]) -> Iterator[None]:
    group = placement_group(
        bundles=[dict(bundle) for _ in selectors], bundle_label_selector=[dict(selector) for selector in selectors]
    )
    try:
        yield
    finally:
        remove_placement_group(group)


def _text(selector: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in selector.items()) or "any node"


def _told(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{count} x [{text}]" for text, count in counts.items())


def _complaint(nodes: Sequence[Node], missing: Mapping[str, int], bundle: Mapping[str, float], waited_s: float) -> str:
    has: Counter[str] = Counter()
    for node in nodes:
        labels = {key: value for key, value in node.labels.items() if key != "ray.io/node-id"}
        amounts = ", ".join(f"{node.resources.get(name, 0.0):g} {name}" for name in bundle)
        has[f"{_text(labels) if labels else 'no labels'}: {amounts}"] += 1
    needs = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    return (
        f"no node meets {_told(missing)} with {needs} per worker, after waiting {waited_s:g} s; the cluster's nodes "
        f"have {_told(dict(sorted(has.items())))}; correct the label selector or the number of workers, label a node "
        "with `ray start --labels`, or raise placement_timeout_s"
    )
