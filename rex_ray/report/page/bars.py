"""Rows with a bar each: where the time went, and what other policies would have taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rex_ray.report.facts import Estimate, LedgerRow
from rex_ray.report.page.words import percent, ratio_text, seconds_text, signed_seconds

__all__ = ["BarRow", "estimate_bars", "ledger_bars"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarRow:
    """One row; lengths are in per cent of the widest.

    Attributes:
        name: of the row.
        value: as text.
        beside: a second value as text.
        start: where the bar begins.
        length: how long it is.
        low: where its range begins, or None.
        high: where it ends.
        note: a sentence.
        is_own: whether it is the run's own.
        is_gain: whether it counts the other way.
    """

    name: str
    value: str
    beside: str
    start: float
    length: float
    low: float | None = None
    high: float | None = None
    note: str = ""
    is_own: bool = False
    is_gain: bool = False


def ledger_bars(ledger: Sequence[LedgerRow]) -> list[BarRow]:
    """Rows of the ledger around a common zero; their sum last."""
    if not ledger:
        return []
    total_s, total = sum(row.seconds for row in ledger), sum(row.fraction for row in ledger)
    low = min(0.0, *(row.seconds for row in ledger))
    high = max(0.0, *(row.seconds for row in ledger))
    extent = high - low or 1.0
    zero = 100.0 * -low / extent
    bars = [
        BarRow(
            name=row.name,
            value=signed_seconds(row.seconds),
            beside=percent(row.fraction),
            start=zero if row.seconds >= 0 else zero - 100.0 * -row.seconds / extent,
            length=100.0 * abs(row.seconds) / extent,
            note=row.meaning,
            is_gain=row.seconds < 0,
        )
        for row in ledger
    ]
    bars.append(
        BarRow(
            name="in all",
            value=signed_seconds(total_s),
            beside=percent(total),
            start=zero,
            length=0.0,
            is_own=True,
            note="what the run took beyond the oracle",
        )
    )
    return bars


def estimate_bars(estimates: Sequence[Estimate]) -> list[BarRow]:
    """A row per policy, the run's own first, with the range of its replays."""
    if not estimates:
        return []
    reach = max(max(row.high_s, row.seconds) for row in estimates) or 1.0
    return [
        BarRow(
            name=row.policy,
            value=seconds_text(row.seconds),
            beside=ratio_text(row.to_run),
            start=0.0,
            length=100.0 * row.seconds / reach,
            low=100.0 * row.low_s / reach,
            high=100.0 * row.high_s / reach,
            note=row.remark,
            is_own=k == 0,
        )
        for k, row in enumerate(estimates)
    ]
