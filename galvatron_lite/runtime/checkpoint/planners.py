"""What each process writes and reads of a checkpoint, as ``torch.distributed.checkpoint`` asks: boxes of tensors."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.checkpoint.storage import check_items
from galvatron_lite.runtime.layout import Box
from galvatron_lite.runtime.peers import Peers
from galvatron_lite.runtime.pieces import Held, ItemRun, part_of

Offer = tuple[MetadataIndex, int, bool]
"""A piece that a rank has, its bytes, and whether the first rank's counts."""


def apportioned(held: Sequence[Held], first: Collection[str], peers: Peers) -> list[Held]:
    """What this rank writes: each piece is written once, by the rank that has it and writes least so far.

    All ranks call it.

    Args:
        held: what this rank has.
        first: names of which the first rank's values count, as ranks may have others.
        peers: all ranks.
    """
    own: list[Offer] = [
        (_index(one.name, chunk), chunk.whole.items * one.tensor.element_size(), one.name in first)
        for one in held
        for chunk in one.chunks
    ]
    writer = _writers(peers.everyone(own))
    mine, written = [], set[MetadataIndex]()
    for one in held:
        chunks = [chunk for chunk in one.chunks if writer[_index(one.name, chunk)] == peers.rank]
        chunks = [chunk for chunk in chunks if _index(one.name, chunk) not in written]
        written |= {_index(one.name, chunk) for chunk in chunks}
        if chunks:
            mine.append(replace(one, chunks=tuple(chunks)))
    return mine


def _writers(everyone: Sequence[Sequence[Offer]]) -> dict[MetadataIndex, int]:
    """The rank that writes each piece; the same on every rank."""
    holders: dict[MetadataIndex, list[int]] = {}
    told: dict[MetadataIndex, tuple[int, bool]] = {}
    for rank, offers in enumerate(everyone):
        for index, size, is_first in offers:
            holders.setdefault(index, []).append(rank)
            told[index] = size, is_first
    written, writer = [0] * len(everyone), dict[MetadataIndex, int]()
    for index, ranks in holders.items():
        size, is_first = told[index]
        chosen = ranks[0] if is_first else min(ranks, key=written.__getitem__)
        writer[index] = chosen
        written[chosen] += size
    return writer


class PiecesSaver(SavePlanner):
    """Writes what this rank is to write.

    Args:
        held: from ``apportioned``.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self._own = {_index(one.name, chunk): (one, chunk) for one in held for chunk in one.chunks}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """All is known already."""

    def create_local_plan(self) -> SavePlan:
        """Every piece."""
        return SavePlan([_write_item(index, one, chunk) for index, (one, chunk) in self._own.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The same, and what all ranks write."""
        made: tuple[list[SavePlan], Metadata] = create_default_global_save_plan(all_plans)
        return made

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Nothing is left to do."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The items to write."""
        held, chunk = self._own[write_item.index]
        return part_of(held.tensor, chunk.local)


class PiecesLoader(LoadPlanner):
    """Reads what this rank has, whatever pieces it was written in.

    Args:
        held: what this rank has; its tensors are filled in place.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held
        self._metadata = Metadata({})

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:  # noqa: ARG002
        """Takes what the checkpoint says of its tensors."""
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Which items of which pieces go where.

        Raises:
            InputError: the checkpoint has not all items of a tensor, or it has another shape.
        """
        items: list[ReadItem] = []
        for number, held in enumerate(self._held):
            saved = self._saved(held)
            for place, chunk in enumerate(held.chunks):
                made = _read_items(MetadataIndex(held.name), f"{number}.{place}", chunk, saved.chunks)
                if sum(prod(item.lengths) for item in made) != chunk.whole.items:
                    remedy = "The checkpoint does not have all of its items. Use another one."
                    raise InputError("tensor", held.name, remedy)
                items += made
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing is left to do."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """There are tensors alone."""
        raise AssertionError(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where some items go."""
        number, place = map(int, read_item.dest_index.fqn.split("."))
        held = self._held[number]
        there = part_of(held.tensor.detach(), held.chunks[place].local)
        return part_of(there, _box(read_item.dest_offsets, read_item.lengths))

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """They were put where they belong."""

    def _saved(self, held: Held) -> TensorStorageMetadata:
        saved = self._metadata.state_dict_metadata.get(held.name)
        if not isinstance(saved, TensorStorageMetadata):
            raise InputError("tensor", held.name, "The checkpoint has none of that name. Use one of the same model.")
        if tuple(saved.size) != held.shape:
            remedy = f"{held.name} has the shape {held.shape} in this model. Use a checkpoint of the same model."
            raise InputError("tensor", tuple(saved.size), remedy)
        return saved


def check_loadable(held: Sequence[Held], metadata: Metadata) -> None:
    """Refuse what does not fit this rank's tensors, before anything is changed.

    Raises:
        InputError: the checkpoint has not all items of a tensor, or it has another shape.
        FileFormatError: its files do not hold what it says.
    """
    planner = PiecesLoader(held)
    planner.set_up_planner({}, metadata)
    check_items(planner.create_local_plan(), metadata)


def _index(name: str, chunk: ItemRun) -> MetadataIndex:
    return MetadataIndex(name, torch.Size(start for start, _ in chunk.whole.ranges))


def _write_item(index: MetadataIndex, held: Held, chunk: ItemRun) -> WriteItem:
    assert index.offset is not None
    box = ChunkStorageMetadata(index.offset, torch.Size(chunk.whole.shape))
    properties = TensorProperties(dtype=held.tensor.dtype)
    data = TensorWriteData(box, properties, torch.Size(held.shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _read_items(
    name: MetadataIndex, target: str, chunk: ItemRun, pieces: Sequence[ChunkStorageMetadata]
) -> list[ReadItem]:
    items = []
    for piece in pieces:
        there = _box(piece.offsets, piece.sizes)
        met = there.meet(chunk.whole)
        if met.items:
            items.append(
                ReadItem(
                    LoadItemType.TENSOR,
                    MetadataIndex(target),
                    _starts(met.within(chunk.whole)),
                    MetadataIndex(name.fqn, piece.offsets),
                    _starts(met.within(there)),
                    torch.Size(met.shape),
                )
            )
    return items


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    return Box(tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True)))


def _starts(box: Box) -> torch.Size:
    return torch.Size(start for start, _ in box.ranges)
