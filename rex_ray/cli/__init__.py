"""The command line: ``rex-ray demo | plan | simulate | replay | report | audit | doctor | env``.

Everything heavy is imported inside the command that needs it: ``rex-ray --help`` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rex_ray.cli import cluster, forecasts, journals
from rex_ray.core.errors import ConfigError, RexError

__all__ = ["app", "main"]

EXIT_USER_ERROR = 2
EXIT_READER_GONE = 141  # what a shell says of any command whose reader has closed the pipe

app = typer.Typer(
    name="rex-ray",
    help="Fast synchronous PyTorch training on clusters of mixed GPUs, as a Ray Train trainer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version  # noqa: PLC0415

        sys.stdout.write(f"rex-ray {version('rex-ray')}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help="Policy to run; repeat for several. Also rex-no-trigger and rex-no-search.",
            show_default="those that the scenario compares",
        ),
    ] = None,
    scenario: Annotated[
        str,
        typer.Option(
            help="static (a mixed cluster), transient (workers that slow down), growth (of the global batch) or tiles "
            "(step times that no smooth curve fits)."
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
) -> None:
    """Train on an emulated mixed cluster, once per policy, and print what was gained.

    \b
    Examples:
    rex-ray demo --quick
    rex-ray demo -p bsp -p rex --workers T4=3 --workers V100=1
    rex-ray demo --scenario transient --output out/transient
    """  # noqa: D301 - the help reads it: lines stay lines
    counts = _worker_counts(workers or [])
    from rex_ray.demo.comparison import run_demo  # noqa: PLC0415
    from rex_ray.demo.scenarios import make_settings  # noqa: PLC0415

    settings = make_settings(scenario, quick=quick, seed=seed, workers=counts, num_epochs=epochs, data_dir=data_dir)
    run_demo(settings, policy or None, output)


def _worker_counts(entries: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for entry in entries:
        kind, _, count = entry.partition("=")
        if not (kind and count.isdecimal() and int(count) > 0):
            raise ConfigError(f"--workers {entry!r} is not KIND=COUNT; write for example --workers T4=2")
        counts[kind] = counts.get(kind, 0) + int(count)
    return counts


for _command in (forecasts.plan, forecasts.simulate, journals.replay, journals.report, journals.audit, cluster.doctor):
    app.command()(_command)


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show versions, devices and memory: what a bug report needs."""
    from rex_ray.cli.environment import describe_environment  # noqa: PLC0415

    found = describe_environment()
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _environment_rows(found):
        table.add_row(name, value)
    Console().print(table)


def _environment_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("python", found["python"]), ("platform", found["platform"])]
    rows += [(name, installed or "not installed") for name, installed in found["packages"].items()]
    rows += [("CPUs", str(found["num_cpus"])), ("memory", f"{found['memory_bytes'] / 2**30:.1f} GiB")]
    devices = [
        f"{device['name']}, {device['memory_bytes'] / 2**30:.1f} GiB, compute capability {device['compute_capability']}"
        for device in found["devices"]
    ]
    rows += [(f"CUDA device {index}", device) for index, device in enumerate(devices)]
    return rows if devices else [*rows, ("CUDA devices", "none")]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; an error that we raise on purpose is one clear message, never a traceback.

    A reader that stops early (``| head``) is no finding: the exit code is never the 1 of ``replay --check``.
    """
    try:
        app(args=arguments)
    except RexError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}")
        sys.exit(EXIT_USER_ERROR)
    except SystemExit as stopped:
        if isinstance(stopped.__context__, BrokenPipeError) or not _is_flushed():
            sys.exit(EXIT_READER_GONE)
        raise


def _is_flushed() -> bool:
    """Write out what is buffered; False where nobody reads it, and then nothing is written any more."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True
