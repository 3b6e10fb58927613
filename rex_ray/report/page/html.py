"""The page: one HTML file that opens anywhere, without a network and without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from rex_ray.report.charts.metrics import metric_figures
from rex_ray.report.facts import RunFacts
from rex_ray.report.page.comparing import compare_figures, split_ends, unique_names
from rex_ray.report.page.view import slug, view_run
from rex_ray.report.reading.schema import RunData

__all__ = ["render_comparison", "render_html"]

_WORDY = ("reason", "outcome", "in words")


def render_html(run: RunData, facts: RunFacts | None = None) -> str:
    """Render a run as one self-contained HTML page.

    Args:
        run: what to show; a run without a complete step gives a page that says so.
        facts: what was computed of it; parts that are not there are left out.

    Returns:
        The page's text, to be written as UTF-8.
    """
    view = view_run(run, facts or RunFacts())
    return _render("run.html.j2", title=run.name, view=view, anchors=view.anchors)


def render_comparison(runs: Sequence[RunData], facts: Sequence[RunFacts]) -> str:
    """Render several runs as one page: figures side by side, metrics in one chart, and each run's own sections.

    Args:
        runs: at least two; ratios are to the first.
        facts: what was computed of each.
    """
    names = unique_names([run.name for run in runs])
    named = [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    pairs = zip(named, facts, strict=True)
    views = [view_run(run, fact, prefix=f"r{number}-") for number, (run, fact) in enumerate(pairs, start=1)]
    metrics = metric_figures({run.name: run.metrics for run in named})
    split_columns, splits = split_ends(named)
    anchors = [("figures", "Key figures"), *((f"all-{at}", one.title) for at, one in enumerate(metrics, start=1))]
    anchors += [("splits", "Splits"), *((f"{view.prefix}run", view.run.name) for view in views)]
    title = names[0] + "".join(f", {name}" for name in names[1:-1]) + f" and {names[-1]}"
    return _render(
        "compare.html.j2",
        title=title if len(title) <= 80 else f"{len(named)} runs compared",
        views=views,
        anchors=anchors,
        comparison=compare_figures(named, facts),
        metrics=metrics,
        split_columns=split_columns,
        splits=splits,
    )


def _render(template: str, **values: Any) -> str:
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_source),
    )
    # Our own drawings, whose texts are escaped where they are drawn.
    environment.filters["drawing"] = Markup
    environment.filters["slug"] = slug
    environment.globals["wordy"] = _WORDY
    css = Markup(_source("page.css"))  # our own file
    return environment.get_template(template).render(version=version("rex-ray"), css=css, **values)


def _source(name: str) -> str:
    return files("rex_ray.report.page").joinpath(name).read_text(encoding="utf-8")
