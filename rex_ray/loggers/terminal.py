"""Lines of a log and a progress line on one terminal."""

from __future__ import annotations

import logging
import os
from typing import Final, TextIO

__all__ = ["CLEAR_LINE", "is_terminal", "line_handler"]

CLEAR_LINE: Final = "\r\x1b[K"


def is_terminal(stream: TextIO) -> bool:
    """Whether a line can be rewritten there."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def line_handler(stream: TextIO) -> logging.StreamHandler[TextIO]:
    """Return what logs whole lines, ``rex_ray: ...``, also where a progress line stands: that is written anew later."""
    handler = logging.StreamHandler(stream)
    clear = CLEAR_LINE if is_terminal(stream) else ""
    handler.setFormatter(logging.Formatter(f"{clear}rex_ray: %(message)s"))
    return handler
