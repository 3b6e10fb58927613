"""The command that trains for real on an emulated cluster: ``rex-ray demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rex_ray.cli import completing
from rex_ray.cli.entries import enter_once
from rex_ray.cli.output import JsonOption, answering, write_json
from rex_ray.cli.streams import answer_console
from rex_ray.core.errors import ConfigError

__all__ = ["demo"]


def demo(  # noqa: PLR0913, PLR0917 - a command's options, by name, each with its default
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help="Policy to run; repeat for several. Also rex-no-trigger and rex-no-search.",
            show_default="those that the scenario compares",
            autocompletion=completing.contestants,
        ),
    ] = None,
    scenario: Annotated[
        str,
        typer.Option(
            help="static (a mixed cluster), transient (workers that slow down), growth (of the global batch) or tiles "
            "(step times that no smooth curve fits).",
            autocompletion=completing.scenarios,
        ),
    ] = "static",
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for summary.json and the runs.")] = Path(
        "rex-ray-demo"
    ),
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    workers: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND=COUNT", help="Workers of a kind of device; repeat.", show_default="T4=2 and V100=2"),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs per run.", show_default="enough for the target accuracy")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of Fashion-MNIST's idx files, for growth.",
            show_default="the usual places, else generated rows",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few epochs: the way it works, not the target.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train on an emulated mixed cluster, once per policy, and print what was gained.

    \b
    Examples:
    rex-ray demo --quick
    rex-ray demo -p bsp -p rex --workers T4=3 --workers V100=1
    rex-ray demo --scenario transient --output out/transient
    """  # noqa: D301 - the help reads it: lines stay lines
    counts = _worker_counts(workers or [])
    with answering(as_json):
        from rex_ray.demo.comparison import run_demo  # noqa: PLC0415
        from rex_ray.demo.scenarios import make_settings  # noqa: PLC0415

        settings = make_settings(scenario, quick=quick, seed=seed, workers=counts, num_epochs=epochs, data_dir=data_dir)
        # With --json stdout is turned aside meanwhile, so that the table stands on stderr.
        document = run_demo(settings, policy or None, output, answer_console(), progress=Console(stderr=True))
    if as_json:
        write_json(document)


def _worker_counts(entries: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for entry in entries:
        kind, _, count = entry.partition("=")
        if not (kind and count.isdecimal() and int(count) > 0):
            raise ConfigError(f"--workers {entry!r} is not KIND=COUNT; write for example --workers T4=2")
        enter_once(counts, "--workers", kind, int(count))
    return counts
