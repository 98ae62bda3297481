"""What this rank holds of every tensor of the training state: boxes of full tensors, under the user's own names.

Checkpoints and changes of the plan are built on this: both only need to know which part of which tensor lies where,
whatever split it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.tensor.shards import ParameterShard, Placement
from galvatron_lite.runtime.activations.layout import Box, all_of
from galvatron_lite.runtime.parameters.managed import ManagedParameter
from galvatron_lite.runtime.stages import StageRuntime

RUNNING = ("running_mean", "running_var")
"""Buffers of normalisations of which a rank that shares channels keeps its own channels only."""


@dataclass(frozen=True, slots=True)
class ItemRun:
    """Items that are in one place both in a rank's tensor and in the full one; the boxes' shapes are equal."""

    local: Box  # where in the rank's tensor
    whole: Box  # where in the full tensor


@dataclass(frozen=True, slots=True)
class LocalShard:
    """What a rank holds of one tensor."""

    name: str  # the user's; of a shared parameter the first of its names in the model's ``state_dict()``
    shape: tuple[int, ...]  # of the full tensor
    tensor: Tensor  # this rank's, plain; it shares its storage with what training uses
    chunks: tuple[ItemRun, ...]  # which items it has; none where the rank has no part


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of a full model's ``state_dict()``, known before the model is split."""

    names: Mapping[str, str]  # every entry, and the first name of the tensor behind it
    homes: Mapping[str, str]  # of each entry that is a buffer: the layer that holds it; empty where none does


class Parallel(Protocol):
    """A model that is split over the launched world: a ``ParallelModel``."""

    @property
    def entries(self) -> Entries:
        """Of the full model."""

    @property
    def runtimes(self) -> Sequence[StageRuntime]:
        """The parts of the model that are on this rank."""

    @property
    def structures(self) -> Sequence[nn.Module]:
        """The modules of each of these parts, under the names of the full model."""


def entries_of(model: nn.Module, layers: Sequence[Layer]) -> Entries:
    """The entries of a full model's state; call it before the model is split."""
    state: dict[str, object] = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        first.setdefault(id(value), name)
    names = {name: first[id(value)] for name, value in tensors.items()}
    homes = {}
    for name in (name for name, value in tensors.items() if not isinstance(value, nn.Parameter)):
        holders = [(len(path), layer.name) for layer in layers for path in layer.modules if name.startswith(f"{path}.")]
        homes[name] = max(holders, default=(0, ""))[1]  # the layer with the longest module path
    return Entries(names, homes)


def held_parameters(parallel: Parallel) -> list[LocalShard]:
    """What this rank holds of every parameter; a name may come twice where several parts of the rank share it.

    All ranks call it. Who writes into them calls ``updates.take`` of every runtime afterwards.
    """
    for runtime in parallel.runtimes:
        runtime.updates.publish()
    return [held_parameter(parallel, one) for runtime in parallel.runtimes for one in runtime.owned]


def held_parameter(parallel: Parallel, one: ManagedParameter) -> LocalShard:
    """What this rank holds of one parameter, as it was last published."""
    return _held(parameter_name(parallel, one), one.held.detach(), one)


def held_gradients(parallel: Parallel) -> list[LocalShard]:
    """What this rank holds of the gradients that there are, named as their parameters."""
    return [
        _held(parameter_name(parallel, one), gradient.detach(), one)
        for runtime in parallel.runtimes
        for one in runtime.owned
        if (gradient := one.gradient) is not None
    ]


def held_states(parallel: Parallel, optimizer: Any) -> list[LocalShard]:
    """What this rank holds of the tensors of an optimizer's ``state`` (by parameter), named ``PARAMETER/exp_avg``.

    Entries that are neither of the parameter's shape, nor of it with some extents 1, are whole on every rank. Entries
    that are no tensors are left out.
    """
    return [
        _held(f"{parameter_name(parallel, one)}/{key}", value.detach(), one)
        for runtime in parallel.runtimes
        for one in runtime.owned
        for key, value in optimizer.state.get(one.updated, {}).items()
        if isinstance(value, Tensor)
    ]


def held_buffers(parallel: Parallel) -> list[LocalShard]:
    """What this rank holds of the buffers of the model's state that its own layers have.

    Ranks that take other samples may have other values of the same items (running statistics); the first rank's count
    where one value is needed.
    """
    return [
        LocalShard(name, tuple(buffer.shape), buffer, chunks)
        for place, (runtime, tree) in enumerate(zip(parallel.runtimes, parallel.structures, strict=True))
        for name, buffer, chunks in _buffers(runtime, tree, parallel.entries, is_first=place == 0)
    ]


def parameter_name(parallel: Parallel, one: ManagedParameter) -> str:
    """The first name of a parameter in the full model's ``state_dict()``."""
    return parallel.entries.names.get(one.names[0], one.names[0])


