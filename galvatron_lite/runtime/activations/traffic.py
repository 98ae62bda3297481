"""Between layers and the code around them (glue code): how tensors lie, and their way from one layout to another."""

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
"""Of a nest that travels between stages: split and full shape of each tensor that holds samples, by place, and the
layout that they come from."""


@dataclass(frozen=True, slots=True, eq=False)
class RankPiece:
    """A rank's part of a tensor of the stage."""

    tensor: Tensor  # a plain one; its gradient is complete on every rank that holds the same
    split: AxisSplit  # how the full tensor lies on the stage
    shape: tuple[int, ...]  # of the full tensor


@dataclass(frozen=True, slots=True, eq=False)
class BoundaryLayout:
    """What code in one layout works on."""

    layout: ActivationLayout  # of its activations
    axes: tuple[Axis, ...] = ()  # along which its pictures or tokens are cut; none where it works on plain tensors
    lines: tuple[AxisGroup, ...] = ()  # the ranks along each
    channels: AxisGroup | None = None  # the ranks that share the channels of what enters and leaves
    outputs: tuple[int, ...] = ()  # channels of the pictures that leave, in order; empty where their shares are equal
    # the ranks that share tokens between matmuls: each has part of the gradient of what is not cut by tokens
    matmuls: ProcessTensorGroup | None = None

    def cuts(self, split: AxisSplit, shape: Sequence[int]) -> ShardSpecs:
        """How a rank's box of a tensor is cut inside.

        Where tensor groups split a rank's tokens again, code inside sees as many tokens as all ranks of the line hold.
        """
        lines = dict(zip(self.axes, self.lines, strict=True))
        places = enumerate(zip(split.axes, shape, strict=True))
        cut = [(dim, replace(axis, inner=1), extent // axis.inner) for dim, (axis, extent) in places]
        return tuple(ShardSpec(dim, extent, lines[axis]) for dim, axis, extent in cut if axis in lines)

    def split(self, cuts: ShardSpecs, shape: Sequence[int]) -> AxisSplit:
        """How a tensor that is cut inside lies on the stage; its samples are shared."""
        shared = self.layout.samples(shape)
        axes = list(shared.axes)
        for cut in cuts:
            axes[cut.dim] = next(axis for axis, line in zip(self.axes, self.lines, strict=True) if line is cut.group)
        return AxisSplit(shared.devices, tuple(axes))


def border_of(layout: ActivationLayout, groups: StrategyGroups) -> BoundaryLayout:
    """The border of a layer: lines of ranks along the tokens or the sides of pictures that its strategy shares."""
    matmuls = ProcessTensorGroup(groups.weights) if layout.sequence > 1 else None
    if groups.tokens is not None:
        line = MirroredGroup(ProcessAxisGroup(groups.tokens))
        return BoundaryLayout(layout, (layout.token_axis,), (line,), matmuls=matmuls)
    sides = zip(layout.pixel_axes, (groups.planes, groups.rows, groups.columns), strict=True)
    lines = {axis: ProcessAxisGroup(group) for axis, group in sides if group is not None}
    return BoundaryLayout(layout, tuple(lines), tuple(lines.values()), matmuls=matmuls)


class LayoutTensor(ShardedTensor):
    """What a layer returned, as it lies: the next layer takes it so; code that looks at it gets the glue layout.

    It tells its shape, dtype and the like without that. (A subclass, so that among cut tensors it is asked first.)
    """

    piece: RankPiece
    show: Callable[[RankPiece], Tensor]  # with communication, so all ranks of the stage call it together
    rows: int
    shown: Tensor | None
    version: int  # of what is shown, when it was

    @property
    def written(self) -> bool:
        """Whether code between layers has changed what it was shown; that then counts, not the piece."""
        with locals_only():
            return self.shown is not None and self.shown._version != self.version

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about metadata; call all other functions with the tensor in the glue layout."""
        name, first = name_of(func), args[0] if args else None
        if isinstance(first, LayoutTensor) and name in _OF_PIECE:
            with locals_only():
                return func(first.piece.tensor)
        if isinstance(first, LayoutTensor) and name in _OF_SHAPE:
            return func(torch.empty((first.rows, *first.piece.shape[1:]), device="meta"), *args[1:], **(kwargs or {}))
        return func(*map_tensors(args, _seen), **map_tensors(kwargs or {}, _seen))


_OF_PIECE = frozenset({"dtype", "device", "requires_grad", "is_floating_point", "is_complex", "layout"})
_OF_SHAPE = frozenset({"shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__"})


def _seen(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, LayoutTensor):
        return tensor
    if tensor.shown is None:
        with torch.enable_grad():  # it is kept, also for code that does not look at it under no_grad
            tensor.shown = tensor.show(tensor.piece)
        with locals_only():
            tensor.version = tensor.shown._version
    return tensor.shown


@dataclass(slots=True)
class ActivationRedistributor:
    """Moves tensors between the glue code of a stage and its layers; shared by the hooks of the stage."""

    mover: BoxExchange  # changes layouts
    border: BoundaryLayout  # of the glue code: its layout, and the ranks that share its pictures
    rules: Rules  # what functions do with cut tensors
    compute: torch.dtype | None  # what floating-point inputs of blocks are cast to; None: left alone
    # by layer and place, how many items of dim 0 of an argument each sample has; without an entry, one whose dim 0 has
    # as many items as there are samples is taken to have one
    sampled: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    rows: int = 0  # of the micro-batch, over the stage
    is_running: bool = False  # whether the stage runs a micro-batch forward now
    # glue tensors that were converted for a layer in this micro-batch, by identity
    brought: dict[tuple[int, object], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def glue(self) -> ActivationLayout:
        """The layout of the glue code."""
        return self.border.layout

    def begin(self, rows: int) -> None:
        """A micro-batch of so many rows, over the stage, starts its forward pass."""
        self.brought.clear()
        self.rows, self.is_running = rows, True

    def end(self) -> None:
        """Let go of the micro-batch's tensors."""
        self.brought.clear()
        self.is_running = False

    def has_rows(self, tensor: Tensor, layout: ActivationLayout) -> bool:
        """Whether a tensor may hold a share of the samples along dim 0."""
        return tensor.dim() > 0 and tensor.shape[0] * layout.batch == self.rows

    def piece(self, tensor: Tensor, sampled: int | None = None) -> RankPiece | None:
        """The place on the stage of a tensor of the glue code; None where it does not hold the samples."""
        if isinstance(tensor, LayoutTensor):
            if not tensor.written:
                return tensor.piece
            tensor = _seen(tensor)
        if sampled not in (None, 1) or not self.has_rows(tensor, self.glue):
            return None
        tensor = settled(full_logits(tensor), self.border.lines)
        cuts, shape = specs_of(tensor), (self.rows, *global_shape(tensor)[1:])
        return RankPiece(leaving(tensor, self.border.lines), self.border.split(cuts, shape), shape)

    def loose(self, tensor: Tensor, layout: ActivationLayout) -> Tensor:
        """A glue tensor without samples for a layer: its gradient there, summed over the stage, counts once."""
        return self._between(leaving(full_logits(tensor), self.border.lines), self.glue, layout)

    def see(self, tensor: Tensor, layout: ActivationLayout) -> Tensor:
        """A layer's output that does not hold the samples, as glue code sees it."""
        return entering(self._between(tensor, layout, self.glue), (), self.border.lines, self.rules)

    def read(self, parameter: Tensor, layout: ActivationLayout) -> None:
        """Have the gradient of a layer's parameter that glue code reads by itself count as if the layer had read it."""
        factor = _factor(layout, self.glue)
        if parameter.requires_grad and factor is not None:
            sums = partial(_spread, group=self.mover.group, factor=factor)
            parameter.register_hook(sums)  # type: ignore[no-untyped-call]

    def _between(self, tensor: Tensor, source: ActivationLayout, target: ActivationLayout) -> Tensor:
        """A tensor without samples goes from one layout to another.

        In each, a rank's gradient is that of its samples: complete on all ranks that hold the same.
        """
        factor = _factor(source, target)
        if factor is None or not tensor.requires_grad:
            return tensor
        spread: Tensor = _Spread.apply(tensor, self.mover.group, factor)  # type: ignore[no-untyped-call]
        return spread

    def show(self, piece: RankPiece) -> Tensor:
        """A piece in the glue layout, as glue code sees it."""
        split = self.target(piece.shape)
        moved = self.mover(piece.tensor, piece.split, split, piece.shape)
        return entering(moved, self.border.cuts(split, piece.shape), self.border.lines, self.rules)

    def hand(self, piece: RankPiece) -> Tensor:
        """A layer's output for glue code; it moves once code looks at it."""
        if piece.split == self.target(piece.shape):
            return self.show(piece)
        # by its own shape: what a stage receives is handed over before its first micro-batch begins
        rows = piece.shape[0] // self.glue.batch
        # without data: C++ code that does not ask __torch_function__ fails instead of working on something else
        empty = torch.empty((rows, *piece.shape[1:]), dtype=piece.tensor.dtype, device="meta")
        handed: LayoutTensor = empty.as_subclass(LayoutTensor)
        handed.piece, handed.rows, handed.show, handed.shown = piece, rows, self.show, None
        return handed

    def target(self, shape: tuple[int, ...]) -> AxisSplit:
        """How a tensor of the samples lies in the glue code."""
        layout = self.glue
        return layout.hidden(shape) if self.border.lines else layout.samples(shape)

    def pack(self, value: Any) -> tuple[Any, Arrived]:
        """What travels to the next stage: plain tensors, and how those lie that hold samples."""
        lying: dict[str, tuple[AxisSplit, tuple[int, ...]]] = {}

        def plain(place: str, tensor: Tensor) -> Tensor:
            piece = self.piece(tensor)
            if piece is None:
                return self.loose(tensor, self.glue)
            lying[place] = piece.split, piece.shape
            return piece.tensor

        return map_places(value, plain), (lying, self.glue)

    def unpack(self, value: Any, arrived: Arrived) -> Any:
        """What came from the stage before, for glue code."""
        lying, source = arrived

        def arrive(place: str, tensor: Tensor) -> Tensor:
            return self.hand(RankPiece(tensor, *lying[place])) if place in lying else self.see(tensor, source)

        return map_places(value, arrive)

    def cut_batch(self, part: Any, device: torch.device) -> Any:
        """This rank's share of pictures, and of all whose last dims are the pictures' pixels, on a device.

        Ids of tokens, masks and labels stay whole: layers that share tokens take their own.
        """
        sides = _sides(part) if self.glue.splits_pixels else ()

        def cut(tensor: Tensor) -> Tensor:
            first = tensor.dim() - len(sides)
            if not sides or first < 1 or tuple(tensor.shape[first:]) != sides:
                return tensor.to(device, non_blocking=True)
            axes = (*[Axis()] * first, *self.glue.pixel_axes[-len(sides) :])
            cuts = self.border.cuts(AxisSplit(self.glue.devices, axes), tensor.shape)
            for one in cuts:
                tensor = tensor.narrow(one.dim, one.start, one.length)
            there = tensor.to(device, non_blocking=True).contiguous()
            return from_local(there.view_as(there), cuts, self.rules)

        return map_tensors(part, cut)


def redistributor_of(
    stage: Sequence[LayerAssignment],
    meshes: Meshes,
    sampled: Mapping[str, Mapping[str, int]],
    compute: torch.dtype | None,
) -> ActivationRedistributor:
    """The redistributor of a stage, whose glue code has the layout of its first edge, else of its first block."""
    glue = glue_of(stage).strategy
    border = border_of(glue_layout(stage), meshes.groups(glue))
    mover = BoxExchange(meshes.groups(stage[0].strategy).everyone, meshes.index_in_stage)
    return ActivationRedistributor(mover, border, rules_under(glue), compute, sampled)


def _sides(part: Any) -> tuple[int, ...]:
    """Extents of the pixels of the batch's pictures: its floating-point tensor of the most dims."""
    pictures = [tensor for tensor in tensors_of(part) if tensor.is_floating_point() and tensor.dim() > PIXELS]
    return tuple(max(pictures, key=lambda tensor: tensor.dim()).shape[PIXELS:]) if pictures else ()


class _Spread(torch.autograd.Function):
    """The tensor; its gradient is the sum of the ranks' times a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None, factor: float) -> Tensor:
        ctx.group, ctx.factor = group, factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _spread(gradient, ctx.group, ctx.factor), None, None


def _spread(gradient: Tensor, group: dist.ProcessGroup | None, factor: float) -> Tensor:
    total = gradient * factor
    dist.all_reduce(total, group=group)
    return total


def _factor(source: ActivationLayout, target: ActivationLayout) -> float | None:
    """What the sum of the ranks' gradients is multiplied by between two layouts; None: each rank's is right already."""
    alike = source.batch == target.batch or source.devices != target.devices
    return None if alike else 1 / (target.replicas * source.batch)
