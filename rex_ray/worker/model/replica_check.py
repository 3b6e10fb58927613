"""Whether the ranks' copies of the model are still the same, bit by bit.

Synchronous training rests on it, and nothing fails when it stops being so: replicas that drifted apart (an update from
a local gradient, a layer that draws its own numbers, a faulty device) go on reducing gradients of different models.
Every so many steps each rank hashes its parameters; the hashes travel in the background and are read at a later update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from rex_ray.core.errors import RexError
from rex_ray.worker.group.last_words import named_ranks
from rex_ray.worker.group.side_group import PendingValues, SideGroup
from rex_ray.worker.measuring.probes import DeferredTensor
from rex_ray.worker.model.listing import listed
from rex_ray.worker.step import StepInHand

__all__ = ["ReplicaCheck", "hash_of"]

_HOST_BLOCK, _DEVICE_BLOCK = 1 << 16, 1 << 22
"""Numbers that are hashed at once: what is held beside the model stays in a host's cache, and is few launches for a
device (twice 16 MB)."""

_Named: TypeAlias = Mapping[str, torch.Tensor]


class ReplicaCheck:
    """Compares replicas every so many steps, at steps that all ranks agree on.

    Args:
        model: the bare model.
        group: ranks to compare with.
        interval_steps: steps between two comparisons; the first update is one. 0: none.
    """

    def __init__(self, model: nn.Module, group: SideGroup, interval_steps: int) -> None:
        # What the user told DDP to leave alone is each rank's own.
        ignored = frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        self._model = model
        self._ignored = ignored
        # A sharded parameter has no replica.
        self._parameters = {
            name: p for name, p in model.named_parameters() if name not in ignored and not hasattr(p, "to_local")
        }
        self._group = group
        self._interval_steps = interval_steps
        self._optimizer: torch.optim.Optimizer | None = None
        self._due: int | None = None
        self._mixer = _Mixer()
        self._hashed: tuple[str, Sequence[str], DeferredTensor] | None = None
        self._sent: tuple[str, Sequence[str], torch.Tensor, PendingValues] | None = None

    @property
    def is_on(self) -> bool:
        """Whether there is anything to compare."""
        return self._interval_steps > 0 and self._group.size > 1

    def before_update(self, step: StepInHand, optimizer: torch.optim.Optimizer) -> None:
        """Read what was compared, send what was hashed, hash where that is due: each at an update of its own.

        Raises:
            RexError: replicas differ.
        """
        self._optimizer = optimizer
        if not self.is_on:
            return
        if self._sent is not None:
            self._read()
        elif self._hashed is not None:
            self._send()
        elif self._due is None or step.plan.step >= self._due:
            self._due = step.plan.step + self._interval_steps
            self._hash(f"before the update of step {step.plan.step}", self._parameters)

    def settle(self) -> None:
        """End the comparison under way, waiting for the others: before a save, and at the end.

        Raises:
            RexError: replicas differ.
        """
        if self._hashed is not None:
            self._send()
        if self._sent is not None:
            self._read()

    def compare_all(self, when: str) -> None:
        """Compare parameters and the buffers that a save holds, once those were made alike; waits for the others.

        Raises:
            RexError: replicas differ.
        """
        if not self.is_on:
            return
        self.settle()
        self._hash(when, {**self._parameters, **dict(self._kept_buffers())})
        self.settle()

    # --- inside

    def _kept_buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        for prefix, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                full = f"{prefix}.{name}" if prefix else name
                if name not in module._non_persistent_buffers_set and full not in self._ignored:
                    yield full, buffer

    def _hash(self, when: str, tensors: _Named) -> None:
        if tensors:
            hashes = torch.stack([self._mixer.hash_of(tensor) for tensor in tensors.values()])
            self._hashed = (when, list(tensors), DeferredTensor(hashes))

    def _send(self) -> None:
        assert self._hashed is not None
        when, names, deferred = self._hashed
        hashes, self._hashed = deferred.wait(), None
        total = self._mixer.hash_of(hashes).reshape(1)
        self._sent = (when, names, hashes, self._group.gather_later(total, f"the hash of the model {when}"))

    def _read(self) -> None:
        assert self._sent is not None
        (when, names, hashes, pending), self._sent = self._sent, None
        totals = pending.read().reshape(-1).tolist()
        if len(set(totals)) > 1:
            everyones = self._group.gather(hashes, f"the hashes of each parameter {when}")
            rates = self._group.gather_objects(self._rates(), "the learning rates of each rank")
            raise RexError(_story(when, names, totals, everyones, rates))

    def _rates(self) -> tuple[float, ...]:
        """Return the learning rates that the user's schedule left, which should be alike, too."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return tuple(float(group["lr"]) for group in groups if "lr" in group)


