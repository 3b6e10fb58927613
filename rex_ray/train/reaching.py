"""Connects to a Ray cluster that is named, or is said to be there, and says soon where it is not.

Ray asks an address at which nobody answers twenty times, some forty seconds each, and says little meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any, Final

import ray
from ray._private import services

from rex_ray.core.errors import ConfigError
from rex_ray.train.telemetry import first_line

__all__ = ["connect"]

_BROWSERS: Final = frozenset({"http", "https"})
_KNOCK_LIMIT_S: Final = 5.0
_MISMATCH: Final = "Version mismatch"
_ATTEMPTS: Final = "RAY_gcs_server_port_wait_time_s"
"""Ray's name; for whoever connects to a cluster it is a count of attempts."""


def connect(address: str | None = None, **options: Any) -> None:
    """Call ``ray.init``, having made sure that somebody listens where it is going to ask.

    Args:
        address: as ``ray.init`` takes it; None: as it finds a cluster by itself, else it starts one here.
        options: of ``ray.init``.

    Raises:
        ConfigError: there is no cluster at the address, or none to be found.
    """
    named = os.environ.get("RAY_ADDRESS") if address in {None, "auto"} else address
    if _is_for_others(named):  # has a limit of its own
        with _refusing(address, named):
            ray.init(address=address, **options)
        return
    with _refusing(address, named):
        _check_form(named)
        found = services.canonicalize_bootstrap_address(address)
        if found is not None:
            _knock(found)
    if found is None:
        ray.init(address=address, **options)
        return
    with _refusing(address, named), _one_attempt():
        ray.init(address=found, **options)


def _is_for_others(named: str | None) -> bool:
    """Whether Ray hands the address to its client, or to a package of somebody's that the scheme names."""
    scheme, found, _ = (named or "").partition("://")
    return bool(found) and scheme not in _BROWSERS


def _check_form(named: str | None) -> None:
    """Ray logs a traceback for an empty host, which is what a script with an unset variable asks for."""
    if not named or named in {"auto", "local"}:
        return
    if "://" in named:
        raise ValueError("that is an address for `ray job` and browsers")
    host, _, port = named.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("that is not HOST:PORT")


def _knock(found: str) -> None:
    """Have an unknown name, a port where nobody listens, and a firewall fail at once, each in its own words."""
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_LIMIT_S).close()
    except OSError as error:
        raise ConnectionError(f"nobody answers at {found}: {error.strerror or error}") from error


@contextlib.contextmanager
def _one_attempt() -> Iterator[None]:
    """What listens and does not answer as Ray does, such as the dashboard, is asked once and not for minutes."""
    if _ATTEMPTS in os.environ:
        yield
        return
    os.environ[_ATTEMPTS] = "1"
    try:
        yield
    finally:
        os.environ.pop(_ATTEMPTS, None)


@contextlib.contextmanager
def _refusing(address: str | None, named: str | None) -> Iterator[None]:
    """Have what Ray or the network says of an address be the user's to mend, in one line."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:  # a ConnectionError is an OSError
        said = " ".join(str(error).split())
        if _MISMATCH in said:
            where = address if address not in {None, "auto"} else named or "this machine"
            raise ConfigError(f"the Ray cluster at {where} takes no process like this one ({said})") from error
        remedy = "set it to HEAD:6379, the port that `ray start --head` prints; 8265 is the dashboard's"
        if address not in {None, "auto"}:
            where = f"no Ray cluster at {address}"
        elif named:
            where, remedy = f"no Ray cluster at RAY_ADDRESS={named}", f"{remedy}; or unset it"
        else:
            where = "this machine is part of no running Ray cluster"
            remedy = "start one with `ray start --head`; `ray stop` forgets one that is gone"
        raise ConfigError(f"{where} ({first_line(_cause(error))}); {remedy}") from error


def _cause(error: Exception) -> Exception:
    """Return what Ray found wrong where it hides that behind "Failed to connect", unless it is but a traceback."""
    cause = error.__cause__
    return cause if isinstance(cause, RuntimeError) and "Traceback" not in first_line(cause) else error
