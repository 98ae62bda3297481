"""Activations between layers and the code around them (glue code), and their conversion from one layout to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.model.batch import map_places, map_tensors, tensors_of
from galvatron_lite.parallelism.sharded.groups import AxisGroup, MirroredGroup, ProcessAxisGroup
from galvatron_lite.parallelism.sharded.tensor import (
    Rules,
    ShardedTensor,
    ShardSpec,
    ShardSpecs,
    from_local,
    global_shape,
    locals_only,
    name_of,
    specs_of,
)
from galvatron_lite.parallelism.spatial.apply import entering, leaving, settled
from galvatron_lite.parallelism.tensor.group import ProcessTensorGroup
from galvatron_lite.parallelism.vocabulary.logits import full_logits
from galvatron_lite.parallelism.wrapping import rules_under
from galvatron_lite.runtime.activations.layout import PIXELS, ActivationLayout, Axis, AxisSplit, BoxExchange
from galvatron_lite.runtime.assignment import LayerAssignment, glue_layout, glue_of
from galvatron_lite.runtime.mesh import Meshes, StrategyGroups

Arrived = tuple[Mapping[str, tuple[AxisSplit, tuple[int, ...]]], ActivationLayout]
"""Of a nest that is sent to another stage: split and full shape of each tensor that contains samples, by place, and the
layout of the sender's glue code."""


@dataclass(frozen=True, slots=True, eq=False)
class RankPiece:
    """A rank's part of a tensor of the stage."""

    tensor: Tensor  # a plain one; its gradient is complete on every rank that holds the same part
    split: AxisSplit  # how the stage shares the full tensor
    shape: tuple[int, ...]  # of the full tensor


