"""The page: one HTML file that opens anywhere, without a network and without scripts."""

from __future__ import annotations

from importlib.metadata import version
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rex_ray.report.charts.figures import Figure, device_colours, legend, metric_figures, own_time_figure, split_figure
from rex_ray.report.charts.growth_figures import growth_figure, noise_figure
from rex_ray.report.page.tables import (
    DECISION_COLUMNS,
    FINDING_COLUMNS,
    MOST_FINDINGS,
    TRIAL_COLUMNS,
    decision_rows,
    finding_rows,
    key_figures,
    trial_rows,
)
from rex_ray.report.reading.schema import RunData

__all__ = ["render_html"]


def render_html(run: RunData) -> str:
    """Render a run as one self-contained HTML page.

    Args:
        run: what to show; a run without a complete step gives a page that says so.

    Returns:
        The page's text, to be written as UTF-8.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("rex_ray.report.page").joinpath("run.html.j2").read_text(encoding="utf-8"))
    return template.render(
        run=run,
        version=version("rex-ray"),
        key_figures=key_figures(run),
        legend=legend(run.groups[-1], device_colours(run.groups)) if run.groups else (),
        charts=_charts(step_figures(run)),
        metrics=_charts(metric_figures(run.metrics)),
        columns=DECISION_COLUMNS,
        decisions=decision_rows(run.decisions),
        trial_columns=TRIAL_COLUMNS,
        trials=trial_rows(run.searches),
        finding_columns=FINDING_COLUMNS,
        findings=finding_rows(run.findings),
        findings_left_out=max(len(run.findings) - MOST_FINDINGS, 0),
    )


def step_figures(run: RunData) -> tuple[Figure, ...]:
    """The charts over optimizer steps; none for a run without a complete step."""
    if not run.groups:
        return ()
    colours = device_colours(run.groups)
    figures = [split_figure(run.groups, colours), own_time_figure(run.groups, run.decisions, colours)]
    if run.noise is not None:
        figures.append(noise_figure(run.noise, run.groups))
    if (growth := growth_figure(run.decisions, run.groups)) is not None:
        figures.append(growth)
    return tuple(figures)


def _charts(figures: tuple[Figure, ...]) -> list[tuple[Figure, Markup]]:
    # Our own drawings, whose texts are escaped where they are drawn.
    return [(figure, Markup(figure.wide + figure.narrow)) for figure in figures]
