"""Weights of a checkpoint as Hugging Face's files, and back: ``model.safetensors`` or its parts with their index.

Names are the model's own. Parameters that share a tensor are there once, under their first name, as
``from_pretrained`` expects of tied weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import read_data, write_text
from galvatron_lite.folders import begin_folder, put_in_place, remove_folder
from galvatron_lite.runtime.checkpoint.manifest import CONFIG, Manifest, check_whole
from galvatron_lite.runtime.checkpoint.sealed import content_errors
from galvatron_lite.runtime.checkpoint.shards import TensorFile, write_tensors
from galvatron_lite.runtime.checkpoint.storage import metadata_of, metadata_of_files
from galvatron_lite.runtime.checkpoint.whole import alone, fill
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.pieces import Held, ItemRun, all_of, held_buffers, held_parameters
from galvatron_lite.units import parse_bytes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def export_safetensors(folder: Path | str, target: Path | str, largest: str = "5GB") -> list[str]:
    """Write the weights of a checkpoint, of any plan, as Hugging Face's files; no other process is needed.

    Args:
        folder: of the checkpoint.
        target: a folder that is new or empty; ``from_pretrained`` reads it, with the configuration that the
            checkpoint of a transformers model has.
        largest: file: weights are written in several ones with an index where they are larger.

    Returns:
        Names of the files with weights.

    Raises:
        InputError: the checkpoint is damaged, or the target holds something.
    """
    source, place = Path(folder), Path(target)
    manifest = check_whole(source)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InputError("target", place, "It holds something already. Give a new folder.")
    with content_errors(source):
        metadata_of(source, manifest)
        parts = _parts(manifest, parse_bytes(largest, "largest"))
    started = begin_folder(place)
    try:
        with content_errors(source):
            names = _write(started, source, manifest, parts)
        put_in_place(started, place)
    except BaseException:
        remove_folder(started)
        raise
    return names


def load_safetensors(model: nn.Module, folder: Path | str) -> None:
    """Give a model, plain or split under any plan, the weights of Hugging Face's files.

    All ranks of a split model call it; each reads its own parts alone.

    Raises:
        FileFormatError: there are no such files, or they are damaged.
        InputError: they have not all parameters, or of another shape; nothing is changed.
    """
    parallel = model if isinstance(model, ParallelModel) else alone(model)
    metadata = metadata_of_files(_files(Path(folder)), parallel.entries.names)
    known = metadata.state_dict_metadata
    fill([*held_parameters(parallel), *(one for one in held_buffers(parallel) if one.name in known)], metadata)
    for runtime in parallel.runtimes:
        runtime.updates.take()


def _parts(manifest: Manifest, largest: int) -> list[list[str]]:
    """Names of tensors by file, in the model's order."""
    parts: list[list[str]] = [[]]
    size = 0
    for name in dict.fromkeys(manifest.names.values()):
        one = manifest.tensors[name]
        count = prod(one.shape) * getattr(torch, one.dtype).itemsize
        if parts[-1] and size + count > largest:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += count
    return parts


def _write(folder: Path, source: Path, manifest: Manifest, parts: Sequence[Sequence[str]]) -> list[str]:
    count = len(parts)
    names = [SINGLE] if count == 1 else [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    total = 0
    for name, part in zip(names, parts, strict=True):
        tensors = _read(source, manifest, part)
        total += sum(tensor.nbytes for tensor in tensors.values())
        write_tensors(folder / name, tensors)
    if count > 1:
        weights = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    if CONFIG in manifest.files:
        write_text(folder / CONFIG, (source / CONFIG).read_text(encoding="utf-8"))
    return names


def _read(source: Path, manifest: Manifest, names: Sequence[str]) -> dict[str, Tensor]:
    """Whole tensors."""
    found = {
        name: torch.empty(manifest.tensors[name].shape, dtype=getattr(torch, manifest.tensors[name].dtype))
        for name in names
    }
    fill([_all_of(name, tensor) for name, tensor in found.items()], metadata_of(source, manifest))
    return found


def _all_of(name: str, tensor: Tensor) -> Held:
    box = all_of(tensor.shape)
    return Held(name, tuple(tensor.shape), tensor, (ItemRun(box, box),) if box.items else ())


def _files(folder: Path) -> Mapping[str, Path]:
    """The file of each tensor of a folder."""
    if (folder / SINGLE).is_file():
        return dict.fromkeys(TensorFile(folder / SINGLE).places, folder / SINGLE)
    if not (folder / INDEX).is_file():
        remedy = f"There is neither {SINGLE} nor {INDEX}. Give a folder that save_pretrained or the export wrote."
        raise FileFormatError("folder", folder, remedy)
    return dict(_indexed(folder))


def _indexed(folder: Path) -> Iterator[tuple[str, Path]]:
    data = read_data(folder / INDEX)
    weights = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weights, dict):
        raise FileFormatError("file", folder / INDEX, "It has no weight_map. Export or download it anew.")
    for name, file in weights.items():
        if not isinstance(file, str) or file != Path(file).name:
            raise FileFormatError("file", folder / INDEX, f"It names {file!r}, which is no file of this folder.")
        yield str(name), folder / file
