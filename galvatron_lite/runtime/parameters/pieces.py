"""This rank's parts of the tensors of the training state: boxes of full tensors, under the user's own names.

Checkpoints and changes of the plan use only these: which rank has which part of which tensor, whatever split it.
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
"""Buffers of normalisations of which a rank that shares channels has only its own channels."""


@dataclass(frozen=True, slots=True)
class LocalShard:
    """Items of a tensor that form a box both in the rank's tensor and in the full tensor.

    A rank has a shard for each such box; if it has no part of a tensor, a shard without items.
    """

    name: str  # the user's; of a shared parameter the first of its names in the model's ``state_dict()``
    shape: tuple[int, ...]  # of the full tensor
    tensor: Tensor  # this rank's plain tensor, which shares its storage with what training uses
    local: Box  # in the rank's tensor
    box: Box  # in the full tensor, of the same shape

    @property
    def items(self) -> Tensor:
        """A view of the items."""
        return cut_box(self.tensor, self.local)


def complete_shard(name: str, tensor: Tensor) -> LocalShard:
    """The shard of a rank that has the full tensor."""
    box = all_of(tensor.shape)
    return LocalShard(name, tuple(tensor.shape), tensor, box, box)


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of a full model's ``state_dict()``, from before the model is split."""

    names: Mapping[str, str]  # the first name of the tensor, by name of the entry
    homes: Mapping[str, str]  # the layer of a buffer or a module, by its name; empty if no layer contains it


class Parallel(Protocol):
    """A model that is split over the launched world: a ``ParallelModel``."""

    @property
    def entries(self) -> Entries:
        """Those of the full model."""

    @property
    def runtimes(self) -> Sequence[StageRuntime]:
        """This rank's stages or branches."""


def entries_of(model: nn.Module, layers: Sequence[Layer]) -> Entries:
    """The entries of a full model's state; call it before the model is split."""
    state: dict[str, object] = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    own_ids = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}  # hooks may add entries to a state
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and id(value) in own_ids}
    for name, value in tensors.items():
        first.setdefault(id(value), name)
    names = {name: first[id(value)] for name, value in tensors.items()}
    buffers = (name for name, value in tensors.items() if not isinstance(value, nn.Parameter))
    homes = {name: home_of(name, layers) for name in buffers}
    return Entries(names, homes | {path: home_of(f"{path}.", layers) for path, _ in model.named_modules()})


def home_of(name: str, layers: Sequence[Layer]) -> str:
    """The layer that contains a tensor, by the longest path of a module; empty if none does."""
    holders = [(len(path), layer.name) for layer in layers for path in layer.modules if name.startswith(f"{path}.")]
    return max(holders, default=(0, ""))[1]


def held_parameters(parallel: Parallel) -> list[LocalShard]:
    """This rank's parts of all parameters; a name occurs twice if several runtimes of the rank share a parameter.

    All ranks call it. Call ``updates.take`` of every runtime after writing into the parts.
    """
    for runtime in parallel.runtimes:
        runtime.updates.publish()
    return [
        shard
        for runtime in parallel.runtimes
        for managed in runtime.owned
        for shard in _shards(parameter_name(parallel, managed), managed.held.detach(), managed)
    ]


def full_shape(managed: ManagedParameter) -> tuple[int, ...]:
    """The shape of a parameter in the unsplit model."""
    return _shards("", managed.held.detach(), managed)[0].shape


def held_gradients(parallel: Parallel) -> list[LocalShard]:
    """This rank's parts of the gradients, named as their parameters."""
    return [
        shard
        for runtime in parallel.runtimes
        for managed in runtime.owned
        if (gradient := managed.gradient) is not None
        for shard in _shards(parameter_name(parallel, managed), gradient.detach(), managed)
    ]


def held_states(parallel: Parallel, states: Mapping[Any, Mapping[str, Any]]) -> list[LocalShard]:
    """This rank's parts of the tensors of an optimizer's states (by parameter), named ``PARAMETER/exp_avg``.

    Entries that have neither the parameter's shape, nor that shape with some extents 1, are complete on every rank.
    Entries that are no tensors are left out.
    """
    return [
        shard
        for runtime in parallel.runtimes
        for managed in runtime.owned
        for key, value in states.get(managed.updated, {}).items()
        if isinstance(value, Tensor)
        for shard in _shards(f"{parameter_name(parallel, managed)}/{key}", value.detach(), managed)
    ]


def held_buffers(parallel: Parallel) -> list[LocalShard]:
    """This rank's parts of the buffers of its layers that are in the model's state.

    Ranks with other samples may have other values of the same items (running statistics); those of the first rank are
    used where one value is needed.
    """
    return [
        shard
        for runtime in parallel.runtimes
        for shard in _buffers(runtime, parallel.entries, is_first=runtime is parallel.runtimes[0])
    ]


