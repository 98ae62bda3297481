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
from galvatron_lite.runtime.activations.layout import Box, all_of, cut_box, nothing
from galvatron_lite.runtime.parameters.managed import ManagedParameter
from galvatron_lite.runtime.stages import StageRuntime

RUNNING = ("running_mean", "running_var")
"""Buffers of normalisations of which a rank that shares channels keeps its own channels only."""


@dataclass(frozen=True, slots=True)
class LocalShard:
    """Items of a tensor that lie together both in what a rank holds and in the full tensor.

    A rank that holds several runs of items of a tensor has a shard for each; without a part, one without items.
    """

    name: str  # the user's; of a shared parameter the first of its names in the model's ``state_dict()``
    shape: tuple[int, ...]  # of the full tensor
    tensor: Tensor  # this rank's, plain; it shares its storage with what training uses
    local: Box  # where in the rank's tensor
    box: Box  # where in the full tensor, of the same shape

    @property
    def items(self) -> Tensor:
        """A view of them."""
        return cut_box(self.tensor, self.local)


def complete_shard(name: str, tensor: Tensor) -> LocalShard:
    """The shard of a rank that holds all items of a tensor."""
    box = all_of(tensor.shape)
    return LocalShard(name, tuple(tensor.shape), tensor, box, box)


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of a full model's ``state_dict()``, known before the model is split."""

    names: Mapping[str, str]  # every entry, and the first name of the tensor behind it
    # the layer that holds each entry that is a buffer, or each module by its path; empty where none does
    homes: Mapping[str, str]


class Parallel(Protocol):
    """A model that is split over the launched world: a ``ParallelModel``."""

    @property
    def entries(self) -> Entries:
        """Of the full model."""

    @property
    def runtimes(self) -> Sequence[StageRuntime]:
        """The parts of the model that are on this rank."""


def entries_of(model: nn.Module, layers: Sequence[Layer]) -> Entries:
    """The entries of a full model's state; call it before the model is split."""
    state: dict[str, object] = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    held = {id(one) for one in (*model.parameters(), *model.buffers())}  # a state has what hooks add to it, too
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and id(value) in held}
    for name, value in tensors.items():
        first.setdefault(id(value), name)
    names = {name: first[id(value)] for name, value in tensors.items()}
    buffers = (name for name, value in tensors.items() if not isinstance(value, nn.Parameter))
    homes = {name: home_of(name, layers) for name in buffers}
    return Entries(names, homes | {path: home_of(f"{path}.", layers) for path, _ in model.named_modules()})


def home_of(name: str, layers: Sequence[Layer]) -> str:
    """The layer that holds a tensor, which has the longest module path around it; empty where none does."""
    holders = [(len(path), layer.name) for layer in layers for path in layer.modules if name.startswith(f"{path}.")]
    return max(holders, default=(0, ""))[1]


def held_parameters(parallel: Parallel) -> list[LocalShard]:
    """What this rank holds of every parameter; a name may come twice where several parts of the rank share it.

    All ranks call it. Who writes into them calls ``updates.take`` of every runtime afterwards.
    """
    for runtime in parallel.runtimes:
        runtime.updates.publish()
    return [
        shard
        for runtime in parallel.runtimes
        for one in runtime.owned
        for shard in _shards(parameter_name(parallel, one), one.held.detach(), one)
    ]


def full_shape(one: ManagedParameter) -> tuple[int, ...]:
    """Of the parameter in the unsplit model."""
    return _shards("", one.held.detach(), one)[0].shape


def held_gradients(parallel: Parallel) -> list[LocalShard]:
    """What this rank holds of the gradients that there are, named as their parameters."""
    return [
        shard
        for runtime in parallel.runtimes
        for one in runtime.owned
        if (gradient := one.gradient) is not None
        for shard in _shards(parameter_name(parallel, one), gradient.detach(), one)
    ]


