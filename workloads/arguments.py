"""Command lines that judge their values as they read them: what is wrong is said in one line, before anything starts.

Workloads and experiments share this; it is free of Ray and torch.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

from rex_ray.core.errors import ConfigError

__all__ = ["Parser", "filled_page", "number", "output_file", "output_folder", "refusing", "several", "whole"]

EXIT_USER_ERROR = 2  # as in rex_ray.cli

_T = TypeVar("_T")


class Parser(argparse.ArgumentParser):
    """A parser that raises ``ConfigError`` where argparse would print its usage and leave."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise ConfigError(f"{message} (--help lists the options)")


@contextmanager
def refusing() -> Iterator[None]:
    """End the process where a ``ConfigError`` comes through: one line on stderr, exit code 2, no traceback."""
    try:
        yield
    except ConfigError as error:
        print("error:", *str(error).splitlines(), file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def whole(at_least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = at_least - 1
        if value < at_least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {at_least}, got {text!r}")
        return value

    return read


def number(*, above: float = -math.inf, at_least: float = -math.inf, below: float = math.inf) -> Callable[[str], float]:
    """Return a reader of finite numbers within bounds."""
    bounds = {"above": above, "at least": at_least, "below": below}
    stated = " and ".join(f"{name} {bound:g}" for name, bound in bounds.items() if math.isfinite(bound))

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and above < value < below and value >= at_least):
            raise argparse.ArgumentTypeError(f"must be a finite number {stated}, got {text!r}")
        return value

    return read


def several(read: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    """Return a reader of values separated by commas."""
    return lambda text: [read(part) for part in text.split(",")]


def output_file(text: str) -> Path:
    """Read the name of a file that can be written; its folders may be missing."""
    path = Path(text)
    with _named(text, "name another file"):
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file in it")
        if path.exists():
            path.open("ab").close()
        else:
            _check_folder(path.parent, text)
    return path


def output_folder(text: str) -> Path:
    """Read the name of a folder that can be written to or made."""
    path = Path(text)
    with _named(text, "name another folder"):
        _check_folder(path, text)
    return path


def filled_page(text: str) -> Path:
    """Read the name of a page that is there and can be written anew."""
    path = Path(text)
    with _named(text, "name a Markdown page that is there"):
        path.read_text(encoding="utf-8")
        path.open("ab").close()
    return path


@contextmanager
def _named(text: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no UTF-8 text; {remedy}") from error
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {error.strerror}; {remedy}") from error


def _check_folder(folder: Path, text: str) -> None:
    """Have the folder, or the first of its parents that is there, take a file that is gone at once."""
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: {str(folder)!r} is a file, not a folder; name another place")
    with tempfile.TemporaryFile(dir=folder):
        pass
