"""The tensors of a checkpoint: assigning pieces to the ranks that write them, and reading shards from pieces."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.folders import Content
from galvatron_lite.runtime.activations.layout import Box, all_of, cut_box
from galvatron_lite.runtime.checkpoint.manifest import Manifest, Piece, TensorRecord, key_of
from galvatron_lite.runtime.checkpoint.shards import CODES, TensorFile, write_tensors
from galvatron_lite.runtime.parameters.pieces import LocalShard
from galvatron_lite.runtime.peers import Peers

PieceKey = tuple[str, tuple[int, ...]]
"""Name of a tensor, and position of the piece's first item in it."""


def assign_pieces(shards: Sequence[LocalShard], of_first: Collection[str], peers: Peers) -> list[LocalShard]:
    """Return the shards that this rank writes. All ranks call it.

    Each piece is written once, by the rank with the fewest bytes to write so far among those that hold it.

    Args:
        shards: held by this rank.
        of_first: names of tensors that the first holder writes, as ranks may have different values.
        peers: all ranks.
    """
    by_key: dict[PieceKey, LocalShard] = {}
    for shard in shards:
        if shard.box.items or not prod(shard.shape):
            by_key.setdefault((shard.name, _start(shard.box)), shard)  # stages of a rank may share a tensor
    # by piece: its bytes, and whether the first holder writes it, which other ranks do not know
    pieces = peers.everyone(
        {key: (shard.box.items * shard.tensor.element_size(), shard.name in of_first) for key, shard in by_key.items()}
    )
    holders: dict[PieceKey, list[int]] = {}
    for rank, rank_pieces in enumerate(pieces):
        for key in rank_pieces:
            holders.setdefault(key, []).append(rank)
    written, assigned = [0] * len(pieces), list[LocalShard]()
    for key, ranks in holders.items():  # in the same order on every rank
        size, by_first = pieces[ranks[0]][key]
        writer = ranks[0] if by_first else min(ranks, key=written.__getitem__)
        written[writer] += size
        if writer == peers.rank:
            assigned.append(by_key[key])
    return assigned


def copied(shard: LocalShard) -> LocalShard:
    """Copy the items of a shard to host memory."""
    items = shard.items.detach().cpu().clone()
    return replace(shard, tensor=items, local=all_of(items.shape))


def write_pieces(path: Path, shards: Sequence[LocalShard]) -> tuple[Content, dict[str, TensorRecord]]:
    """Write shards into a new file. Return the file's checksum, and the records of the tensors by name."""
    pieces: dict[str, Tensor] = {}
    records: dict[str, TensorRecord] = {}
    for shard in shards:
        dtype = str(shard.tensor.dtype).removeprefix("torch.")
        record = records.setdefault(shard.name, TensorRecord(dtype, shard.shape, ()))
        if shard.box.items:
            pieces[key_of(shard.name, _start(shard.box))] = shard.items
            piece = Piece(_start(shard.box), shard.box.shape, path.name)
            records[shard.name] = replace(record, pieces=(*record.pieces, piece))
    return write_tensors(path, pieces), records


