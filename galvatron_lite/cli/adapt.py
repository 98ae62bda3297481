"""``galvatron adapt``: what training that adapts has decided, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from galvatron_lite.runtime.monitor.log import Replayed

adapt_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
"""The command; its sub-commands read the log that ``Adapt(log=...)`` names."""


@adapt_app.callback()
def adapt_command() -> None:
    """Replay the decisions of a run that adapted its plan."""


@adapt_app.command("replay")
def replay_command(
    log: Annotated[Path, typer.Argument(help="Log of decisions, of auto_parallelize(..., adapt=Adapt(log=FILE)).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the decisions as JSON lines.")] = False,
) -> None:
    """Take all decisions of a log again, from what was measured; exit status 1 where one comes out otherwise."""
    import json

    from galvatron_lite.files import to_data
    from galvatron_lite.runtime.monitor.log import read_log, replay

    found = replay(read_log(log))
    for one in found:
        line = json.dumps({**to_data(one.again), "same": one.same}) if as_json else _line(one)
        typer.echo(line)
    other = sum(not one.same for one in found)
    if not as_json:
        typer.echo(f"{len(found)} decisions, {f'{other} of them otherwise than logged' if other else 'all as logged'}.")
    if other:
        raise typer.Exit(1)


def _line(one: Replayed) -> str:
    again, logged = one.again, one.logged
    told = f"step {again.step}: {again.action.value}. {again.reason}"
    if one.same:
        return told
    was = "nothing" if logged is None else f"{logged.action.value}. {logged.reason}"
    return f"{told}\n  logged: {was}"