class _Mixer:
    """Hashes tensors: a sum over their bits, each word times a factor of its place, without any rounding.

    A sum of whole numbers does not depend on the order in which a device adds, so different cards agree on it, while a
    sum of floats would not; and the factors let no two entries change places unnoticed.
    """

    def __init__(self) -> None:
        self._factors: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def hash_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the hash as a 0-d tensor of 64 bits, on the tensor's device."""
        if not tensor.numel():
            return torch.zeros((), dtype=torch.int64, device=tensor.device)
        words = _words(tensor.detach())
        size = _HOST_BLOCK if words.device.type == "cpu" else _DEVICE_BLOCK
        factors, products = self._factors_on(words.device, min(len(words), size))
        blocks = [
            torch.mul(block, factors[: len(block)], out=products[: len(block)]).sum(dtype=torch.int64)
            for block in words.split(size)
        ]
        return blocks[0] if len(blocks) == 1 else self.hash_of(torch.stack(blocks))

    def _factors_on(self, device: torch.device, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return factors, and room for products: to ask for that anew costs a host more than the hash."""
        known = self._factors.get(device)
        if known is None or len(known[0]) < count:
            factors = _scrambled(torch.arange(count, dtype=torch.int64, device=device))
            known = self._factors[device] = (factors, torch.empty_like(factors))
        return known


def _scrambled(places: torch.Tensor) -> torch.Tensor:
    """Return an odd factor of 32 bits per place: odd, so that no bit of a word is lost in the product.

    Mixed as in splitmix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators"), in whole numbers, so
    that every device and version of torch has the same.
    """
    mixed = places * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> 31)).to(torch.int32) | 1


def hash_of(tensor: torch.Tensor) -> int:
    """Return a hash of a tensor's bits that depends on their order and on nothing else."""
    return int(_Mixer().hash_of(tensor))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as whole numbers of 32 bits, without a copy where it is contiguous and has them."""
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.int8)
    size = flat.dtype.itemsize
    return flat.view({1: torch.int8, 2: torch.int16}.get(size, torch.int32)).to(torch.int32)


def _story(
    when: str,
    names: Sequence[str],
    totals: Sequence[int],
    everyones: torch.Tensor,
    rates: Sequence[tuple[float, ...]],
) -> str:
    """Say which ranks differ from most, and in what; and why, where it is the learning rate."""
    ((most, count),) = Counter(totals).most_common(1)
    others = [rank for rank, total in enumerate(totals) if total != most]
    reference = everyones[totals.index(most)]
    differing = [name for k, name in enumerate(names) if (everyones[:, k] != reference[k]).any()]
    against = "the other" if count == 1 else f"the other {count}"
    differ = f"the model's replicas differ {when}: {listed(differing)} of {named_ranks(others)} from {against}"
    if len(set(rates)) > 1:
        return (
            f"{differ}. So do their learning rates: {_rates_in_words(rates)}. A schedule that follows a metric, as "
            "ReduceLROnPlateau does, must be given the same one on all ranks: session.pool(total, count)"
        )
    return (
        f"{differ}. Something "
        "changed them on one rank alone: an update outside of the prepared optimizer, a random choice inside the "
        "model, a faulty device; set replica_check_interval_steps=0 if they are meant to differ"
    )


def _rates_in_words(rates: Sequence[tuple[float, ...]]) -> str:
    """Say which ranks have which rates, one for each group of parameters."""
    ranks: dict[tuple[float, ...], list[int]] = {}
    for rank, each in enumerate(rates):
        ranks.setdefault(each, []).append(rank)
    return listed([f"{listed([f'{rate:g}' for rate in each])} on {named_ranks(who)}" for each, who in ranks.items()])
