"""``session``: the session of this process, for loops that are handed nothing."""

from __future__ import annotations

from typing import Any, cast

from rex_ray.worker.session import Session, get_session

__all__ = ["session"]


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
