"""The first sentence of the page: what the run saved, or that nobody can say."""

from __future__ import annotations

from dataclasses import dataclass

from rex_ray.report.facts import Saving
from rex_ray.report.page.words import percent, seconds_text

__all__ = ["Headline", "headline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """What stands in large type.

    Attributes:
        figure: the result in a few words.
        sentence: what it compares.
        method: how it was estimated.
        run_share: length of the run's bar, in per cent of the chart's width.
        equal_share: the same of equal shares.
        low_share: where the interval of the latter begins.
        high_share: where it ends.
        run_time: as text.
        equal_time: as text.
    """

    figure: str
    sentence: str
    method: str
    run_share: float
    equal_share: float
    low_share: float
    high_share: float
    run_time: str
    equal_time: str


def headline(saving: Saving | None) -> Headline | None:
    """Return the headline; None where the run does not hold what the estimate needs."""
    if saving is None:
        return None
    is_same = saving.low == saving.high == 0.0
    interval = f"95% interval {percent(saving.low)} to {percent(saving.high)}"
    if is_same:
        figure = "Equal shares throughout"
    elif saving.low > 0:
        figure = f"{percent(saving.fraction)} less time"
    elif saving.high < 0:
        figure = f"{percent(-saving.fraction)} more time"
    else:
        figure = "No clear difference"
    if is_same:
        sentence = "The run had the very shares that it would be compared with, so there is nothing to save or to lose."
    elif figure == "No clear difference":
        sentence = f"to equal shares of the same global batches: {percent(saving.fraction)} saved ({interval})."
    else:
        sentence = f"than equal shares of the same global batches would have taken ({interval})."
    # The interval is of the saving, so of what equal shares would have taken: the run's own time is measured.
    low_s, high_s = saving.run_s / (1.0 - saving.low), saving.run_s / max(1.0 - saving.high, 1e-3)
    reach = max(saving.run_s, saving.equal_s, low_s, high_s)
    return Headline(
        figure=figure,
        sentence=sentence,
        method=saving.method,
        run_share=100.0 * saving.run_s / reach,
        equal_share=100.0 * saving.equal_s / reach,
        low_share=100.0 * min(low_s, high_s) / reach,
        high_share=100.0 * max(low_s, high_s) / reach,
        run_time=seconds_text(saving.run_s),
        equal_time=seconds_text(saving.equal_s),
    )
