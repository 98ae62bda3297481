"""``galvatron checkpoint``: what is in a checkpoint, whether it is whole, and its weights for Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from galvatron_lite.units import format_bytes

if TYPE_CHECKING:
    from galvatron_lite.runtime.checkpoint.manifest import Manifest

Folder = Annotated[Path, typer.Argument(help="Folder of a checkpoint, or of several.")]

checkpoint_app = typer.Typer(help="Show, check or export a checkpoint.")


@checkpoint_app.command("show")
def show_command(folder: Folder) -> None:
    """Say what a checkpoint holds, or which checkpoints a folder has, the newest first."""
    from galvatron_lite.runtime.checkpoint.manifest import checkpoints_of, read_manifest

    several = checkpoints_of(folder)
    for place in several or [folder]:
        typer.echo(f"{place}: {_describe(read_manifest(place))}")


@checkpoint_app.command("check")
def check_command(folder: Folder) -> None:
    """Read every file of a checkpoint and hold it against its checksum; exit status 1 where one is damaged."""
    from galvatron_lite.runtime.checkpoint.manifest import check_files, checkpoints_of

    several = checkpoints_of(folder)
    for place in several or [folder]:
        manifest = check_files(place)
        typer.echo(f"{place}: whole, {len(manifest.files)} files, {_describe(manifest)}")


@checkpoint_app.command("export")
def export_command(
    folder: Annotated[Path, typer.Argument(help="Folder of the checkpoint.")],
    target: Annotated[Path, typer.Argument(help="New folder, for from_pretrained.")],
    largest: Annotated[str, typer.Option("--largest", help="File: larger weights go into several.")] = "5GB",
) -> None:
    """Write the weights of a checkpoint, of any plan, as safetensors that transformers loads."""
    from galvatron_lite.runtime.checkpoint.huggingface import export_safetensors

    for name in export_safetensors(folder, target, largest):
        typer.echo(str(target / name))


def _describe(manifest: Manifest) -> str:
    size = sum(content.bytes for content in manifest.files.values())
    kept = "" if manifest.optimizer is None else f", states of {manifest.optimizer}"
    return f"step {manifest.step}, {manifest.processes} process(es), {format_bytes(size)}{kept}"