def merge_records(all_records: Sequence[Mapping[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """Merge the records of all ranks; raise ``InputError`` if items of a tensor are missing or were written twice."""
    merged: dict[str, TensorRecord] = {}
    for records in all_records:
        for name, record in records.items():
            pieces = merged[name].pieces if name in merged else ()
            merged[name] = replace(record, pieces=(*pieces, *record.pieces))
    for name, record in merged.items():
        if sum(prod(piece.size) for piece in record.pieces) != prod(record.shape):
            raise InputError("tensor", name, "The ranks do not hold each of its items once. Report this as a bug.")
    return merged


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Items of a tensor in a file."""

    box: Box  # in the full tensor
    file: Path
    key: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in files."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


def stored_tensors(folder: Path, manifest: Manifest) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name; raise ``FileFormatError`` for a record that cannot be true."""
    stored = {}
    for name, record in manifest.tensors.items():
        if not _is_sound(record, manifest):
            remedy = f"{folder} does not describe it as a tensor in pieces. Use another checkpoint."
            raise FileFormatError("tensor", name, remedy)
        pieces = []
        for piece in record.pieces:
            box = Box(tuple((start, start + size) for start, size in zip(piece.at, piece.size, strict=True)))
            pieces.append(StoredPiece(box, folder / piece.file, key_of(name, piece.at)))
        stored[name] = StoredTensor(getattr(torch, record.dtype), record.shape, tuple(pieces))
    return stored


def _is_sound(record: TensorRecord, manifest: Manifest) -> bool:
    """Whether the pieces cover each item of the tensor once, and are not larger than their files."""
    pieces, items = record.pieces, prod(record.shape)
    dtype: Any = getattr(torch, record.dtype, None)
    if dtype not in CODES.values() or any(piece.file not in manifest.files for piece in pieces):
        return False
    if any(not len(piece.at) == len(piece.size) == len(record.shape) for piece in pieces):
        return False
    largest = sum(manifest.files[name].bytes for name in {piece.file for piece in pieces})
    if items * dtype.itemsize > largest or sum(prod(piece.size) for piece in pieces) != items:
        return False
    if not items:
        return True
    starts = numpy.array([piece.at for piece in pieces if prod(piece.size)])
    stops = starts + numpy.array([piece.size for piece in pieces if prod(piece.size)])
    if (stops <= starts).any() or (stops > numpy.array(record.shape)).any():
        return False
    return all(((starts < stop) & (stops > start)).all(1).sum() == 1 for start, stop in zip(starts, stops, strict=True))


def stored_files(files: Mapping[str, Path], names: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Return the tensors of files that contain complete ones, as those of Hugging Face.

    Args:
        files: file of each tensor.
        names: entries of the model, and the first name of the tensor behind each; other tensors keep their names.
    """
    opened = {path: TensorFile(path) for path in set(files.values())}
    stored = {}
    for name, path in files.items():
        span = opened[path].places.get(name)
        if span is None:
            raise FileFormatError("file", path, f"It holds no {name!r}. Use another one.")
        piece = StoredPiece(all_of(span.shape), path, name)
        stored[names.get(name, name)] = StoredTensor(span.dtype, span.shape, (piece,))
    return stored


def check_readable(shards: Sequence[LocalShard], stored: Mapping[str, StoredTensor]) -> None:
    """Raise ``InputError`` for a shard that is missing, incomplete or of another shape, before anything is changed."""
    files: dict[Path, TensorFile] = {}
    for shard in shards:
        source = stored.get(shard.name)
        if source is None:
            raise InputError("tensor", shard.name, "The checkpoint has none of that name. Use one of the same model.")
        if source.shape != shard.shape:
            remedy = f"{shard.name} has the shape {shard.shape} in this model. Use a checkpoint of the same model."
            raise InputError("tensor", source.shape, remedy)
        overlaps = list(_overlaps(source, shard))
        if sum(box.items for _, box in overlaps) != shard.box.items:
            raise InputError("tensor", shard.name, "The checkpoint does not have all of its items. Use another one.")
        for piece, _ in overlaps:
            span = _opened(files, piece).places.get(piece.key)
            if span is None or (span.dtype, span.shape) != (source.dtype, piece.box.shape):
                remedy = f"It does not hold {piece.key!r} as described. Use another one."
                raise FileFormatError("file", piece.file, remedy)


@torch.no_grad()
def read_tensors(shards: Sequence[LocalShard], stored: Mapping[str, StoredTensor]) -> None:
    """Fill shards from the files; call ``check_readable`` before."""
    files: dict[Path, TensorFile] = {}
    for shard in shards:
        for piece, overlap in _overlaps(stored[shard.name], shard):
            values = cut_box(_opened(files, piece).tensor(piece.key), overlap.within(piece.box))
            cut_box(shard.items.detach(), overlap.within(shard.box)).copy_(values)


def _overlaps(source: StoredTensor, shard: LocalShard) -> Iterator[tuple[StoredPiece, Box]]:
    for piece in source.pieces:
        overlap = piece.box.meet(shard.box)
        if overlap.items:
            yield piece, overlap


def _opened(files: dict[Path, TensorFile], piece: StoredPiece) -> TensorFile:
    if piece.file not in files:
        files[piece.file] = TensorFile(piece.file)
    return files[piece.file]


def _start(box: Box) -> tuple[int, ...]:
    return tuple(start for start, _ in box.ranges)