@dataclass(frozen=True, slots=True, eq=False)
class BoundaryLayout:
    """What code in one layout works on."""

    layout: ActivationLayout  # of its activations
    axes: tuple[Axis, ...] = ()  # along which its pictures or tokens are sharded; none if it works on plain tensors
    lines: tuple[AxisGroup, ...] = ()  # the ranks along each axis
    channels: AxisGroup | None = None  # the ranks that share the channels of its inputs and outputs
    outputs: tuple[int, ...] = ()  # channels of its output pictures, in order; empty if their shares are equal
    # the ranks that share tokens between matmuls: each has part of the gradient of tensors that are not split by tokens
    matmuls: ProcessTensorGroup | None = None

    def cuts(self, split: AxisSplit, shape: Sequence[int]) -> ShardSpecs:
        """How a rank's box of a tensor is sharded inside.

        Where tensor groups split a rank's tokens again, code inside sees as many tokens as all ranks of the line hold.
        """
        lines = dict(zip(self.axes, self.lines, strict=True))
        dims = enumerate(zip(split.axes, shape, strict=True))
        outer = [(dim, replace(axis, inner=1), extent // axis.inner) for dim, (axis, extent) in dims]
        return tuple(ShardSpec(dim, extent, lines[axis]) for dim, axis, extent in outer if axis in lines)

    def split(self, cuts: ShardSpecs, shape: Sequence[int]) -> AxisSplit:
        """How the stage shares a tensor that is sharded inside; its samples are shared."""
        by_samples = self.layout.samples(shape)
        axes = list(by_samples.axes)
        for cut in cuts:
            axes[cut.dim] = next(axis for axis, line in zip(self.axes, self.lines, strict=True) if line is cut.group)
        return AxisSplit(by_samples.devices, tuple(axes))


def border_of(layout: ActivationLayout, groups: StrategyGroups) -> BoundaryLayout:
    """The border of a layer, with the ranks along the tokens or the sides of pictures that its strategy shares."""
    matmuls = ProcessTensorGroup(groups.weights) if layout.sequence > 1 else None
    if groups.tokens is not None:
        line = MirroredGroup(ProcessAxisGroup(groups.tokens))
        return BoundaryLayout(layout, (layout.token_axis,), (line,), matmuls=matmuls)
    sides = zip(layout.pixel_axes, (groups.planes, groups.rows, groups.columns), strict=True)
    lines = {axis: ProcessAxisGroup(group) for axis, group in sides if group is not None}
    return BoundaryLayout(layout, tuple(lines), tuple(lines.values()), matmuls=matmuls)


class LayoutTensor(ShardedTensor):
    """A layer's output in the layer's layout, which the next layer takes as it is; for glue code it is converted.

    Questions about its shape, dtype and the like do not convert it. (A subclass, so that among sharded tensors its
    ``__torch_function__`` comes first.)
    """

    piece: RankPiece
    convert: Callable[[RankPiece], Tensor]  # to the glue layout; it communicates, so all ranks of the stage call it
    rows: int
    converted: Tensor | None
    version: int  # of ``converted``, when it was created

    @property
    def was_written(self) -> bool:
        """Whether glue code has written to the converted tensor, which then replaces the piece."""
        with locals_only():
            return self.converted is not None and self.converted._version != self.version

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about metadata; call all other functions with the converted tensor."""
        name, first = name_of(func), args[0] if args else None
        if isinstance(first, LayoutTensor) and name in _OF_PIECE:
            with locals_only():
                return func(first.piece.tensor)
        if isinstance(first, LayoutTensor) and name in _OF_SHAPE:
            return func(torch.empty((first.rows, *first.piece.shape[1:]), device="meta"), *args[1:], **(kwargs or {}))
        return func(*map_tensors(args, _converted), **map_tensors(kwargs or {}, _converted))


_OF_PIECE = frozenset({"dtype", "device", "requires_grad", "is_floating_point", "is_complex", "layout"})
_OF_SHAPE = frozenset({"shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__"})


def _converted(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, LayoutTensor):
        return tensor
    if tensor.converted is None:
        with torch.enable_grad():  # it is kept, also for code outside of no_grad
            tensor.converted = tensor.convert(tensor.piece)
        with locals_only():
            tensor.version = tensor.converted._version
    return tensor.converted


@dataclass(slots=True)
class ActivationRedistributor:
    """Converts tensors between the glue code of a stage and its layers; shared by the hooks of the stage."""

    mover: BoxExchange  # changes layouts
    border: BoundaryLayout  # of the glue code: its layout, and the ranks that share its pictures
    rules: Rules  # what functions do with sharded tensors
    compute: torch.dtype | None  # what floating-point inputs of blocks are cast to; None: they are not
    # by layer and place, how many items of dim 0 of an argument each sample has; without an entry, an argument whose
    # dim 0 has as many items as there are samples is assumed to have one
    sampled: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    rows: int = 0  # of the micro-batch, over the stage
    is_running: bool = False  # whether the stage runs the forward pass of a micro-batch
    # glue tensors and what they were converted to for layers in this micro-batch, by identity
    cache: dict[tuple[int, object], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def glue(self) -> ActivationLayout:
        """The layout of the glue code."""
        return self.border.layout

    def begin(self, rows: int) -> None:
        """Begin the forward pass of a micro-batch of so many rows, over the stage."""
        self.cache.clear()
        self.rows, self.is_running = rows, True

    def end(self) -> None:
        """Release the micro-batch's tensors."""
        self.cache.clear()
        self.is_running = False

    def has_rows(self, tensor: Tensor, layout: ActivationLayout) -> bool:
        """Whether dim 0 of a tensor may be a share of the samples."""
        return tensor.dim() > 0 and tensor.shape[0] * layout.batch == self.rows

    def piece(self, tensor: Tensor, sampled: int | None = None) -> RankPiece | None:
        """The piece of a tensor of the glue code; None if it does not contain the samples."""
        if isinstance(tensor, LayoutTensor):
            if not tensor.was_written:
                return tensor.piece
            tensor = _converted(tensor)
        if sampled not in (None, 1) or not self.has_rows(tensor, self.glue):
            return None
        tensor = settled(full_logits(tensor), self.border.lines)
        cuts, shape = specs_of(tensor), (self.rows, *global_shape(tensor)[1:])
        return RankPiece(leaving(tensor, self.border.lines), self.border.split(cuts, shape), shape)

    def unsampled_to_layer(self, tensor: Tensor, layout: ActivationLayout) -> Tensor:
        """A glue tensor without samples, for a layer: its gradient there, summed over the stage, counts once."""
        return self._convert_unsampled(leaving(full_logits(tensor), self.border.lines), self.glue, layout)

    def unsampled_to_glue(self, tensor: Tensor, layout: ActivationLayout) -> Tensor:
        """A layer's output without samples, for glue code."""
        return entering(self._convert_unsampled(tensor, layout, self.glue), (), self.border.lines, self.rules)

    def count_as_read_by_layer(self, parameter: Tensor, layout: ActivationLayout) -> None:
        """Make the gradient of a layer's parameter that glue code reads count as if the layer had read it."""
        factor = _gradient_factor(layout, self.glue)
        if parameter.requires_grad and factor is not None:
            hook = partial(_sum_gradients, group=self.mover.group, factor=factor)
            parameter.register_hook(hook)  # type: ignore[no-untyped-call]

    def _convert_unsampled(self, tensor: Tensor, source: ActivationLayout, target: ActivationLayout) -> Tensor:
        """Convert a tensor without samples.

        In each layout, a rank's gradient is that of its samples: complete on all ranks that hold the same.
        """
        factor = _gradient_factor(source, target)
        if factor is None or not tensor.requires_grad:
            return tensor
        converted: Tensor = _SummedGradient.apply(tensor, self.mover.group, factor)  # type: ignore[no-untyped-call]
        return converted

    def to_glue(self, piece: RankPiece) -> Tensor:
        """Convert a piece for glue code."""
        split = self.target(piece.shape)
        moved = self.mover(piece.tensor, piece.split, split, piece.shape)
        return entering(moved, self.border.cuts(split, piece.shape), self.border.lines, self.rules)

    def lazy(self, piece: RankPiece) -> Tensor:
        """A layer's output that is converted once glue code reads it."""
        if piece.split == self.target(piece.shape):
            return self.to_glue(piece)
        # by its own shape: what a stage receives is created before its first micro-batch begins
        rows = piece.shape[0] // self.glue.batch
        # without data: C++ code that does not ask __torch_function__ fails instead of using wrong values
        empty = torch.empty((rows, *piece.shape[1:]), dtype=piece.tensor.dtype, device="meta")
        tensor: LayoutTensor = empty.as_subclass(LayoutTensor)
        tensor.piece, tensor.rows, tensor.convert, tensor.converted = piece, rows, self.to_glue, None
        return tensor

    def target(self, shape: tuple[int, ...]) -> AxisSplit:
        """How glue code shares a tensor with samples."""
        layout = self.glue
        return layout.hidden(shape) if self.border.lines else layout.samples(shape)

    def pack(self, value: Any) -> tuple[Any, Arrived]:
        """What is sent to the next stage: plain tensors, and the splits of those with samples."""
        splits: dict[str, tuple[AxisSplit, tuple[int, ...]]] = {}

        def pack_tensor(place: str, tensor: Tensor) -> Tensor:
            piece = self.piece(tensor)
            if piece is None:
                return self.unsampled_to_layer(tensor, self.glue)
            splits[place] = piece.split, piece.shape
            return piece.tensor

        return map_places(value, pack_tensor), (splits, self.glue)

    def unpack(self, value: Any, arrived: Arrived) -> Any:
        """What was received from an earlier stage, for glue code."""
        splits, source = arrived

        def unpack_tensor(place: str, tensor: Tensor) -> Tensor:
            if place not in splits:
                return self.unsampled_to_glue(tensor, source)
            return self.lazy(RankPiece(tensor, *splits[place]))

        return map_places(value, unpack_tensor)

    def cut_batch(self, part: Any, device: torch.device) -> Any:
        """Move a batch to a device; of pictures, and tensors whose last dims are their pixels, this rank's share.

        Ids of tokens, masks and labels stay complete: layers that share tokens take their own part.
        """
        sides = _sides(part) if self.glue.splits_pixels else ()

        def cut(tensor: Tensor) -> Tensor:
            first = tensor.dim() - len(sides)
            if not sides or first < 1 or tuple(tensor.shape[first:]) != sides:
                return tensor.to(device, non_blocking=True)
            axes = (*[Axis()] * first, *self.glue.pixel_axes[-len(sides) :])
            cuts = self.border.cuts(AxisSplit(self.glue.devices, axes), tensor.shape)
            for spec in cuts:
                tensor = tensor.narrow(spec.dim, spec.start, spec.length)
            local = tensor.to(device, non_blocking=True).contiguous()
            return from_local(local.view_as(local), cuts, self.rules)

        return map_tensors(part, cut)


def redistributor_of(
    stage: Sequence[LayerAssignment],
    meshes: Meshes,
    sampled: Mapping[str, Mapping[str, int]],
    compute: torch.dtype | None,
) -> ActivationRedistributor:
    """The redistributor of a stage; see ``ActivationRedistributor`` for ``sampled`` and ``compute``."""
    glue = glue_of(stage).strategy
    border = border_of(glue_layout(stage), meshes.groups(glue))
    mover = BoxExchange(meshes.groups(stage[0].strategy).everyone, meshes.index_in_stage)
    return ActivationRedistributor(mover, border, rules_under(glue), compute, sampled)


def _sides(part: Any) -> tuple[int, ...]:
    """Extents of the pixels of the batch's pictures: of its floating-point tensor with the most dims."""
    pictures = [tensor for tensor in tensors_of(part) if tensor.is_floating_point() and tensor.dim() > PIXELS]
    return tuple(max(pictures, key=lambda tensor: tensor.dim()).shape[PIXELS:]) if pictures else ()


class _SummedGradient(torch.autograd.Function):
    """Returns the tensor; its gradient is the sum of the ranks' gradients times a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None, factor: float) -> Tensor:
        ctx.group, ctx.factor = group, factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _sum_gradients(gradient, ctx.group, ctx.factor), None, None


def _sum_gradients(gradient: Tensor, group: dist.ProcessGroup | None, factor: float) -> Tensor:
    total = gradient * factor
    dist.all_reduce(total, group=group)
    return total


def _gradient_factor(source: ActivationLayout, target: ActivationLayout) -> float | None:
    """The factor of the sum of the ranks' gradients between two layouts; None if each rank's gradient is right."""
    is_right = source.batch == target.batch or source.devices != target.devices
    return None if is_right else 1 / (target.replicas * source.batch)
