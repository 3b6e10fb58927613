"""Tables of an experiment in a Markdown page, each between the two comments that name it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from experiments._harness import Findings, Row, Scalar, Settings, parsed_apart
from experiments._harness import main as run
from workloads.arguments import Parser, filled_page

__all__ = ["fill_page", "main", "markdown_table"]

_TABLE = re.compile(r"<!-- begin (?P<name>[^>]+?) -->.*?<!-- end (?P=name) -->", re.DOTALL)


def fill_page(text: str, findings: Findings) -> str:
    """Return a page with every table between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` written anew.

    ``NAME`` is a table's name, or ``TABLE column=value`` for the rows that have the value. Tables and rows that the
    findings do not have are left alone: they are another command's.
    """

    def written(found: re.Match[str]) -> str:
        name, _, condition = found["name"].partition(" ")
        if name not in findings.tables:
            return found[0]
        rows = list(findings.tables[name])
        if condition:
            column, _, value = condition.partition("=")
            rows = [row for row in rows if str(row[column]) == value]
            rows = [{key: cell for key, cell in row.items() if key != column} for row in rows]
        if not rows:
            return found[0]
        return f"<!-- begin {found['name']} -->\n\n{markdown_table(rows)}\n<!-- end {found['name']} -->"

    return _TABLE.sub(written, text)


def markdown_table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table; the first row's keys are the columns."""
    columns = list(rows[0])
    lines = [columns, ["---" if isinstance(rows[0][column], str) else "---:" for column in columns]]
    lines += [[_cell(row[column]) for column in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Scalar) -> str:
    if value is None:
        return ""
    return str(value + 0.0 if isinstance(value, float) else value)  # no minus before a zero


def main(
    name: str, measure: Callable[[Settings], Findings], argv: Sequence[str], *, apart: Sequence[Parser] = ()
) -> None:
    """Run an experiment as ``_harness.main`` does; with ``--page FILE``, fill its tables in there too."""
    parser = Parser(add_help=False)
    parser.add_argument("--page", type=filled_page, metavar="FILE", help="a Markdown page to fill the tables in")
    known, others = parsed_apart(parser, argv)
    kept: list[Findings] = []

    def keeping(settings: Settings) -> Findings:
        kept.append(measure(settings))
        return kept[-1]

    keeping.__doc__ = measure.__doc__
    run(name, keeping, others, apart=[parser, *apart])
    if known.page is not None:
        known.page.write_text(fill_page(known.page.read_text(encoding="utf-8"), kept[-1]), encoding="utf-8")
