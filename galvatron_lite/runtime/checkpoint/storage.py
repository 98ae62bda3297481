"""Where ``torch.distributed.checkpoint`` writes and reads: one file of tensors a process, metadata that is plain data.

PyTorch's own ``FileSystemReader`` unpickles the metadata; nothing of a checkpoint is unpickled here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from galvatron_lite.errors import FileFormatError
from galvatron_lite.folders import Content
from galvatron_lite.runtime.checkpoint.manifest import Manifest, Piece, TensorRecord, key_of, tensors_file
from galvatron_lite.runtime.checkpoint.shards import CODES, TensorFile, write_tensors
from galvatron_lite.runtime.layout import Box
from galvatron_lite.runtime.pieces import part_of


@dataclass(frozen=True, slots=True)
class PieceSource:
    """Where a piece is: a file, and its key there."""

    file: Path
    key: str


class FolderWriter(StorageWriter):
    """Writes this process's pieces into a folder.

    Args:
        folder: that all processes see.
        rank: of this process.

    Attributes:
        content: of this process's file, once written.
        tensors: all of them, once all processes have written; on rank 0 alone.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._file = folder, tensors_file(rank)
        self.content: Content | None = None
        self.tensors: dict[str, TensorRecord] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """It is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_options: Any) -> None:
        """The folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the pieces of a plan.

        Raises:
            OSError: the disk is full, or broken.
        """
        pieces = {_key(item.index): planner.resolve_data(item) for item in plan.items}
        self.content = write_tensors(self._folder / self._file, pieces)  # type: ignore[arg-type]
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, 0, self._file) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Note where all tensors are."""
        files = {one.index: str(one.storage_data) for written in results for one in written}
        for name, one in metadata.state_dict_metadata.items():
            assert isinstance(one, TensorStorageMetadata)
            pieces = tuple(
                Piece(tuple(chunk.offsets), tuple(chunk.sizes), files[MetadataIndex(name, chunk.offsets)])
                for chunk in one.chunks
            )
            self.tensors[name] = TensorRecord(_dtype_name(one.properties.dtype), tuple(one.size), pieces)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        """The folder is given when it is made."""
        return False

    def storage_meta(self) -> StorageMeta | None:
        """Nothing more is noted."""
        return None


class PiecesReader(StorageReader):
    """Reads pieces of tensors from files of tensors.

    Args:
        metadata: which pieces there are; its ``storage_data`` says where (``PieceSource``), by their index.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def reset(self, checkpoint_id: Any = None) -> None:
        """It may be used again."""

    def read_metadata(self, *_args: Any) -> Metadata:
        """What it was made with."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any) -> None:
        """Nothing is left to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan.

        Raises:
            FileFormatError: a file is no file of tensors, or has not what it should.
        """
        files: dict[Path, TensorFile] = {}
        for item in plan.items:
            source: PieceSource = self._metadata.storage_data[item.storage_index]
            if source.file not in files:
                files[source.file] = TensorFile(source.file)
            ranges = zip(item.storage_offsets, item.lengths, strict=True)
            box = Box(tuple((start, start + length) for start, length in ranges))
            target = planner.resolve_tensor(item)
            target.copy_(_within(files[source.file], source, box))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        """What is read is given when it is made."""
        return False


def metadata_of(folder: Path, manifest: Manifest) -> Metadata:
    """What ``torch.distributed.checkpoint`` is told of a checkpoint.

    Raises:
        FileFormatError: what the manifest says of a tensor cannot be.
    """
    for name, one in manifest.tensors.items():
        if not _is_sound(one, manifest):
            remedy = f"{folder} does not describe it as a tensor in pieces. Use another checkpoint."
            raise FileFormatError("tensor", name, remedy)
    wholes = {name: _described(one.dtype, one.shape, one.pieces) for name, one in manifest.tensors.items()}
    places = {
        MetadataIndex(name, torch.Size(piece.at)): PieceSource(folder / piece.file, key_of(name, piece.at))
        for name, one in manifest.tensors.items()
        for piece in one.pieces
    }
    return Metadata(dict(wholes), storage_data=places)


