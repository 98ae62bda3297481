"""What is written of a checkpoint, and the folder that it is written to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from galvatron_lite.errors import InputError
from galvatron_lite.files import write_text, write_value
from galvatron_lite.folders import Content, begin_folder, content_of, put_in_place, remove_folder
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.checkpoint.manifest import CONFIG, PLAN, Lineage, Manifest, tensors_file
from galvatron_lite.runtime.checkpoint.plain import write_plain
from galvatron_lite.runtime.checkpoint.sealed import META, write_sealed
from galvatron_lite.runtime.checkpoint.storage import FolderWriter
from galvatron_lite.runtime.pieces import Held, ItemRun, all_of
from galvatron_lite.runtime.pieces import part_of as items_of

FIELD = "checkpoint"
"""What errors name."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that this process writes, so that training may go on meanwhile."""

    held: list[Held]  # pieces of tensors
    plain: dict[str, Any]  # files of plain data, by name
    manifest: Manifest  # without tensors and files
    plan: Plan  # it was trained under
    config: str | None  # a transformers model's configuration; None where there is none


def begin(place: Path) -> Path:
    """Where the files are written first.

    Raises:
        InputError: in the checkpoint's place is something else, which must not be lost.
    """
    if place.exists() and not (place / META).is_file() and any(place.iterdir()):
        remedy = "It holds something else. Give a folder of this checkpoint alone, as checkpoints/step-100."
        raise InputError("folder", place, remedy)
    return begin_folder(place, seal=META)


def write_own(folder: Path, snapshot: Snapshot, writer: FolderWriter, rank: int) -> dict[str, Content]:
    """What this process wrote, after writing what is no tensor."""
    assert writer.content is not None
    files = {name: write_plain(folder / name, content) for name, content in snapshot.plain.items()}
    return {tensors_file(rank): writer.content, **files}


def finish_folder(
    folder: Path,
    place: Path,
    snapshot: Snapshot,
    writer: FolderWriter,
    parts: list[dict[str, Content]],
    keep: int | None,
    lineage: Lineage,
) -> None:
    """Write the rest and the manifest, move the folder to its place, and delete this training's oldest ones."""
    files = {name: content for part in parts for name, content in part.items()}
    for name in files:
        if not (folder / name).is_file():
            raise InputError(FIELD, place, f"{name} did not come here. Give a folder that all processes see.")
    write_value(folder / PLAN, snapshot.plan)
    files[PLAN] = content_of(folder / PLAN)
    if snapshot.config is not None:
        write_text(folder / CONFIG, snapshot.config)
        files[CONFIG] = content_of(folder / CONFIG)
    manifest = lineage.record(snapshot.manifest, place.parent)
    write_sealed(folder, replace(manifest, tensors=writer.tensors, files=files))
    put_in_place(folder, place)
    if keep is not None:
        for old in lineage.checkpoints(place.parent)[keep:]:
            if old != place:
                remove_folder(old)


def copied_held(held: Held) -> Held:
    """The same items in memory of their own, on the CPU: no more than are written."""
    if len(held.chunks) != 1:
        return replace(held, tensor=held.tensor.detach().cpu().clone())
    (chunk,) = held.chunks
    part = items_of(held.tensor.detach(), chunk.local).cpu().clone()
    return replace(held, tensor=part, chunks=(ItemRun(all_of(part.shape), chunk.whole),))


def config_text(module: torch.nn.Module) -> str | None:
    """A transformers model's configuration; None where there is none."""
    told = getattr(getattr(module, "config", None), "to_json_string", None)
    return None if told is None else str(told())