def _held(name: str, tensor: Tensor, one: ManagedParameter) -> LocalShard:
    local, part, shape = _local_items(tensor, one)
    chunks: tuple[ItemRun, ...] = (ItemRun(part.within(part), part),) if part.items else ()
    shard = one.shard if one.shard is not None and one.shard.placement is Placement.SHARDED else None
    mine = tuple(one.parameter.shape)
    # it is cut where its parameter is: of its shape, or with extents 1 in other dims
    if shard is not None and _is_like(shape, mine) and shape[shard.dim] == mine[shard.dim]:
        shape, chunks = _with_extent(shape, shard.dim, shard.shape[shard.dim]), _sliced_chunks(part, shard)
    if one.spread is not None and _is_like(shape, one.spread.local_shape):  # of some experts of a mixture
        ((start, _),) = one.spread.ranges
        shape = _with_extent(shape, 0, one.spread.shape[0])
        moved = [(chunk, chunk.whole.ranges) for chunk in chunks]
        chunks = tuple(
            replace(chunk, whole=Box(((first + start, last + start), *rest))) for chunk, ((first, last), *rest) in moved
        )
    return LocalShard(name, shape, local, chunks)


def _is_like(shape: Sequence[int], other: Sequence[int]) -> bool:
    return len(shape) == len(other) and all(a in (1, b) for a, b in zip(shape, other, strict=True))


def _with_extent(shape: tuple[int, ...], dim: int, extent: int) -> tuple[int, ...]:
    return (*shape[:dim], extent, *shape[dim + 1 :])


def _local_items(tensor: Tensor, one: ManagedParameter) -> tuple[Tensor, Box, tuple[int, ...]]:
    """A plain tensor, which items of this rank's slice of the parameter it has, and the slice's shape."""
    if isinstance(tensor, DTensor):
        return tensor.to_local(), _local_box(tensor), tuple(tensor.shape)
    parameter: Tensor = one.reduced
    if isinstance(parameter, DTensor) and tuple(tensor.shape) not in ((), tuple(parameter.shape)):
        # from an optimizer that works on the rank's own items
        box = _local_box(parameter)
        if box.shape == tuple(tensor.shape):
            return tensor, box, tuple(parameter.shape)
    return tensor, all_of(tensor.shape), tuple(tensor.shape)


def _local_box(tensor: DTensor) -> Box:
    """Which items of a DTensor this rank has: along each axis of the mesh torch cuts as ``torch.chunk`` does."""
    ranges = [(0, extent) for extent in tensor.shape]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # this rank has the tensor
    for place, placement in enumerate(tensor.placements):
        if type(placement) is Shard:
            start, stop = ranges[placement.dim]
            step = -(-(stop - start) // tensor.device_mesh.size(place))
            first = start + step * coordinate[place]
            ranges[placement.dim] = min(stop, first), min(stop, first + step)
        elif not isinstance(placement, Replicate):
            raise InputError("placement", placement, "States are kept whole, or cut in consecutive shares.")
    return Box(tuple(ranges))


def _sliced_chunks(part: Box, shard: ParameterShard) -> tuple[ItemRun, ...]:
    """Where the items of a part of a rank's slice lie in the full tensor: fused parts are sliced each by itself."""
    chunks, offset = [], 0
    for start, length in shard.ranges:
        ranges = list(part.ranges)
        ranges[shard.dim] = (offset, offset + length)
        met = part.meet(Box(tuple(ranges)))
        if met.items:
            full = list(met.ranges)
            first, last = met.ranges[shard.dim]
            full[shard.dim] = (first - offset + start, last - offset + start)
            chunks.append(ItemRun(met.within(part), Box(tuple(full))))
        offset += length
    return tuple(chunks)


def _buffers(
    runtime: StageRuntime, tree: nn.Module, entries: Entries, is_first: bool
) -> Iterator[tuple[str, Tensor, tuple[ItemRun, ...]]]:
    # those that no layer has are on every part
    here = {placed.layer.name for placed in runtime.stage} | ({""} if is_first else set())
    groups = ((placed.layer.modules, runtime.meshes.groups(placed.strategy).channels) for placed in runtime.stage)
    sliced = {f"{path}.": group for modules, group in groups if group is not None for path in modules}
    for name, buffer in tree.named_buffers():
        if entries.homes.get(name) not in here:
            continue
        box = all_of(buffer.shape)
        group = next((group for path, group in sliced.items() if name.startswith(path)), None)
        if group is not None and name.rpartition(".")[2] in RUNNING:
            start, length = share(buffer.shape[0], group.size(), group.rank())
            box = Box(((start, start + length), *box.ranges[1:]))
        yield entries.names[name], buffer, (ItemRun(box, box),) if box.items else ()