def held_states(parallel: Parallel, states: Mapping[Any, Mapping[str, Any]]) -> list[LocalShard]:
    """What this rank holds of the tensors of an optimizer's states (by parameter), named ``PARAMETER/exp_avg``.

    Entries that are neither of the parameter's shape, nor of it with some extents 1, are whole on every rank. Entries
    that are no tensors are left out.
    """
    return [
        shard
        for runtime in parallel.runtimes
        for one in runtime.owned
        for key, value in states.get(one.updated, {}).items()
        if isinstance(value, Tensor)
        for shard in _shards(f"{parameter_name(parallel, one)}/{key}", value.detach(), one)
    ]


def held_buffers(parallel: Parallel) -> list[LocalShard]:
    """What this rank holds of the buffers of the model's state that its own layers have.

    Ranks that take other samples may have other values of the same items (running statistics); the first rank's count
    where one value is needed.
    """
    return [
        shard
        for runtime in parallel.runtimes
        for shard in _buffers(runtime, parallel.entries, is_first=runtime is parallel.runtimes[0])
    ]


def stateful_modules(parallel: Parallel) -> dict[str, nn.Module]:
    """The modules of this rank's own layers whose state holds more than tensors (``get_extra_state``), by path."""
    return {
        path: module
        for runtime in parallel.runtimes
        for path, module in runtime.model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
        and parallel.entries.homes.get(path) in _homes_on(runtime, is_first=runtime is parallel.runtimes[0])
    }


def parameter_name(parallel: Parallel, one: ManagedParameter) -> str:
    """The first name of a parameter in the full model's ``state_dict()``."""
    return parallel.entries.names.get(one.names[0], one.names[0])


def _shards(name: str, tensor: Tensor, one: ManagedParameter) -> list[LocalShard]:
    local, part, shape = _local_items(tensor, one)
    boxes = [(part.within(part), part)] if part.items else []
    shard = one.shard if one.shard is not None and one.shard.placement is Placement.SHARDED else None
    mine = tuple(one.parameter.shape)
    # it is cut where its parameter is: of its shape, or with extents 1 in other dims
    if shard is not None and _is_like(shape, mine) and shape[shard.dim] == mine[shard.dim]:
        shape, boxes = _with_extent(shape, shard.dim, shard.shape[shard.dim]), _sliced_boxes(part, shard)
    if one.spread is not None and _is_like(shape, one.spread.local_shape):  # of some experts of a mixture
        ((start, _),) = one.spread.ranges
        shape = _with_extent(shape, 0, one.spread.shape[0])
        boxes = [(inside, box.shifted(0, start)) for inside, box in boxes]
    boxes = boxes or [(nothing(len(shape)),) * 2]
    return [LocalShard(name, shape, local, inside, box) for inside, box in boxes]


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


def _sliced_boxes(part: Box, shard: ParameterShard) -> list[tuple[Box, Box]]:
    """Where the items of a part of a rank's slice lie in the part, and in the full tensor: fused parts are sliced each
    by itself."""
    boxes, offset = [], 0
    for start, length in shard.ranges:
        ranges = list(part.ranges)
        ranges[shard.dim] = (offset, offset + length)
        met = part.meet(Box(tuple(ranges)))
        if met.items:
            boxes.append((met.within(part), met.shifted(shard.dim, start - offset)))
        offset += length
    return boxes


def _homes_on(runtime: StageRuntime, is_first: bool) -> set[str]:
    """The layers of a part; what no layer has is on every part."""
    return {placed.layer.name for placed in runtime.stage} | ({""} if is_first else set())


def _buffers(runtime: StageRuntime, entries: Entries, is_first: bool) -> Iterator[LocalShard]:
    here = _homes_on(runtime, is_first)
    groups = ((placed.layer.modules, runtime.meshes.groups(placed.strategy).channels) for placed in runtime.stage)
    sliced = {f"{path}.": group for modules, group in groups if group is not None for path in modules}
    for name, buffer in runtime.model.named_buffers():
        if entries.homes.get(name) not in here:
            continue
        shard = complete_shard(entries.names[name], buffer)
        group = next((group for path, group in sliced.items() if name.startswith(path)), None)
        if group is not None and name.rpartition(".")[2] in RUNNING:
            start, length = share(buffer.shape[0], group.size(), group.rank())
            box = Box(((start, start + length), *shard.box.ranges[1:]))
            shard = replace(shard, local=box, box=box)
        yield shard
