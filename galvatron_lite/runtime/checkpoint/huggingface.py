"""Weights of a checkpoint as Hugging Face's files, and back: ``model.safetensors``, or several files and their index.

Names are the model's own. Parameters that share a tensor are written once, under their first name, as
``from_pretrained`` expects of tied weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import nn

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import read_data, write_text
from galvatron_lite.folders import begin_folder, put_in_place, remove_folder
from galvatron_lite.runtime.checkpoint.manifest import CONFIG, Manifest, check_files, content_errors
from galvatron_lite.runtime.checkpoint.shards import TensorFile, write_tensors
from galvatron_lite.runtime.checkpoint.tensors import (
    StoredTensor,
    check_readable,
    read_tensors,
    stored_files,
    stored_tensors,
)
from galvatron_lite.runtime.checkpoint.unsplit import unsplit
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.pieces import complete_shard, held_buffers, held_parameters
from galvatron_lite.runtime.peers import batched
from galvatron_lite.units import parse_bytes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def export_safetensors(folder: Path | str, target: Path | str, largest: str = "5GB") -> list[str]:
    """Write the weights of a checkpoint, of any plan, as Hugging Face's files; no other process is needed.

    Args:
        folder: of the checkpoint.
        target: a folder that is new or empty; ``from_pretrained`` reads it, with the configuration that the
            checkpoint of a transformers model has.
        largest: size of a file: larger weights are written in several files with an index.

    Returns:
        Names of the files with weights.

    Raises:
        InputError: the checkpoint is damaged, or the target is not empty.
    """
    source, place = Path(folder), Path(target)
    manifest = check_files(source)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InputError("target", place, "It holds something already. Give a new folder.")
    with content_errors(source):
        stored = stored_tensors(source, manifest)
        parts = _parts(manifest, parse_bytes(largest, "largest"))
    started = begin_folder(place)
    try:
        with content_errors(source):
            names = _write(started, stored, parts)
        if CONFIG in manifest.files:
            write_text(started / CONFIG, (source / CONFIG).read_text(encoding="utf-8"))
        put_in_place(started, place)
    except BaseException:
        remove_folder(started)
        raise
    return names


def _parts(manifest: Manifest, largest: int) -> list[list[str]]:
    """Names of tensors by file, in the model's order."""

    def size(name: str) -> int:
        record = manifest.tensors[name]
        return prod(record.shape) * int(getattr(torch, record.dtype).itemsize)

    return list(batched(dict.fromkeys(manifest.names.values()), size, largest)) or [[]]


def _write(folder: Path, stored: dict[str, StoredTensor], parts: Sequence[Sequence[str]]) -> list[str]:
    count = len(parts)
    names = [SINGLE] if count == 1 else [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    total = 0
    for name, part in zip(names, parts, strict=True):
        tensors = {key: torch.empty(stored[key].shape, dtype=stored[key].dtype) for key in part}
        held = [complete_shard(key, tensor) for key, tensor in tensors.items()]
        check_readable(held, stored)
        read_tensors(held, stored)
        total += sum(tensor.nbytes for tensor in tensors.values())
        write_tensors(folder / name, tensors)
    if count > 1:
        weights = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return names


def load_safetensors(model: nn.Module, folder: Path | str) -> None:
    """Load Hugging Face's files into a model, plain or split under any plan.

    All ranks of a split model call it; each reads its own parts alone.

    Raises:
        FileFormatError: there are no such files, or they are damaged.
        InputError: a parameter is missing, or has another shape; nothing is changed.
    """
    parallel = model if isinstance(model, ParallelModel) else unsplit(model)
    stored = stored_files(_files(Path(folder)), parallel.entries.names)
    held = [*held_parameters(parallel), *(buffer for buffer in held_buffers(parallel) if buffer.name in stored)]
    check_readable(held, stored)
    read_tensors(held, stored)
    for runtime in parallel.runtimes:
        runtime.updates.take()


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor of a folder."""
    if (folder / SINGLE).is_file():
        return dict.fromkeys(TensorFile(folder / SINGLE).places, folder / SINGLE)
    if not (folder / INDEX).is_file():
        remedy = f"There is neither {SINGLE} nor {INDEX}. Give a folder that save_pretrained or the export wrote."
        raise FileFormatError("folder", folder, remedy)
    data = read_data(folder / INDEX)
    weights = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weights, dict):
        raise FileFormatError("file", folder / INDEX, "It has no weight_map. Export or download it anew.")
    for file in weights.values():
        if not isinstance(file, str) or file != Path(file).name:
            raise FileFormatError("file", folder / INDEX, f"It names {file!r}, which is no file of this folder.")
    return {str(name): folder / file for name, file in weights.items()}
