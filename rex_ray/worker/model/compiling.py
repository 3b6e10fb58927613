"""Beside torch.compile: hooks that it does not look into, and steps in which it was at work.

A model may be compiled before ``session.prepare`` or after it. Compiled with hooks around it, a model gets them
compiled, too, and ours hold what changes from step to step, which would be taken for constants.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from rex_ray.core.types import StepFlag
from rex_ray.worker.step import StepInHand

__all__ = ["Compiling", "Hook"]


class Hook:
    """A module's hook that a compiler calls and does not look into, and that a copy of the module has no part in.

    People copy the model that they train (an average of its weights, the best one so far), or save it whole. The copy
    belongs to no session: its calls are not steps, and what a session holds can be neither copied nor saved.

    Args:
        function: the hook.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Be copied and saved as a hook that does nothing."""
        return Hook, (_nothing,)

    def shield(self) -> None:
        """Hide it from the compiler, which is there."""
        self._function = torch.compiler.disable(self._function)


class Compiling:
    """Watches for the compiler. It is seconds to import, so it is looked at only where somebody else imported it.

    Args:
        hooks: of the prepared model, to hide once the compiler is there.
    """

    def __init__(self, hooks: list[Hook]) -> None:
        self._hooks = hooks
        self._num_graphs = _num_graphs()

    def step_begins(self) -> None:
        """Hide the hooks if the compiler has come; before any forward pass that it could see."""
        if self._hooks and "torch._dynamo" in sys.modules:
            for hook in self._hooks:
                hook.shield()
            self._hooks = []

    def step_ends(self, step: StepInHand) -> None:
        """Mark a step in which a graph was compiled as warming up: its seconds say nothing of a device.

        A new number of rows is a new shape, so the first steps after a change of shares compile at times.
        """
        now = _num_graphs()
        if now != self._num_graphs:
            self._num_graphs = now
            step.flags |= StepFlag.WARM_UP


def _nothing(*_: Any, **__: Any) -> None:
    """Change neither what a module is given nor what it returns."""


def _num_graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
