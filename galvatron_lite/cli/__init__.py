"""The command line. Commands import what they need when they run, so that the program starts quickly."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, NoReturn

import typer
import typer.core

from galvatron_lite.cli.accuracy import EPILOG, calibrate_command, validate_command
from galvatron_lite.cli.compare import compare_command, evaluate_command
from galvatron_lite.cli.explain import explain_command
from galvatron_lite.cli.export import export_command, plan_export_command, plan_import_command, profile_import_command
from galvatron_lite.cli.launch import SETTINGS, launch_command
from galvatron_lite.cli.oracle import oracle_command
from galvatron_lite.cli.plan import plan_app
from galvatron_lite.cli.profile import profile_command, profile_transfer_command
from galvatron_lite.cli.report import report_command
from galvatron_lite.cli.runs import adapt_app, checkpoint_app, diagnose_command
from galvatron_lite.cli.verify import verify_command
from galvatron_lite.errors import GalvatronError, suggestion
from galvatron_lite.launch.error_reports import keep

_CLOSED_PIPE = 128 + 13  # exit status of a program ended by SIGPIPE
_ORDER = (
    "profile", "plan", "launch", "verify", "explain", "report", "evaluate", "compare", "export", "diagnose",
    "checkpoint", "adapt", "validate", "calibrate", "oracle", "profile-import", "profile-transfer",
)  # fmt: skip
"""Order of the commands in the help."""
_TRAIN, _PLANS, _RUNS = "Plan and train", "Understand a plan", "Understand a run"
_ACCURACY = "Understand the predictions"


def _hide_types(parameters: list[Any]) -> list[Any]:
    """Show flags without a type in the help, as they take no value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class Commands(typer.core.TyperGroup):
    """The commands. ``profile import`` and ``profile transfer`` are commands of their own beside ``profile MODEL``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the name of a command, the command, and its arguments."""
        if args[:1] == ["profile"] and args[1:2] in (["import"], ["transfer"]):
            return f"profile {args[1]}", self.commands[f"profile-{args[1]}"], args[2:]
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take several choices after one ``--fix`` of commands that have it: ``--fix tp=8 pp=2``."""
        command = self.get_command(ctx, args[0]) if args else None
        if command is None or not any("--fix" in parameter.opts for parameter in command.params):
            return super().parse_args(ctx, args)  # launch hands options on to a script
        repeated: list[str] = []
        follows = False  # whether all words since --fix are choices
        for word in args:
            is_choice = "=" in word and not word.startswith("-")
            if follows and is_choice and repeated[-1] != "--fix":
                repeated.append("--fix")
            repeated.append(word)
            follows = word == "--fix" or (follows and is_choice)
        return super().parse_args(ctx, repeated)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _hide_types(command.get_params(ctx))
        return command

    def get_params(self, ctx: Any) -> Any:
        """Return the options of the program."""
        return _hide_types(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands in the order of the help."""
        return sorted(super().list_commands(ctx), key=_ORDER.index)


app = typer.Typer(
    name="galvatron", cls=Commands, no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False
)
app.command("profile", rich_help_panel=_TRAIN)(profile_command)
app.command("profile-import", hidden=True)(profile_import_command)
app.command("profile-transfer", hidden=True)(profile_transfer_command)
app.add_typer(plan_app, name="plan", rich_help_panel=_TRAIN)
plan_app.command("import")(plan_import_command)
plan_app.command("export")(plan_export_command)
app.command("launch", context_settings=SETTINGS, rich_help_panel=_TRAIN)(launch_command)
app.command("verify", rich_help_panel=_TRAIN)(verify_command)
app.command("explain", rich_help_panel=_PLANS)(explain_command)
app.command("report", rich_help_panel=_PLANS)(report_command)
app.command("evaluate", rich_help_panel=_PLANS)(evaluate_command)
app.command("compare", rich_help_panel=_PLANS)(compare_command)
app.command("export", rich_help_panel=_PLANS)(export_command)
app.command("diagnose", rich_help_panel=_RUNS)(diagnose_command)
app.add_typer(checkpoint_app, name="checkpoint", rich_help_panel=_RUNS)
app.add_typer(adapt_app, name="adapt", rich_help_panel=_RUNS)
app.command("validate", epilog=EPILOG, rich_help_panel=_ACCURACY)(validate_command)
app.command("calibrate", rich_help_panel=_ACCURACY)(calibrate_command)
app.command("oracle", rich_help_panel=_ACCURACY)(oracle_command)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """Find the fastest parallel training plan for a PyTorch model, and run it unmodified."""
    if version:
        from galvatron_lite import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of ``galvatron``: errors print one line to standard error; exit status 1, or 2 for wrong usage.

    A closed pipe (``| head -1``) ends the program quietly. Characters that the terminal's encoding lacks (``LC_ALL=C``)
    are printed as question marks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        _run()
    except BrokenPipeError:
        # Drop what is still buffered, so that the interpreter's last flush succeeds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_CLOSED_PIPE)
    except GalvatronError as error:
        print(f"galvatron: {error}", file=sys.stderr)
        keep(error)
        sys.exit(1)
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        print(f"galvatron: {place}{error.strerror or error}", file=sys.stderr)
        sys.exit(1)


_UsageError: Any = typer.BadParameter.__base__


def _run() -> None:
    """Run the command; raise ``BrokenPipeError`` for a closed pipe, for which typer and rich exit with status 1."""
    try:
        status = app(prog_name="galvatron", standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except _UsageError as error:
        _refuse_usage(error)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):
            raise ended.__context__ from None
        sys.stdout.flush()
        raise


def _refuse_usage(error: Any) -> NoReturn:
    """Exit with an error of the command line, the nearest name, and the help that lists all names."""
    if not error.format_message():  # a group without a command has printed its help
        sys.exit(2)
    path = "galvatron" if error.ctx is None else error.ctx.command_path
    message = error.format_message().rstrip(".")
    if hasattr(error, "option_name") and getattr(error, "possibilities", None) is not None:
        message = " ".join(
            (f"No such option: {error.option_name}.", suggestion(error.option_name, error.possibilities))
        )
    print(f"{path}: {message.strip().rstrip('.?')}{'?' if '?' in message else '.'} See {path} --help.", file=sys.stderr)
    sys.exit(2)
