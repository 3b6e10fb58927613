"""Calls of the command line, as a shell would make them, within this process."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass

from rex_ray.cli import main

__all__ = ["Called", "called"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """What came of a call."""

    code: int
    out: str
    err: str


def called(*arguments: str) -> Called:
    """Call ``rex-ray`` with these arguments; an exception that leaves it is a traceback, and raised."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as stopped:
            code = stopped.code
    assert code is None or isinstance(code, int)
    return Called(code=code or 0, out=out.getvalue(), err=err.getvalue())
