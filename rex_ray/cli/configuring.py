"""The commands about configuration files: ``rex-ray config init | validate | show``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from rex_ray.cli import completing
from rex_ray.cli.output import EXIT_FINDING, JsonOption, write_json
from rex_ray.core.errors import ConfigError

__all__ = ["app"]

app = typer.Typer(help="Write, check and look at a YAML file for RexConfig.", no_args_is_help=True)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; - for standard output.")] = Path(
        "rex.yaml"
    ),
    global_batch_size: Annotated[
        int, typer.Option("--global-batch-size", "-b", help="Rows per optimizer step over all workers.")
    ] = 256,
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="Who decides.", autocompletion=completing.policies)
    ] = "rex",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a file with every key, its meaning and its default.

    \b
    Examples:
    rex-ray config init
    rex-ray config init big.yaml --global-batch-size 1024 --policy rex
    """  # noqa: D301 - the help reads it: lines stay lines
    from rex_ray.config import RexConfig  # noqa: PLC0415
    from rex_ray.config.wording import commented_yaml, meanings_in  # noqa: PLC0415

    config = RexConfig(global_batch_size=global_batch_size, policy=policy)
    defaults = RexConfig(global_batch_size=global_batch_size).to_mapping()
    values = config.to_mapping()
    text = commented_yaml(
        values, meanings_in(RexConfig.__doc__), lambda key: key != "global_batch_size" and values[key] == defaults[key]
    )
    to_stdout = str(file) == "-"
    if not to_stdout:
        _write(file, text, force=force)
    if as_json:
        write_json({"file": None if to_stdout else str(file), "text": text, "values": values})
    else:
        sys.stdout.write(text if to_stdout else f"{file}\n")


@app.command()
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="YAML files.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Check files by themselves, without the environment: all that is wrong with each, by line.

    Ends with 1 where a file cannot work.

    Example: rex-ray config validate rex.yaml big.yaml
    """
    from rex_ray.config import RexConfig  # noqa: PLC0415

    found: list[dict[str, Any]] = []
    for file in files:
        try:
            RexConfig.from_yaml(file)
            problems = []
        except ConfigError as error:
            problems = str(error).splitlines()
        found.append({"file": str(file), "is_valid": not problems, "problems": problems})
    if as_json:
        write_json({"files": found})
    else:
        console = Console(soft_wrap=True, highlight=False)
        for one in found:
            if one["is_valid"]:
                console.print(f"{escape(one['file'])}: [green]fine[/]")
            for problem in one["problems"]:
                console.print(escape(problem if one["file"] in problem else f"{one['file']}: {problem}"))
    if not all(one["is_valid"] for one in found):
        raise typer.Exit(EXIT_FINDING)


@app.command()
def show(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A YAML file.", show_default="the environment alone")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what counts in the end, and where each value comes from: a default, the file, or the environment.

    \b
    Examples:
    rex-ray config show rex.yaml
    REX_RAY_SEED=3 rex-ray config show rex.yaml --json
    """  # noqa: D301 - the help reads it: lines stay lines
    from rex_ray.config import RexConfig  # noqa: PLC0415
    from rex_ray.config.wording import yaml_with_origins  # noqa: PLC0415

    layers = RexConfig.layers(file)
    values = RexConfig(**layers.effective()).to_mapping()

    def origin_of(key: tuple[str, ...]) -> str:
        return layers.origin_of(key) or "default"

    if as_json:
        origins: dict[str, Any] = {key: origin_of((key,)) for key in values}
        options = {option: origin_of(("policy_options", option)) for option in values["policy_options"]}
        write_json({"values": values, "origins": origins, "policy_options_origins": options})
    else:
        sys.stdout.write(yaml_with_origins(values, origin_of))


def _write(file: Path, text: str, *, force: bool) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w" if force else "x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{file} is there already; choose another FILE, or --force to replace it") from error
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; choose another FILE") from error
