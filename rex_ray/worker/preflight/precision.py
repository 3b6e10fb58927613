"""One lower precision for all ranks: gradients that some ranks rounded otherwise are averaged without any error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from rex_ray.core.errors import ConfigError
from rex_ray.worker.group.side_group import SideGroup
from rex_ray.worker.preflight.facts import WorkerFacts
from rex_ray.worker.preflight.judging import common_dtype, refuse_dtype, refuse_mix

__all__ = ["AutocastDtype", "Precision", "refuse_mixed_gradients"]

_log = logging.getLogger("rex_ray")

AutocastDtype: TypeAlias = Literal["auto"] | torch.dtype

_DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision:
    """Chooses what to autocast to, the same on every rank.

    Args:
        group: all ranks.
        facts: returns every rank's report; asked at the first use, on every rank.
        device: tells where the model computes.
    """

    def __init__(
        self,
        group: SideGroup,
        facts: Callable[[], tuple[WorkerFacts, ...]],
        device: Callable[[], torch.device],
    ) -> None:
        self._group = group
        self._facts = facts
        self._device = device
        self._chosen: dict[str, torch.dtype | None] = {}

    def autocast(self, dtype: AutocastDtype) -> AbstractContextManager[Any]:
        """Return a context in which the forward pass runs in the common precision.

        Raises:
            ConfigError: see ``Session.autocast``.
        """
        wanted = "auto" if dtype == "auto" else str(dtype).removeprefix("torch.")
        if wanted not in self._chosen:
            self._chosen[wanted] = self._agreed(wanted)
        chosen = self._chosen[wanted]
        return nullcontext() if chosen is None else torch.autocast(self._device().type, dtype=chosen)

    def _agreed(self, wanted: str) -> torch.dtype | None:
        if wanted != "auto" and wanted not in _DTYPES:
            raise ConfigError(
                f"session.autocast takes 'auto', torch.bfloat16 or torch.float16, got {wanted!r}; leave it out to "
                "compute in the model's own precision"
            )
        asked = self._group.gather_objects(wanted, "what every rank wants to autocast to")
        refuse_mix("the precisions of session.autocast", asked, "Ask for the same on every rank, or for 'auto'")
        workers = self._facts()
        if wanted != "auto":
            refuse_dtype(workers, wanted)
            return _DTYPES[wanted]
        common = common_dtype(workers)
        if self._group.rank == 0:
            _log.info("autocast: %s on all ranks", common or "none, in the model's own precision,")
            if common == "float16":
                _log.info("float16 needs a gradient scaler: session.prepare(..., scaler=torch.amp.GradScaler())")
        return None if common is None else _DTYPES[common]


def refuse_mixed_gradients(group: SideGroup, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse ranks whose gradients would have different types: a reduction reads the others' bytes as its own.

    Raises:
        ConfigError: names who has what.
    """
    counts: dict[str, int] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            name = str(parameter.dtype).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + 1
    own = ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"
    refuse_mix(
        "the trained parameters",
        group.gather_objects(own, "the types of every rank's gradients"),
        "Gradients are averaged as they are, so give every rank the same model in the same precision; "
        "session.autocast(dtype='auto') finds one that all devices have",
    )
