"""Options of commands that price plans: what they are priced with, where it is not a profile."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str | None, typer.Option("--model", help="Name (llama2-7b) or YAML file; its costs are estimated.")]
Cluster = Annotated[str | None, typer.Option("--cluster", help="Name (a100-80gb) or YAML file; needed with --model.")]
Sequence = Annotated[int | None, typer.Option("--seq", help="Tokens a sample, with --model.")]
Precision = Annotated[str | None, typer.Option("--precision", help="Of compute, with --model.")]
