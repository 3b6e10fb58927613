"""Where workers may go: label selectors per worker, and a check that the cluster can meet them at all."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.train import ScalingConfig
from ray.util.placement_group import placement_group, remove_placement_group

from rex_ray.core.errors import ConfigError, nearest_name_hint
from rex_ray.train.scaling import resources_per_worker, selector_per_worker

__all__ = [
    "Node",
    "check_placement",
    "devices_asked_for",
    "label_selectors",
    "live_nodes",
    "selector_matches",
    "unplaced",
]

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_ROUNDING = 1e-6
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
    selectors = selector_per_worker(scaling)
    bundle = resources_per_worker(scaling)
    strategy: str = scaling.placement_strategy
    if not unplaced(live_nodes(), selectors, bundle, strategy):
        return
    logger.info("waiting up to %.0f s for nodes that meet %s", timeout_s, _told(Counter(map(_text, selectors))))
    deadline = time.monotonic() + timeout_s
    with _asked_for(selectors, bundle, strategy):
        while missing := unplaced(nodes := live_nodes(), selectors, bundle, strategy):
            if time.monotonic() >= deadline:
                raise ConfigError(_complaint(nodes, missing, bundle, strategy, timeout_s))
            time.sleep(min(_POLL_S, max(deadline - time.monotonic(), 0.0)))


def devices_asked_for(scaling: ScalingConfig, device_label: str) -> list[str] | None:
    """Return the kind of device that each worker's selector pins, or None unless all of them pin one."""
    wanted = [selector.get(device_label, "") for selector in selector_per_worker(scaling)]
    pinned = [value for value in wanted if value and not value.startswith(("!", "in("))]
    return pinned if len(pinned) == scaling.max_workers else None


def live_nodes() -> list[Node]:
    """Return the nodes that are alive."""
    return [Node(labels=n["Labels"], resources=n["Resources"]) for n in ray.nodes() if n["Alive"]]


def selector_matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with ``labels`` meets a selector in Ray's syntax: ``v``, ``!v``, ``in(v, w)``, ``!in(v, w)``."""
    return all(_value_matches(wanted, labels.get(key)) for key, wanted in selector.items())


def unplaced(
    nodes: Sequence[Node],
    selectors: Sequence[Mapping[str, str]],
    bundle: Mapping[str, float],
    strategy: str = "PACK",
) -> Counter[str]:
    """Place as many workers as the nodes' total resources hold, and return the selectors left over.

    Args:
        nodes: where they may go.
        selectors: one per worker; an empty one goes anywhere.
        bundle: resources that each worker takes.
        strategy: Ray's name for how they may lie together: ``"STRICT_PACK"`` is one node for all, ``"STRICT_SPREAD"``
            a node for each; others only prefer something.

    Returns:
        How often each selector, as text, found no room; empty if the whole group fits.
    """
    slots = [_slots(node, bundle) for node in nodes]
    wanted = Counter(map(_text, selectors))
    by_text = {_text(selector): selector for selector in selectors}
    admitted = {
        text: [k for k, node in enumerate(nodes) if slots[k] and selector_matches(selector, node.labels)]
        for text, selector in by_text.items()
    }
    if strategy == "STRICT_PACK":
        held = [
            min(count, sum(wanted[text] for text in wanted if k in admitted[text])) for k, count in enumerate(slots)
        ]
        best = max(range(len(nodes)), key=held.__getitem__, default=None)
        slots = [count if k == best else 0 for k, count in enumerate(slots)]
    elif strategy == "STRICT_SPREAD":
        slots = [min(count, 1) for count in slots]
    return wanted - _placed(wanted, admitted, slots)


def _slots(node: Node, bundle: Mapping[str, float]) -> int:
    """How many workers a node has room for."""
    return min(int(node.resources.get(name, 0.0) / amount + _ROUNDING) for name, amount in bundle.items())


