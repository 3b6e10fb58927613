"""The command about a cluster that is running: ``rex-ray doctor``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

__all__ = ["EXIT_CODES", "doctor"]

EXIT_CODES = {"fine": 0, "warnings": 1, "cannot work": 2}


def doctor(
    address: Annotated[
        str | None,
        typer.Option(
            help="A running Ray cluster; `local` starts one on this machine.",
            show_default="the cluster that this machine is part of",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, metavar="S", help="Limit of the probes' start, and again of their all-reduce.")
    ] = 30.0,
    label: Annotated[
        str, typer.Option(help="Node label that names a kind of device, as RexConfig.device_label does.")
    ] = "ray.io/accelerator-type",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Look at a cluster before training on it: devices, versions, labels, and a timed all-reduce.

    Exit codes: 0 fine, 1 warnings that matter, 2 cannot work.

    Example: rex-ray doctor --address ray-head:6379 --timeout 60
    """
    from rex_ray.cli.examining import examination_document, print_examination  # noqa: PLC0415
    from rex_ray.train.preflight import connected, examine  # noqa: PLC0415

    with connected(address):
        found = examine(label, timeout)
    if as_json:
        sys.stdout.write(json.dumps(examination_document(found), indent=2) + "\n")
    else:
        print_examination(found, Console())
    if code := EXIT_CODES[found.verdict]:
        raise typer.Exit(code)
