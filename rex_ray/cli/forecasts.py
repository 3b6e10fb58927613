"""The commands about runs that were never made: ``rex-ray plan`` and ``rex-ray simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rex_ray.cli import completing
from rex_ray.cli.output import JsonOption, write_json
from rex_ray.cli.streams import answer_console
from rex_ray.core.errors import ConfigError

__all__ = ["plan", "simulate"]

ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-c",
        metavar="COUNTxDEVICE,...",
        help="Devices, e.g. 4xT4,4xV100.",
        autocompletion=completing.clusters,
    ),
]
WorkloadOption = Annotated[
    str,
    typer.Option("--workload", "-w", help="What is trained, e.g. resnet50.", autocompletion=completing.workloads),
]
BatchOption = Annotated[
    int | None,
    typer.Option("--global-batch-size", "-b", min=1, help="Rows per step.", show_default="the profile's reference"),
]


def plan(  # noqa: PLR0913, PLR0917 - a command's options, by name, each with its default
    cluster: ClusterOption,
    workload: WorkloadOption,
    limits: Annotated[
        bool, typer.Option("--limits", help="The most that any method can give, against fixed batches.")
    ] = False,
    global_batch_size: BatchOption = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="Kind of device whose measured all-reduce times count, or 'none'.",
            show_default="T4; with --profile, the run's own",
        ),
    ] = None,
    prices: Annotated[
        bool, typer.Option("--prices", help="Also time and cost of every smaller mix, and which to rent.")
    ] = False,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE=USD",
            help="Price per hour of a kind, and --prices with it; repeat.",
            show_default="on-demand prices",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Plan with the step times that this run measured.",
            show_default="public ones",
            autocompletion=completing.runs,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the split, step time, best batch and time to the target of a cluster, before it is rented.

    \b
    Examples:
    rex-ray plan -c 4xT4,4xV100 -w resnet50 --prices --price T4=0.35
    rex-ray plan -c 8xT4 -w resnet50 --profile runs/imagenet
    rex-ray plan -c 4xT4,4xV100 -w resnet50 --limits
    """  # noqa: D301 - the help reads it: lines stay lines
    if limits:
        if prices or price or profile:
            raise ConfigError("--limits knows public profiles and no prices: leave out --prices, --price and --profile")
        from rex_ray.cli import attainable  # noqa: PLC0415

        if as_json:
            document = attainable.limits_document(cluster, workload, global_batch_size, network or "T4")
            write_json(document)
        else:
            attainable.print_limits(cluster, workload, global_batch_size, network or "T4", answer_console())
        return
    from rex_ray.cli import planning  # noqa: PLC0415

    found = planning.plan_document(
        cluster, workload, global_batch_size, network, run=profile, with_prices=prices, prices=price or ()
    )
    if as_json:
        write_json(found)
    else:
        planning.print_plan(found, answer_console())


def simulate(  # noqa: PLR0913, PLR0917 - a command's options, by name, each with its default
    cluster: ClusterOption,
    workload: WorkloadOption,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help="Policy to run; repeat for several.",
            show_default="rex",
            autocompletion=completing.policies,
        ),
    ] = None,
    global_batch_size: BatchOption = None,
    disturbance: Annotated[
        str,
        typer.Option(
            help="Who slows down: none, random:RATE (episodes per 1,000 steps of a worker; measured: 0 to 2.4) or lbb "
            "(one worker after the other).",
            autocompletion=completing.disturbances,
        ),
    ] = "none",
    noise: Annotated[
        str,
        typer.Option(
            help="Noise of step times: quiet, dedicated or shared machines.", autocompletion=completing.noises
        ),
    ] = "dedicated",
    network: Annotated[
        str, typer.Option(help="Kind of device whose measured all-reduce times count, or 'none'.")
    ] = "T4",
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each policy, with seeds from --seed on.")] = 1,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="NAME=VALUE",
            help="Option of the policies that have it; repeat.",
            show_default="none",
        ),
    ] = None,
    decisions: Annotated[
        bool, typer.Option("--decisions", help="Also every decision in order, with its reason.")
    ] = False,
    journal: Annotated[
        Path | None,
        typer.Option(help="Folder for the runs' journals, for rex-ray replay, report and audit.", show_default="none"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train in virtual time, to the workload's target, with the controller of a live run; the oracle beside it.

    \b
    Examples:
    rex-ray simulate -c 2xT4,2xV100 -w resnet18 -p bsp -p rex
    rex-ray simulate -c 2xT4,2xV100 -w resnet18 --disturbance random:1 --decisions
    rex-ray simulate -c 8xT4 -w resnet50 --option trigger=off --journal runs
    """  # noqa: D301 - the help reads it: lines stay lines
    from rex_ray.cli import simulating  # noqa: PLC0415
    from rex_ray.cli.worlds import World  # noqa: PLC0415

    world = World(
        cluster=cluster,
        workload=workload,
        global_batch_size=global_batch_size,
        network=network,
        noise=noise,
        disturbance=disturbance,
    )
    options = simulating.options_by_policy(policy or ["rex"], option or [])
    found = simulating.simulation_document(world, options, seeds=range(seed, seed + seeds), journal=journal)
    if as_json:
        write_json(found)
    else:
        simulating.print_simulation(found, answer_console(), decisions=decisions)
