"""The command line: ``rex-ray demo | plan | simulate | replay | report | audit | doctor | env | config``.

Everything heavy is imported inside the command that needs it: ``rex-ray --help`` answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from rex_ray import __version__
from rex_ray.cli import cluster, configuring, demonstration, forecasts, journals
from rex_ray.cli.output import EXIT_CODES, EXIT_INTERRUPTED, EXIT_READER_GONE, EXIT_USER_ERROR
from rex_ray.cli.streams import cannot_write, end_output, made_usable
from rex_ray.core.errors import RexError

__all__ = ["app", "main"]


class _InterruptedError(Exception):
    """Ctrl-C, past typer: its versions differ in what they print and which code they end with."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stopped:
            raise _InterruptedError from stopped


app = typer.Typer(
    name="rex-ray",
    cls=_Commands,
    help="Fast synchronous PyTorch training on clusters of mixed GPUs, as a Ray Train trainer.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"rex-ray {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for _command in (
    demonstration.demo,
    forecasts.plan,
    forecasts.simulate,
    journals.replay,
    journals.report,
    journals.audit,
    cluster.doctor,
    cluster.env,
):
    app.command()(_command)
app.add_typer(configuring.app, name="config")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; an error that we raise on purpose is one clear message, never a traceback.

    A reader that stops early (``| head``) is no finding: the exit code is never the 1 of ``replay --check``.
    """
    if not made_usable():
        _complain("cannot write the answer: standard output is closed")
        sys.exit(EXIT_USER_ERROR)
    try:
        app(args=arguments, prog_name="rex-ray")
    except _InterruptedError:
        sys.stderr.write("interrupted\n")
        sys.exit(EXIT_INTERRUPTED)
    except RexError as error:
        _complain(str(error))
        sys.exit(EXIT_USER_ERROR)
    except OSError as error:
        if not cannot_write(error):
            raise
        end_output()
        _refuse_output(error)
    except SystemExit as stopped:
        unwritten = end_output()
        if isinstance(unwritten or stopped.__context__, BrokenPipeError):
            sys.exit(EXIT_READER_GONE)
        if unwritten is not None:
            _refuse_output(unwritten)
        raise


def _refuse_output(error: OSError) -> NoReturn:
    _complain(f"cannot write: {error.strerror}; send the output elsewhere")
    sys.exit(EXIT_USER_ERROR)


def _complain(what: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(what)}")
