"""Options that describe a model by its shape, without a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from galvatron_lite.model.graph import ModelGraph

_TRANSFORMERS = ("decoder", "encoder", "moe")
PANEL = "Model by shape (instead of --model)"

Layers = Annotated[int | None, typer.Option("--layers", help="Repeated blocks.", rich_help_panel=PANEL)]
Hidden = Annotated[int | None, typer.Option("--hidden", help="Hidden size.", rich_help_panel=PANEL)]
Heads = Annotated[int | None, typer.Option("--heads", help="Attention heads.", rich_help_panel=PANEL)]
KvHeads = Annotated[int | None, typer.Option("--kv-heads", help="Key-value heads.", rich_help_panel=PANEL)]
Ffn = Annotated[int | None, typer.Option("--ffn", help="Hidden size of the MLP.", rich_help_panel=PANEL)]
Vocab = Annotated[int | None, typer.Option("--vocab", help="Vocabulary size.", rich_help_panel=PANEL)]
Arch = Annotated[
    str | None, typer.Option("--arch", help="decoder (default), encoder, moe, vit …", rich_help_panel=PANEL)
]
Experts = Annotated[int | None, typer.Option("--experts", help="Experts, for moe.", rich_help_panel=PANEL)]
Topk = Annotated[int | None, typer.Option("--topk", help="Experts a token takes, for moe.", rich_help_panel=PANEL)]
Tied = Annotated[bool, typer.Option("--tied", help="Head shares the embedding.", rich_help_panel=PANEL)]
Gated = Annotated[bool, typer.Option("--gated", help="Gated MLP, as in Llama.", rich_help_panel=PANEL)]


def given(**flags: object) -> dict[str, str]:
    """The flags that were given, by name, as text."""
    return {name: str(value).lower() for name, value in flags.items() if value not in (None, False)}


def pictured(model: str | None, image: str, precision: str) -> ModelGraph:
    """The model by its name, with pictures of a size.

    Raises:
        InputError: no model, one whose pictures have no such size, or a size that cannot be read.
    """
    from galvatron_lite.errors import InputError
    from galvatron_lite.model.shapes import load_model, load_shape
    from galvatron_lite.model.shapes.sizes import sizes_of

    if model is None:
        raise InputError("--image", image, "Name the model with --model.")
    sizes = sizes_of(load_shape(model), model, image)
    return load_model(model, overrides=sizes, precision=precision)


def graph(flags: dict[str, str], precision: str) -> ModelGraph:
    """The model that the flags describe."""
    from galvatron_lite.errors import InputError
    from galvatron_lite.model.shapes import build_graph, shape_from_flags

    needed = ("layers", "hidden", "heads", "vocab", "seq") if flags.get("arch", "decoder") in _TRANSFORMERS else ()
    missing = ", ".join(f"--{name}" for name in needed if name not in flags)
    if missing:
        raise InputError(missing, None, "A model by its shape needs --layers, --hidden, --heads, --vocab and --seq.")
    return build_graph(shape_from_flags(flags), precision=precision)
