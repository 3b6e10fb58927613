"""The session of this process, for loops that are handed nothing: ``get_session()``, and ``session`` itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from rex_ray.core.errors import ConfigError
from rex_ray.worker.session import Session

__all__ = ["get_session", "refuse_second", "session", "standing"]

_standing: Session | None = None


def get_session() -> Session:
    """Return the session of this process.

    Raises:
        ConfigError: there is none; the loop does not run under a RexTrainer.
    """
    if _standing is None:
        raise ConfigError("no session is open: run this loop with RexTrainer, or inside `with open_session(...)`")
    return _standing


def refuse_second() -> None:
    """Refuse to open a session beside another.

    Raises:
        ConfigError: one is open.
    """
    if _standing is not None:
        raise ConfigError("a session is open already in this process")


@contextmanager
def standing(opened: Session) -> Iterator[None]:
    """Have ``opened`` be the session of this process within the block."""
    global _standing  # noqa: PLW0603 - one session per process, like the process group it wraps
    _standing = opened
    try:
        yield
    finally:
        _standing = None


class _Current:
    """Passes every use on to the session that is open at that moment, so that it can be imported before there is one.

    It is pickled by its name: a loop that mentions it is sent to workers, each of which has a session of its own.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever copies or inspects it asks for these, also where no session is open
            raise AttributeError(name)
        return getattr(get_session(), name)

    def __reduce__(self) -> str:
        return "session"


session = cast(Session, _Current())
"""The session of this process; the same as ``get_session()`` at each use."""
