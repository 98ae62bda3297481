"""``galvatron verify``: whether a plan does what it says, found out without its cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from galvatron_lite.verify.schema import Verification


def verify_command(
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="FILE.py:FACTORY returning the model, (model, batch) or (model, batch, loss_fn); or a name "
            "(gpt-tiny, llama3-70b); what the plan was made from if not given.",
        ),
    ] = None,
    sequence: Annotated[int | None, typer.Option("--seq", help="Tokens a sample, for a model by name.")] = None,
    checks: Annotated[
        str | None, typer.Option("--checks", help="Some of the checks, with commas between; all if not given.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="Profile to price messages with; the one the plan was made from if not given."),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", help="The most that numbers starts; 4, or 8 where the plan needs them."),
    ] = None,
    moments: Annotated[
        bool, typer.Option("--steps", help="Show memory of the fullest role step by step, layer after layer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Run a plan without its cluster, and compare with what it says: one verdict a check; status 1 if one fails."""
    import os

    # processes of our own and tensors without storages make torch warn of what nobody here can act on
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from galvatron_lite.api_verify import verify_plan
    from galvatron_lite.cli.progress import progress_bar
    from galvatron_lite.cli.verify_tables import print_verification
    from galvatron_lite.plans.io import read_plan
    from galvatron_lite.verify.asked import Checks, checks_named

    wanted, given = tuple(Checks) if checks is None else checks_named(checks), read_plan(plan)
    with interruptible(), progress_bar("Verifying", quiet=as_json, lines=True) as progress:
        found = verify_plan(
            given, _target(model), sequence=sequence, checks=wanted, processes=processes, progress=progress,
            journal=plan.with_name(f".{plan.name}.verify"), identity=_identity(model, sequence), profile=profile,
        )  # fmt: skip
    if as_json:
        _print_json(found)
    else:
        print_verification(found, given, moments)
    if not found.passed:
        raise typer.Exit(1)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C says what becomes of the work done so far."""
    try:
        yield
    except KeyboardInterrupt as stop:
        said = "ranks that were run of a plan of one stage are kept, and the same command goes on from there"
        typer.echo(f"galvatron: interrupted; {said}", err=True)
        raise typer.Exit(130) from stop


def _target(model: str | None) -> Any:
    """A name, or the function that ``FILE.py:FACTORY`` names."""
    if model is None or ".py:" not in model:
        return model
    from galvatron_lite.cli.factory import find_factory

    return find_factory(model)


def _identity(model: str | None, sequence: int | None) -> str:
    """What the model is made of, so that roles of another one are not taken for its."""
    file = Path("" if model is None else model.rpartition(":")[0])
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return f"{model} {sequence} {text}"


def _print_json(found: Verification) -> None:
    import json

    from galvatron_lite.files import to_data

    typer.echo(json.dumps(to_data(found) | {"passed": found.passed}))