def _placed(wanted: Mapping[str, int], admitted: Mapping[str, Sequence[int]], slots: Sequence[int]) -> Counter[str]:
    """Return how many workers of each selector can be placed together: a largest matching, by augmenting paths.

    The choosiest come first, so that whoever is left over is the one that most nodes would do for.
    """
    taken: list[Counter[str]] = [Counter() for _ in slots]
    placed: Counter[str] = Counter()
    for text in sorted(wanted, key=lambda text: len(admitted[text])):
        while placed[text] < wanted[text] and _place_one(text, admitted, slots, taken):
            placed[text] += 1
    return placed


def _place_one(
    text: str, admitted: Mapping[str, Sequence[int]], slots: Sequence[int], taken: Sequence[Counter[str]]
) -> bool:
    """Place one more worker, moving others where that makes room; False where nothing does."""
    wants: dict[int, str] = {}  # node: whose worker would go there
    leaves: dict[str, int] = {}  # selector: the node that one of its workers would leave
    waiting = deque([text])
    while waiting:
        mover = waiting.popleft()
        for node in admitted[mover]:
            if node in wants:
                continue
            wants[node] = mover
            if taken[node].total() < slots[node]:
                _move(node, wants, leaves, taken)
                return True
            for other in [other for other in taken[node] if other != text and other not in leaves]:
                leaves[other] = node
                waiting.append(other)
    return False


def _move(free: int, wants: Mapping[int, str], leaves: Mapping[str, int], taken: Sequence[Counter[str]]) -> None:
    """Move one worker after the other, from the free slot back to the worker that has no place yet."""
    while True:
        mover = wants[free]
        taken[free][mover] += 1
        if mover not in leaves:
            return
        free = leaves[mover]
        taken[free] -= Counter([mover])


def _value_matches(wanted: str, value: str | None) -> bool:
    parsed = _OPERATOR.fullmatch(wanted)
    assert parsed is not None  # the pattern takes any text
    listed = parsed["values"]
    values = [item.strip() for item in listed.split(",")] if listed is not None else [parsed["value"]]
    return (value in values) != bool(parsed["negated"])


@contextmanager
def _asked_for(selectors: Sequence[Mapping[str, str]], bundle: Mapping[str, float], strategy: str) -> Iterator[None]:
    group = placement_group(
        bundles=[dict(bundle) for _ in selectors],
        strategy=strategy,
        bundle_label_selector=[dict(selector) for selector in selectors],
    )
    try:
        yield
    finally:
        remove_placement_group(group)


def _text(selector: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in selector.items()) or "any node"


def _told(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{count} x [{text}]" for text, count in counts.items())


def _complaint(
    nodes: Sequence[Node], missing: Mapping[str, int], bundle: Mapping[str, float], strategy: str, waited_s: float
) -> str:
    has: Counter[str] = Counter()
    for node in nodes:
        labels = {key: value for key, value in node.labels.items() if key != "ray.io/node-id"}
        amounts = ", ".join(f"{node.resources.get(name, 0.0):g} {name}" for name in bundle)
        has[f"{_text(labels) if labels else 'no labels'}: {amounts}"] += 1
    needs = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    known = {name for node in nodes for name in node.resources if not name.startswith("node:")}
    unknown = "".join(
        f"; no node has any {name!r}{nearest_name_hint(name, known)}" for name in bundle if name not in known
    )
    together = {"STRICT_PACK": " on one node with the others", "STRICT_SPREAD": " on a node of its own"}
    where = f"{together[strategy]} (placement_strategy={strategy!r})" if strategy in together else ""
    return (
        f"no node meets {_told(missing)} with {needs} per worker{where}, after waiting {waited_s:g} s; the cluster's "
        f"nodes have {_told(dict(sorted(has.items())))}{unknown}; correct the label selector or the number of workers, "
        "label a node with `ray start --labels`, or raise placement_timeout_s"
    )
