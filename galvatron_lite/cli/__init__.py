"""The command line: one file a command. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import sys

import typer

from galvatron_lite.cli.plan import plan_command
from galvatron_lite.cli.profile import profile_command
from galvatron_lite.cli.validate import validate_command
from galvatron_lite.errors import GalvatronError

app = typer.Typer(
    name="galvatron",
    help="Plan how a PyTorch model is split over many devices, layer by layer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("profile")(profile_command)
app.command("plan")(plan_command)
app.command("validate")(validate_command)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Plan how a PyTorch model is split over many devices, layer by layer."""
    if version:
        from galvatron_lite import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of ``galvatron``: errors of ours end in one line on standard error and exit status 1."""
    try:
        app()
    except GalvatronError as error:
        print(f"galvatron: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(f"galvatron: {error}", file=sys.stderr)
        sys.exit(1)
