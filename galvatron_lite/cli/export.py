"""``galvatron export``: a plan as other tools read it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from galvatron_lite.plans.export.common import Exported


def export_command(
    plan: Annotated[Path, typer.Argument(help="A plan file of ours.")],
    tool: Annotated[str, typer.Option("--to", help="For whom: deepspeed, megatron, torchtitan, accelerate or nemo.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write it to this file; printed if not given.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail where the tool's file cannot say all of the plan.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the text and what it leaves out as JSON.")] = False,
) -> None:
    """Write a plan in another tool's words, and say what they have no words for."""
    from galvatron_lite.files import write_text
    from galvatron_lite.plans.export.tools import export
    from galvatron_lite.plans.io import read_plan

    made = export(read_plan(plan), tool, strict=strict)
    if output is not None:
        write_text(output, made.text)
    if as_json:
        _print_json(made, output)
        return
    for line in made.left_out:
        typer.echo(f"not said for {tool}: {line}", err=True)
    typer.echo(made.text if output is None else f"Written to {output}.", nl=output is not None)


def _print_json(made: Exported, output: Path | None) -> None:
    import json

    where = None if output is None else str(output)
    typer.echo(json.dumps({"tool": made.tool, "file": where, "text": made.text, "left_out": list(made.left_out)}))
