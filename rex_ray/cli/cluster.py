"""The commands about what is there: ``rex-ray doctor`` (a running cluster) and ``rex-ray env`` (this machine)."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from rex_ray.cli.output import JsonOption, answering, write_json
from rex_ray.cli.streams import answer_console

__all__ = ["VERDICT_CODES", "doctor", "env"]

VERDICT_CODES = {"fine": 0, "warnings": 1, "cannot work": 2}


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
    as_json: JsonOption = False,
) -> None:
    """Look at a cluster before training on it: devices, versions, labels, and a timed all-reduce.

    Exit codes: 0 fine, 1 warnings that matter, 2 cannot work.

    Example: rex-ray doctor --address ray-head:6379 --timeout 60
    """
    with answering(as_json):
        from rex_ray.cli.examining import examination_document, print_examination  # noqa: PLC0415
        from rex_ray.train.preflight import connected, examine  # noqa: PLC0415

        with connected(address):
            found = examine(label, timeout)
    if as_json:
        write_json(examination_document(found))
    else:
        print_examination(found, answer_console())
    if code := VERDICT_CODES[found.verdict]:
        raise typer.Exit(code)


def env(as_json: JsonOption = False) -> None:
    """Show versions, devices and memory: what a bug report needs.

    Example: rex-ray env --json
    """
    from rex_ray.cli.environment import describe_environment  # noqa: PLC0415

    found = describe_environment()
    if as_json:
        write_json(found)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _environment_rows(found):
        table.add_row(name, value)
    answer_console().print(table)


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
