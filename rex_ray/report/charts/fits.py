"""Step-time curves of the kinds of device, with the measured times that they go through."""

from __future__ import annotations

from collections.abc import Sequence

from rex_ray.report.charts.figure import Figure, Key, axes, both_widths, spread
from rex_ray.report.charts.kinds import NUM_HUES, point_mark
from rex_ray.report.charts.svg import DASHES, Frame, Scale, line_path, text
from rex_ray.report.facts import CurveFit

__all__ = ["fits_figure"]

_TITLE = "Step-time curves"


def fits_figure(fits: Sequence[CurveFit], hues: dict[str, int]) -> Figure:
    """Points: median own time at each share, with quartiles; lines: the curve that shares are read off."""
    reach = max(float(max(fit.rows.max(), fit.fitted_rows.max())) for fit in fits)
    highest = max(float(max(fit.high_s.max(), fit.fitted_s.max())) for fit in fits)
    unit, factor = ("ms", 1e3) if highest < 1.0 else ("s", 1.0)
    description = "; ".join(
        f"{fit.device}: {fit.rows.size} shares measured, from {fit.rows[0]:,.0f} to {fit.rows[-1]:,.0f} rows"
        for fit in fits
    )

    def draw(frame: Frame, variant: str) -> str:
        x, y = frame.x_scale(0.0, 1.04 * reach), frame.y_scale(0.0, 1.08 * highest * factor)
        body = [axes(frame, x, y, "rows of one worker", f"own time, {unit}")]
        body += [_draw_fit(fit, hues.get(fit.device, 0), factor, x, y) for fit in fits]
        body.append(_names(fits, hues, factor, x, y))
        return frame.wrap("".join(body), title=_TITLE, description=description, variant=variant)

    wide, narrow = both_widths(draw, right=(64, 44))
    keys = tuple(
        Key(
            mark=f'<g class="{_css(hue)}"><path class="line" d="M2 7H32"/>{point_mark(17, 7, hue)}</g>',
            meaning=fit.device,
        )
        for fit, hue in ((fit, hues.get(fit.device, 0)) for fit in fits)
    )
    caption = (
        "What a worker of each kind takes on its own by the rows it is given: points are medians over clean steps, "
        "their bars the middle half, lines the fitted curve. The exact split gives every worker the rows that its "
        "curve finishes in the same time."
    )
    return Figure(
        title=_TITLE,
        caption=caption,
        wide=wide,
        narrow=narrow,
        keys=keys,
        columns=("device", "rows", f"median, {unit}", f"middle half, {unit}", "worker-steps"),
        rows=tuple(row for fit in fits for row in _numbers(fit, factor)),
    )


def _names(fits: Sequence[CurveFit], hues: dict[str, int], factor: float, x: Scale, y: Scale) -> str:
    """Name every curve where it ends, which is not the right edge for most."""
    wanted = [float(y(fit.fitted_s[-1] * factor)) for fit in fits]
    places = spread(wanted, y.end + 4, y.start - 2)
    parts = []
    for fit, height in zip(fits, places, strict=True):
        at = float(x(fit.fitted_rows[-1])) + 7
        parts.append(text(at, height + 4, fit.device, css=f"name {_css(hues.get(fit.device, 0))}"))
    return "".join(parts)


def _css(hue: int) -> str:
    return f"k{hue % NUM_HUES}"


def _draw_fit(fit: CurveFit, hue: int, factor: float, x: Scale, y: Scale) -> str:
    dash = DASHES[hue % len(DASHES)]
    attributes = f' stroke-dasharray="{dash}"' if dash else ""
    parts = [f'<path class="line"{attributes} d="{line_path(x(fit.fitted_rows), y(fit.fitted_s * factor))}"/>']
    points = zip(
        x(fit.rows).tolist(),
        y(fit.own_s * factor).tolist(),
        y(fit.low_s * factor).tolist(),
        y(fit.high_s * factor).tolist(),
        strict=True,
    )
    for at, middle, low, high in points:
        parts.append(f'<path class="whisker" d="M{at:.1f} {low:.1f}V{high:.1f}"/>{point_mark(at, middle, hue)}')
    return f'<g class="{_css(hue)}">{"".join(parts)}</g>'


def _numbers(fit: CurveFit, factor: float) -> list[tuple[str, ...]]:
    return [
        (
            fit.device,
            f"{rows:,.0f}",
            f"{own * factor:.1f}",
            f"{low * factor:.1f} – {high * factor:.1f}",
            f"{steps:,.0f}",
        )
        for rows, own, low, high, steps in zip(fit.rows, fit.own_s, fit.low_s, fit.high_s, fit.num_steps, strict=True)
    ]
