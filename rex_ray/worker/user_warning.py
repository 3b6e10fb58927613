"""Warnings that name the user's line, however deep in the library they are found."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn"]

# torch calls the hooks in which some of them are found, and is called by the line that is meant.
_LIBRARIES = ("rex_ray", "torch")


def warn(message: str) -> None:
    """Warn at the innermost line that belongs neither to this library nor to torch.

    A count of frames, as ``warnings.warn`` takes it, is wrong as soon as a function in between is divided; Python 3.12
    knows ``skip_file_prefixes``, 3.11 does not.
    """
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level + 1)
