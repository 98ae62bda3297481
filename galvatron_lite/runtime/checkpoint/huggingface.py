"""Exporting the weights of a checkpoint to Hugging Face's files, and loading such files.

The files are ``model.safetensors``, or several files and their index. Tensors have the names of the model. Parameters
that share a tensor are written once, under their first name, as ``from_pretrained`` expects of tied weights.
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
    """Write the weights of a checkpoint of any plan as Hugging Face's files. One process is enough.

    Args:
        folder: of the checkpoint.
        target: new or empty folder, which ``from_pretrained`` can read. It includes the configuration of the model,
            if the checkpoint has one.
        largest: size of a file; larger weights are divided over several files with an index.

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
        groups = _tensors_by_file(manifest, parse_bytes(largest, "largest"))
    incomplete = begin_folder(place)
    try:
        with content_errors(source):
            files = _write(incomplete, stored, groups)
        if CONFIG in manifest.files:
            write_text(incomplete / CONFIG, (source / CONFIG).read_text(encoding="utf-8"))
        put_in_place(incomplete, place)
    except BaseException:
        remove_folder(incomplete)
        raise
    return files


def _tensors_by_file(manifest: Manifest, largest: int) -> list[list[str]]:
    """The names of the tensors of each file, in the order of the model."""

    def size(name: str) -> int:
        record = manifest.tensors[name]
        return prod(record.shape) * int(getattr(torch, record.dtype).itemsize)

    return list(batched(dict.fromkeys(manifest.names.values()), size, largest)) or [[]]


def _write(folder: Path, stored: dict[str, StoredTensor], groups: Sequence[Sequence[str]]) -> list[str]:
    count = len(groups)
    files = [SINGLE] if count == 1 else [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    total = 0
    for file, names in zip(files, groups, strict=True):
        tensors = {name: torch.empty(stored[name].shape, dtype=stored[name].dtype) for name in names}
        shards = [complete_shard(name, tensor) for name, tensor in tensors.items()]
        check_readable(shards, stored)
        read_tensors(shards, stored)
        total += sum(tensor.nbytes for tensor in tensors.values())
        write_tensors(folder / file, tensors)
    if count > 1:
        weights = {name: file for file, names in zip(files, groups, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return files


def load_safetensors(model: nn.Module, folder: Path | str) -> None:
    """Load Hugging Face's files into a model, plain or split under any plan.

    All ranks of a split model call it, and each reads its own shards.

    Raises:
        FileFormatError: there are no such files, or they are damaged.
        InputError: a parameter is missing, or has another shape; nothing is changed.
    """
    parallel = model if isinstance(model, ParallelModel) else unsplit(model)
    stored = stored_files(_file_of_each_tensor(Path(folder)), parallel.entries.names)
    shards = [*held_parameters(parallel), *(buffer for buffer in held_buffers(parallel) if buffer.name in stored)]
    check_readable(shards, stored)
    read_tensors(shards, stored)
    for runtime in parallel.runtimes:
        runtime.updates.take()


def _file_of_each_tensor(folder: Path) -> dict[str, Path]:
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