def _is_sound(one: TensorRecord, manifest: Manifest) -> bool:
    """Whether pieces in files of the checkpoint hold every item of a tensor once, and are not larger than the files."""
    pieces, items = one.pieces, prod(one.shape)
    if getattr(torch, one.dtype, None) not in CODES.values():
        return False
    if any(
        not len(piece.at) == len(piece.size) == len(one.shape) or piece.file not in manifest.files for piece in pieces
    ):
        return False
    largest = sum(manifest.files[name].bytes for name in {piece.file for piece in pieces})
    if items * _dtype(one.dtype).itemsize > largest or sum(prod(piece.size) for piece in pieces) != items:
        return False
    if not items:
        return True
    starts = numpy.array([piece.at for piece in pieces if prod(piece.size)])
    stops = starts + numpy.array([piece.size for piece in pieces if prod(piece.size)])
    if (stops <= starts).any() or (stops > numpy.array(one.shape)).any():
        return False
    return all(((starts < stop) & (stops > start)).all(1).sum() == 1 for start, stop in zip(starts, stops, strict=True))


def check_items(plan: LoadPlan, metadata: Metadata) -> None:
    """See that files hold the pieces that a plan reads, as the checkpoint describes them.

    Raises:
        FileFormatError: a file is no file of tensors, or has another dtype or shape.
    """
    files: dict[Path, TensorFile] = {}
    for index in {item.storage_index for item in plan.items}:
        source: PieceSource = metadata.storage_data[index]
        if source.file not in files:
            files[source.file] = TensorFile(source.file)
        tensor = metadata.state_dict_metadata[index.fqn]
        assert isinstance(tensor, TensorStorageMetadata)
        (size,) = {tuple(chunk.sizes) for chunk in tensor.chunks if chunk.offsets == index.offset}
        place = files[source.file].places.get(source.key)
        if place is None or (place.dtype, place.shape) != (tensor.properties.dtype, size):
            raise FileFormatError(
                "file", source.file, f"It does not hold {source.key!r} as described. Use another one."
            )


def metadata_of_files(files: Mapping[str, Path], names: Mapping[str, str]) -> Metadata:
    """The same of files that hold whole tensors, as Hugging Face writes them.

    Args:
        files: of each tensor, by its name there.
        names: those of the model's entries, and the first name of the tensor behind each; others keep theirs.

    Raises:
        FileFormatError: a file is no file of tensors, or does not hold a tensor that it should.
    """
    opened = {path: TensorFile(path) for path in set(files.values())}
    wholes: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, PieceSource] = {}
    for name, path in files.items():
        if name not in opened[path].places:
            raise FileFormatError("file", path, f"It holds no {name!r}. Use another one.")
        first, shape = names.get(name, name), opened[path].places[name].shape
        at = (0,) * len(shape)
        dtype = _dtype_name(opened[path].places[name].dtype)
        wholes[first] = _described(dtype, shape, (Piece(at, shape, path.name),))
        places[MetadataIndex(first, torch.Size(at))] = PieceSource(path, name)
    return Metadata(dict(wholes), storage_data=places)


def _described(dtype: str, shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(piece.at), torch.Size(piece.size)) for piece in pieces]
    return TensorStorageMetadata(TensorProperties(dtype=_dtype(dtype)), torch.Size(shape), chunks)


def _within(file: TensorFile, source: PieceSource, box: Box) -> torch.Tensor:
    whole = file.tensor(source.key)
    if any(stop > extent for (_, stop), extent in zip(box.ranges, whole.shape, strict=True)):
        raise FileFormatError("file", source.file, f"{source.key!r} is smaller than it should be. Use another one.")
    return part_of(whole, box)


def _key(index: MetadataIndex) -> str:
    assert index.offset is not None
    return key_of(index.fqn, tuple(index.offset))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise FileFormatError("dtype", name, "It is none of torch's. Use another checkpoint.")
    return found
