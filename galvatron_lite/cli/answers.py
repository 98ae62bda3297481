"""Prints what a question was answered with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from galvatron_lite.analysis.answers import Answer, Said


def print_answer(answer: Answer, source: str, accuracy: str) -> None:
    """The table of an answer, the answer in a sentence, and what it is exact over.

    Args:
        answer: to a question.
        source: what its costs come from.
        accuracy: how far off they may be; nothing is said where it is empty.
    """
    from rich.table import Table

    from galvatron_lite.analysis.answers import said
    from galvatron_lite.cli.console import wide_console

    told = said(answer)
    console = wide_console()
    console.print(f"From {source}.\n")
    table = Table(*told.columns, box=None, pad_edge=False, header_style="bold")
    for row in told.rows:
        table.add_row(*row)
    console.print(table)
    console.print()
    if not _failed(answer, told):
        console.print(told.sentence, style="bold")
    for note in (*told.notes, accuracy):
        if note:
            console.print(note)


def print_answer_json(answer: Answer) -> None:
    """The same for programmes."""
    import json

    import typer

    from galvatron_lite.analysis.answers import as_data

    typer.echo(json.dumps(as_data(answer), allow_nan=False))


def check_output(output: Path | None, question: str) -> None:
    """Whether an answer can be written as a plan.

    Raises:
        InputError: the question is answered by many plans, or there is no such folder.
    """
    from galvatron_lite.errors import InputError

    if output is not None and question == "pareto":
        raise InputError("-o", str(output), "--pareto has many plans: take one by its memory: --mem, without --pareto.")
    check_folder("-o", output)


def check_folder(option: str, path: Path | None) -> None:
    """Whether there is a folder to write a file to.

    Raises:
        InputError: there is none.
    """
    from galvatron_lite.errors import InputError

    if path is not None and not path.parent.is_dir():
        raise InputError(option, str(path), f"There is no folder {path.parent}: make it first.")


def write_answer(answer: Answer, output: Path | None, plot: Path | None) -> None:
    """Write the plan of an answer, and its figure."""
    from galvatron_lite.analysis.answers import said
    from galvatron_lite.analysis.sweep_figure import figure
    from galvatron_lite.files import write_text
    from galvatron_lite.plans.io import write_plan

    chosen = said(answer).chosen
    if output is not None and chosen is not None and chosen.plan is not None:
        write_plan(chosen.plan, output)
    if plot is not None:
        write_text(plot, figure(answer))


def require_answer(answer: Answer) -> None:
    """Where no number of GPUs is enough, that is an error, once what was found has been shown.

    Raises:
        InfeasibleError: there is no answer, and nothing is left to look at.
    """
    from galvatron_lite.analysis.answers import said
    from galvatron_lite.errors import InfeasibleError

    told = said(answer)
    if _failed(answer, told):
        raise InfeasibleError(told.sentence)


def _failed(answer: Answer, told: Said) -> bool:
    """Whether everything was looked at and nothing is enough."""
    from galvatron_lite.analysis.sweeps import Front

    return told.chosen is None and answer.complete and not isinstance(answer, Front)
