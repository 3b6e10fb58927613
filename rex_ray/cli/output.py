"""What a command writes where: its answer on stdout, and with ``--json`` one JSON document there and nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any

import typer

from rex_ray.core.plain_json import finite_json

__all__ = [
    "EXIT_CODES",
    "EXIT_FINDING",
    "EXIT_INTERRUPTED",
    "EXIT_READER_GONE",
    "EXIT_USER_ERROR",
    "JsonOption",
    "answering",
    "write_json",
]

EXIT_FINDING = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # what a shell says of any command that Ctrl-C has ended
EXIT_READER_GONE = 141  # and of any command whose reader has closed the pipe

EXIT_CODES = (
    "Exit codes: 0 done; 1 a finding (replay --check: different; config validate: a file cannot work; doctor: a "
    "warning); 2 something that you can mend, in one line (doctor: the cluster cannot work); 130 Ctrl-C; 141 the "
    "reader of a pipe has left."
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


@contextmanager
def answering(as_json: bool) -> Iterator[None]:
    """With ``as_json``, let nothing that is written while the body runs reach stdout; stderr gets it.

    Ray prints, and so do processes that it starts: so the file descriptor is turned aside, not Python's object alone.
    """
    if not as_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def write_json(document: Any) -> None:
    """Write one JSON document; what is no finite number becomes null, since JSON has no word for it."""
    sys.stdout.write(json.dumps(finite_json(document), indent=2, allow_nan=False) + "\n")
