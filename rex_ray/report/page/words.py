"""How the page writes times, shares of time and ratios."""

from __future__ import annotations

__all__ = ["percent", "ratio_text", "seconds_text", "signed_seconds"]


def seconds_text(seconds: float) -> str:
    """A time in the unit that a reader would choose."""
    if abs(seconds) < 1.0:
        return f"{1e3 * seconds:.0f} ms"
    if abs(seconds) < 100.0:
        return f"{seconds:.1f} s"
    if abs(seconds) < 600.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if abs(seconds) < 7200.0 else f"{seconds / 3600:.2f} h"


def signed_seconds(seconds: float) -> str:
    """A time that was lost, or with a minus gained."""
    return f"{'−' if seconds < 0 else '+'}{seconds_text(abs(seconds))}"


def percent(fraction: float) -> str:
    """A fraction in per cent, with a decimal where there are few of them."""
    value = 100.0 * fraction
    return (f"{value:.0f}%" if abs(value) >= 10 else f"{value:.1f}%").replace("-", "−")


def ratio_text(ratio: float) -> str:
    """How many times as much."""
    return f"×\u00a0{ratio:.2f}" if ratio < 10 else f"×\u00a0{ratio:.0f}"
