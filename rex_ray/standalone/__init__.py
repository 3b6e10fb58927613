"""Training under plain ``torchrun``, without Ray: the same sessions, policies, controller, journal and reports.

A control server, a process of its own beside rank 0, takes the place of Ray's control actor, and a small TCP link that
of its queue. The public name is fetched when it is first used: the server's own process needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rex_ray.standalone.entry import training

__all__ = ["training"]


def __getattr__(name: str) -> object:
    """Fetch the public name from its module (PEP 562)."""
    if name != "training":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rex_ray.standalone.entry import training  # noqa: PLC0415 - loads torch

    return training
