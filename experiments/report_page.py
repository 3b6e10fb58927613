"""How heavy a report's page is, and how fast it opens: ``python -m experiments.report_page --json FILE``.

Runs made by hand with everything on them, from a short one to 100,000 steps and 1,024 workers, are rendered and opened
in headless Chromium at the width of a desk and of a phone. Load time is Navigation Timing's, from the start of the
navigation to the end of the load event, the median of several openings; requests beside the page itself and messages in
the console are counted, and so is what does not fit. The journal's reading is not in it.

``--pages FOLDER`` writes pictures of a run's own report there instead, cut to its upper part: ``--run RUN`` is the run.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path

from experiments._chromium import open_browser
from experiments._harness import Findings, Row, Settings, main
from experiments._report_runs import make_facts, make_run
from rex_ray.report.page.html import render_html

SIZES = ((4, 400), (8, 100_000), (64, 20_000), (1024, 400))
WIDTHS = (1280, 360)


def measure(settings: Settings) -> Findings:
    """Measure every size at every width."""
    num_openings = 3 if settings.quick else 7
    rows: list[Row] = []
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        for num_workers, num_steps in SIZES:
            run = make_run(num_workers, num_steps, num_metrics=min(num_steps, 2000))
            start = time.perf_counter()
            page = render_html(run, make_facts())
            render_s = time.perf_counter() - start
            file = Path(folder) / "page.html"
            file.write_text(page, encoding="utf-8")
            for width in WIDTHS:
                loads = [browser.open(file, width=width) for _ in range(num_openings)]
                last = loads[-1]
                outside = [request for request in last.requests if not request.startswith("data:")][1:]
                load_s = statistics.median(load.load_s for load in loads)
                rows.append(
                    {
                        "workers": num_workers,
                        "steps": num_steps,
                        "width_px": width,
                        "page_kb": round(len(page.encode()) / 1000),
                        "render_s": round(render_s, 2),
                        "load_s": round(load_s, 3),
                        "elements": last.num_nodes,
                        "requests_outside": len(outside),
                        "console_errors": len(last.errors),
                        "texts_cut_or_overlapping": len(last.clipped) + len(last.overlapping),
                        "sideways_px": last.sideways_px,
                    }
                )
            figures[f"page_kb_{num_workers}x{num_steps}"] = len(page.encode()) / 1000
            figures[f"load_s_{num_workers}x{num_steps}"] = float(rows[-2]["load_s"] or 0.0)
    return Findings(
        figures=figures,
        tables={"report page": rows},
        settings={"num_openings": num_openings},
    )


def picture(run: Path, folder: Path) -> None:
    """Write the upper part of a run's report as a desk and as a phone show it."""
    from PIL import Image  # noqa: PLC0415

    from rex_ray.cli.reporting import report_runs, write_page  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, open_browser() as browser:
        page = write_page(report_runs([run], with_estimates=False), Path(scratch) / "report.html")
        for name, width, last in (
            ("report", 1060, "own-time-per-worker"),
            ("report_phone", 390, "own-time-per-worker"),
        ):
            browser.open(page, width=width)
            bottom = browser.evaluate(
                f"Math.ceil(document.querySelector('#{last} figure').getBoundingClientRect().bottom + scrollY + 12)"
            )
            taken = Image.open(io.BytesIO(browser.screenshot(width=width, height=int(bottom))))
            taken.convert("RGB").quantize(128).save(folder / f"{name}.png", optimize=True)  # a third of the bytes
            sys.stdout.write(f"{folder / name}.png\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--pages", type=Path)
    parser.add_argument("--run", type=Path)
    known, others = parser.parse_known_args(sys.argv[1:])
    if known.pages is not None and known.run is not None:
        picture(known.run, known.pages)
    else:
        main("report_page", measure, others)
