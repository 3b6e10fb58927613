"""Standard output and error as they come: closed, full, cut off by a pipe's reader, or unable to spell a character."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, Final

from rich.console import Console

__all__ = ["answer_console", "cannot_write", "end_output", "made_usable"]

_UNWRITABLE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EFBIG})
_FULL_WIDTH: Final = 10_000


def made_usable() -> bool:
    """Fill what a shell has closed (``2>&-``), and have no character be an error; False where stdout is closed.

    A closed descriptor would be given to the next file that is opened, which Ray's processes then write to.
    """
    has_stdout = sys.stdout is not None
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # An en dash in a C locale, a file's name in no encoding: shown as its number.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    return has_stdout


def answer_console() -> Console:
    """Return where an answer's tables go: as wide as a terminal, and into a file or a pipe as wide as they are."""
    is_sized = sys.stdout.isatty() or os.environ.get("COLUMNS")
    return Console(width=None if is_sized else _FULL_WIDTH)


def cannot_write(error: OSError) -> bool:
    """Whether an error says that an open file, such as stdout, takes no more; a file that is opened has a name."""
    return error.errno in _UNWRITABLE and error.filename is None


def end_output() -> OSError | None:
    """Write out what is buffered; return why that fails, and then nothing is written any more."""
    try:
        sys.stdout.flush()
    except OSError as error:
        nowhere: Any = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return error
    return None
