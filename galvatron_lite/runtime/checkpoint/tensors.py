"""The tensors of a checkpoint: which rank writes which pieces, and reading any box of a tensor from its pieces."""

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
"""Name of a tensor, and place of a piece's first item in it."""


def assign_pieces(held: Sequence[LocalShard], of_first: Collection[str], peers: Peers) -> list[LocalShard]:
    """What this rank writes: each piece is written once, by the holder that writes least so far; all ranks call it.

    Args:
        held: what this rank holds.
        of_first: tensors that the first holder writes, as ranks may have different values.
        peers: all ranks.
    """
    shards: dict[PieceKey, LocalShard] = {}
    for one in held:
        if one.box.items or not prod(one.shape):
            shards.setdefault((one.name, _start(one.box)), one)  # a name may come twice
    offers = {key: (one.box.items * one.tensor.element_size(), one.name in of_first) for key, one in shards.items()}
    holders: dict[PieceKey, list[int]] = {}
    everyone = peers.everyone(offers)
    for rank, theirs in enumerate(everyone):
        for key in theirs:
            holders.setdefault(key, []).append(rank)
    written, mine = [0] * len(everyone), list[LocalShard]()
    for key, ranks in holders.items():  # in the same order on every rank
        size, by_first = everyone[ranks[0]][key]
        writer = ranks[0] if by_first else min(ranks, key=written.__getitem__)
        written[writer] += size
        if writer == peers.rank:
            mine.append(shards[key])
    return mine


def copied(held: LocalShard) -> LocalShard:
    """The same items in host memory of their own."""
    part = held.items.detach().cpu().clone()
    return replace(held, tensor=part, local=all_of(part.shape))


def write_pieces(path: Path, held: Sequence[LocalShard]) -> tuple[Content, dict[str, TensorRecord]]:
    """Write pieces into a new file; its content, and the records of the tensors."""
    pieces: dict[str, Tensor] = {}
    records: dict[str, TensorRecord] = {}
    for one in held:
        record = records.setdefault(one.name, TensorRecord(str(one.tensor.dtype).removeprefix("torch."), one.shape, ()))
        if one.box.items:
            pieces[key_of(one.name, _start(one.box))] = one.items
            piece = Piece(_start(one.box), one.box.shape, path.name)
            records[one.name] = replace(record, pieces=(*record.pieces, piece))
    return write_tensors(path, pieces), records


def merge_records(everyone: Sequence[Mapping[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """The records of all ranks as one; raises ``InputError`` for a tensor of which no rank has written some items."""
    merged: dict[str, TensorRecord] = {}
    for records in everyone:
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

    box: Box  # of the tensor
    file: Path
    key: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that can be read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


def stored_tensors(folder: Path, manifest: Manifest) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint; raises ``FileFormatError`` for records that cannot be true."""
    stored = {}
    for name, record in manifest.tensors.items():
        if not _is_sound(record, manifest):
            remedy = f"{folder} does not describe it as a tensor in pieces. Use another checkpoint."
            raise FileFormatError("tensor", name, remedy)
        pieces = []
        for piece in record.pieces:
            box = Box(tuple((at, at + size) for at, size in zip(piece.at, piece.size, strict=True)))
            pieces.append(StoredPiece(box, folder / piece.file, key_of(name, piece.at)))
        stored[name] = StoredTensor(getattr(torch, record.dtype), record.shape, tuple(pieces))
    return stored


def _is_sound(record: TensorRecord, manifest: Manifest) -> bool:
    """Whether pieces in files of the checkpoint hold every item once, and are not larger than the files."""
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
    """The tensors of files that hold complete ones, as Hugging Face writes them.

    Args:
        files: by tensor.
        names: the model's entries, and the first name of the tensor behind each; other tensors keep their names.
    """
    opened = {path: TensorFile(path) for path in set(files.values())}
    stored = {}
    for name, path in files.items():
        place = opened[path].places.get(name)
        if place is None:
            raise FileFormatError("file", path, f"It holds no {name!r}. Use another one.")
        piece = StoredPiece(all_of(place.shape), path, name)
        stored[names.get(name, name)] = StoredTensor(place.dtype, place.shape, (piece,))
    return stored


def check_readable(held: Sequence[LocalShard], stored: Mapping[str, StoredTensor]) -> None:
    """Check that everything that a rank holds can be read, before anything is changed."""
    files: dict[Path, TensorFile] = {}
    for one in held:
        source = stored.get(one.name)
        if source is None:
            raise InputError("tensor", one.name, "The checkpoint has none of that name. Use one of the same model.")
        if source.shape != one.shape:
            remedy = f"{one.name} has the shape {one.shape} in this model. Use a checkpoint of the same model."
            raise InputError("tensor", source.shape, remedy)
        met = list(_overlaps(source, one))
        if sum(box.items for _, box in met) != one.box.items:
            raise InputError("tensor", one.name, "The checkpoint does not have all of its items. Use another one.")
        for piece, _ in met:
            place = _opened(files, piece).places.get(piece.key)
            if place is None or (place.dtype, place.shape) != (source.dtype, piece.box.shape):
                remedy = f"It does not hold {piece.key!r} as described. Use another one."
                raise FileFormatError("file", piece.file, remedy)


@torch.no_grad()
def read_tensors(held: Sequence[LocalShard], stored: Mapping[str, StoredTensor]) -> None:
    """Fill what a rank holds from the files; call ``check_readable`` before."""
    files: dict[Path, TensorFile] = {}
    for one in held:
        for piece, met in _overlaps(stored[one.name], one):
            values = cut_box(_opened(files, piece).tensor(piece.key), met.within(piece.box))
            cut_box(one.items.detach(), met.within(one.box)).copy_(values)


def _overlaps(source: StoredTensor, shard: LocalShard) -> Iterator[tuple[StoredPiece, Box]]:
    for piece in source.pieces:
        met = piece.box.meet(shard.box)
        if met.items:
            yield piece, met


def _opened(files: dict[Path, TensorFile], piece: StoredPiece) -> TensorFile:
    if piece.file not in files:
        files[piece.file] = TensorFile(piece.file)
    return files[piece.file]


def _start(box: Box) -> tuple[int, ...]:
    return tuple(start for start, _ in box.ranges)
