"""What an experiment leaves behind in the repository: every cell, the tables, the charts, and the command.

``cells.csv`` has a row per cell and ``curves.csv.gz`` a row per look at the validation metric, both tidy; ``README.md``
has command, settings, figures and tables; ``findings.json`` the same for programs; ``index.html`` shows all of it and
needs no other file.
"""

from __future__ import annotations

import base64
import csv
import gzip
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments._harness import Findings, Row, Scalar, Settings, to_document
from experiments._page import markdown_table
from experiments.lab import charts
from experiments.lab.cells import TRACE
from experiments.lab.study import Study

__all__ = ["record"]

_CHARTS = {
    "metric.png": "The test metric over virtual time on the headline, medians and quartiles over seeds; a dot is the "
    "median time to the target.",
    "times.png": "Time to the target against the oracle's or the default's, on the headline: medians, and lines from "
    "the lowest to the highest seed.",
    "worlds.png": "The same in the other worlds.",
    "ledger.png": "Where the time goes that the oracle does not need; the parts add up to the whole.",
}
_DIGITS = 6
_MOST_PANELS = 6


def record(folder: Path, name: str, command: str, settings: Settings, study: Study) -> None:
    """Write everything about an experiment into a folder.

    Args:
        folder: is made where it is missing; older files of the same names are written over.
        name: of the experiment.
        command: that made it.
        settings: what the command line asked for.
        study: what was found.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = to_document(name, command, settings, study.findings)
    (folder / "findings.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    compared = study.comparison
    cells = [{**cell.row(), **result.row()} for cell, result in zip(compared.cells, compared.results, strict=True)]
    (folder / "cells.csv").write_text(_csv(cells), encoding="utf-8")
    curves: list[Row] = [
        {
            "learner": cell.learner,
            "cluster": cell.cluster,
            "method": cell.method,
            "disturbance": cell.disturbance,
            "seed": cell.seed,
            "s": s,
            "metric": m,
        }
        for cell, result in zip(compared.cells, compared.results, strict=True)
        for s, m in zip(result.evaluated_s, result.metrics, strict=True)
    ]
    if curves:
        # Most of a megabyte otherwise. No date within: equal results are equal bytes.
        (folder / "curves.csv.gz").write_bytes(gzip.compress(_csv(curves).encode(), mtime=0))
    drawn = _draw(folder, study)
    stated = {**document["settings"]} if isinstance(document["settings"], Mapping) else {}
    (folder / "README.md").write_text(_readme(name, command, stated, study.findings, drawn), encoding="utf-8")
    (folder / "index.html").write_text(_page(folder, name, command, stated, study.findings, drawn), encoding="utf-8")


def _draw(folder: Path, study: Study) -> list[str]:
    compared, world = study.comparison, study.headline
    made = {"times.png": charts.times_chart(compared, world)}
    if study.target is not None:
        made["metric.png"] = charts.metric_chart(compared, world, study.target, metric=study.metric)
    others = [other for other in compared.worlds() if other != world][:_MOST_PANELS]
    if others:
        made["worlds.png"] = charts.worlds_chart(compared, others)
    trace = next((other for other in compared.worlds() if other.learner == TRACE), None)
    ledger = None if trace is None else charts.ledger_chart(compared, trace)
    if ledger is not None:
        made["ledger.png"] = ledger
    for file, figure in made.items():
        charts.save(figure, folder / file)
    return [file for file in _CHARTS if file in made]


def _csv(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_short(row.get(column)) for column in columns] for row in rows)
    return stream.getvalue()


def _short(value: Scalar) -> Scalar:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _readme(name: str, command: str, stated: Row, findings: Findings, drawn: Sequence[str]) -> str:
    parts = [f"# {name}\n", f"```bash\n{command}\n```\n", _listed(stated)]
    figures: list[Row] = [{"figure": figure, "value": _short(value)} for figure, value in findings.figures.items()]
    for title, rows in {"figures": figures, **findings.tables}.items():
        parts.append(f"## {title}\n\n{markdown_table(rows)}")
    parts += [f"![{_CHARTS[file]}]({file})\n" for file in drawn]
    return "\n".join(parts)


def _listed(stated: Row) -> str:
    return "Settings: " + ", ".join(f"{key} {value}" for key, value in stated.items()) + ".\n"


def _page(folder: Path, name: str, command: str, stated: Row, findings: Findings, drawn: Sequence[str]) -> str:
    figures: list[Row] = [{"figure": figure, "value": _short(value)} for figure, value in findings.figures.items()]
    body = [f"<h1>{html.escape(name)}</h1><pre>{html.escape(command)}</pre><p>{html.escape(_listed(stated))}</p>"]
    for file in drawn:
        picture = base64.b64encode((folder / file).read_bytes()).decode()
        caption = html.escape(_CHARTS[file])
        body.append(
            f'<figure><img src="data:image/png;base64,{picture}" alt="{caption}">'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    for title, rows in {"figures": figures, **findings.tables}.items():
        body.append(f"<h2>{html.escape(title)}</h2><div class=wide>{_html_table(rows)}</div>")
    return _HTML.format(title=html.escape(name), body="\n".join(body))


def _html_table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in rows[0])
    lines = [
        "".join(
            f"<td{'' if isinstance(value, str) else ' class=n'}>{html.escape('' if value is None else str(value))}</td>"
            for value in row.values()
        )
        for row in rows
    ]
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


_HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
pre {{ background: #f3f3f3; padding: .6rem; overflow-x: auto }}
figure {{ margin: 2rem 0 }} img {{ width: 100%; max-width: 46rem }} figcaption {{ color: #555 }}
.wide {{ overflow-x: auto }} table {{ border-collapse: collapse; font-size: .85rem; white-space: nowrap }}
th, td {{ padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: left }} .n {{ text-align: right }}
</style></head><body>
{body}
</body></html>
"""