def stateful_modules(parallel: Parallel) -> dict[str, nn.Module]:
    """The modules of this rank's layers whose state contains more than tensors (``get_extra_state``), by path."""
    return {
        path: module
        for runtime in parallel.runtimes
        for path, module in runtime.model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
        and parallel.entries.homes.get(path) in _homes_on(runtime, is_first=runtime is parallel.runtimes[0])
    }


def parameter_name(parallel: Parallel, managed: ManagedParameter) -> str:
    """The first name of a parameter in the full model's ``state_dict()``."""
    return parallel.entries.names.get(managed.names[0], managed.names[0])


def _shards(name: str, tensor: Tensor, managed: ManagedParameter) -> list[LocalShard]:
    """The shards of a tensor that is split as a parameter is: the parameter, its gradient or an optimizer's state."""
    local, part, shape = _local_items(tensor, managed)
    boxes = [(part.within(part), part)] if part.items else []
    shard = managed.shard if managed.shard is not None and managed.shard.placement is Placement.SHARDED else None
    local_shape = tuple(managed.parameter.shape)
    # it is sliced if it has the shape of the parameter, or extents 1 in other dims
    if shard is not None and _is_like(shape, local_shape) and shape[shard.dim] == local_shape[shard.dim]:
        shape, boxes = _with_extent(shape, shard.dim, shard.shape[shard.dim]), _sliced_boxes(part, shard)
    if managed.spread is not None and _is_like(shape, managed.spread.local_shape):  # some experts of a mixture
        ((start, _),) = managed.spread.ranges
        shape = _with_extent(shape, 0, managed.spread.shape[0])
        boxes = [(inside, box.shifted(0, start)) for inside, box in boxes]
    boxes = boxes or [(nothing(len(shape)),) * 2]
    return [LocalShard(name, shape, local, inside, box) for inside, box in boxes]


def _is_like(shape: Sequence[int], other: Sequence[int]) -> bool:
    return len(shape) == len(other) and all(a in (1, b) for a, b in zip(shape, other, strict=True))


def _with_extent(shape: tuple[int, ...], dim: int, extent: int) -> tuple[int, ...]:
    return (*shape[:dim], extent, *shape[dim + 1 :])


def _local_items(tensor: Tensor, managed: ManagedParameter) -> tuple[Tensor, Box, tuple[int, ...]]:
    """The plain local tensor, its box in this rank's slice of the parameter, and the shape of the slice."""
    if isinstance(tensor, DTensor):
        return tensor.to_local(), _local_box(tensor), tuple(tensor.shape)
    parameter: Tensor = managed.reduced
    if isinstance(parameter, DTensor) and tuple(tensor.shape) not in ((), tuple(parameter.shape)):
        # from an optimizer that works on local items
        box = _local_box(parameter)
        if box.shape == tuple(tensor.shape):
            return tensor, box, tuple(parameter.shape)
    return tensor, all_of(tensor.shape), tuple(tensor.shape)


def _local_box(tensor: DTensor) -> Box:
    """This rank's box of a DTensor: along each axis of the mesh torch splits as ``torch.chunk`` does."""
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
    """The boxes of a part of a rank's slice, in the part and in the full tensor; fused parts are sliced separately."""
    boxes, offset = [], 0
    for start, length in shard.ranges:
        ranges = list(part.ranges)
        ranges[shard.dim] = (offset, offset + length)
        overlap = part.meet(Box(tuple(ranges)))
        if overlap.items:
            boxes.append((overlap.within(part), overlap.shifted(shard.dim, start - offset)))
        offset += length
    return boxes


def _homes_on(runtime: StageRuntime, is_first: bool) -> set[str]:
    """The layers of a runtime; what is in no layer counts with this rank's first runtime."""
    return {placed.layer.name for placed in runtime.stage} | ({""} if is_first else set())


def _buffers(runtime: StageRuntime, entries: Entries, is_first: bool) -> Iterator[LocalShard]:
    homes = _homes_on(runtime, is_first)
    groups = ((placed.layer.modules, runtime.meshes.groups(placed.strategy).channels) for placed in runtime.stage)
    sliced = {f"{path}.": group for modules, group in groups if group is not None for path in modules}
    for name, buffer in runtime.model.named_buffers():
        if entries.homes.get(name) not in homes:
            continue
        shard = complete_shard(entries.names[name], buffer)
        group = next((group for path, group in sliced.items() if name.startswith(path)), None)
        if group is not None and name.rpartition(".")[2] in RUNNING:
            start, length = share(buffer.shape[0], group.size(), group.rank())
            box = Box(((start, start + length), *shard.box.ranges[1:]))
            shard = replace(shard, local=box, box=box)
        yield shard
