"""The glue code of a stage: what it works on, and what goes from it to layers and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.model.batch import map_places, map_tensors, tensors_of
from galvatron_lite.parallelism.sharded.tensor import Rules, from_local, global_shape, specs_of
from galvatron_lite.parallelism.spatial.apply import entering, leaving, settled
from galvatron_lite.parallelism.vocabulary.logits import whole_logits
from galvatron_lite.runtime.border import BoundaryLayout, RankPiece
from galvatron_lite.runtime.layout import PIXELS, Axis, AxisSplit, Layout
from galvatron_lite.runtime.layout_tensor import LayoutTensor, layout_tensor
from galvatron_lite.runtime.redistribute import Mover

Arrived = tuple[Mapping[str, tuple[AxisSplit, tuple[int, ...]]], Layout]
"""How tensors of a nest that travels between stages lie, by place: split, and shape of the whole; those that are not
named hold no samples. And the layout that they come from."""


@dataclass(slots=True)
class Traffic:
    """What the hooks of one stage share."""

    mover: Mover  # changes layouts
    border: BoundaryLayout  # of the glue code: its layout, and the ranks that share its pictures
    rules: Rules  # what functions do with cut tensors
    compute: torch.dtype | None  # what floating-point inputs of blocks are cast to; None: left alone
    # by layer and place, how many items of dim 0 of an argument each sample has; where nothing is known, one whose
    # dim 0 has as many items as there are samples is taken to have one
    sampled: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    rows: int = 0  # of the micro-batch, over the whole stage
    is_running: bool = False  # whether the stage runs a micro-batch forward now
    # glue tensors that were converted for a layer in this micro-batch, by identity
    brought: dict[tuple[int, object], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def glue(self) -> Layout:
        """The layout of the glue code."""
        return self.border.layout

    def begin(self, rows: int) -> None:
        """A micro-batch of so many rows, over the whole stage, starts its forward pass."""
        self.brought.clear()
        self.rows, self.is_running = rows, True

    def end(self) -> None:
        """Let go of the micro-batch's tensors."""
        self.brought.clear()
        self.is_running = False

    def has_rows(self, tensor: Tensor, layout: Layout) -> bool:
        """Whether a tensor may hold a share of the samples along dim 0."""
        return tensor.dim() > 0 and tensor.shape[0] * layout.batch == self.rows

    def piece(self, tensor: Tensor, sampled: int | None = None) -> RankPiece | None:
        """What a tensor of the glue code is on the stage; None where it does not hold the samples.

        Args:
            tensor: plain, cut, or as a layer returned it.
            sampled: items of dim 0 of each sample; None: not known.
        """
        if isinstance(tensor, LayoutTensor):
            return tensor.piece
        if sampled not in (None, 1) or not self.has_rows(tensor, self.glue):
            return None
        tensor = settled(whole_logits(tensor), self.border.lines)
        cuts, shape = specs_of(tensor), (self.rows, *global_shape(tensor)[1:])
        return RankPiece(leaving(tensor, self.border.lines), self.border.split(cuts, shape), shape)

    def loose(self, tensor: Tensor, layout: Layout) -> Tensor:
        """A glue tensor without samples for a layer: its gradient there, summed over the stage, counts once."""
        return self._between(leaving(whole_logits(tensor), self.border.lines), self.glue, layout)

    def see(self, tensor: Tensor, layout: Layout) -> Tensor:
        """What a layer returned that does not hold the samples, as glue code sees it."""
        return entering(self._between(tensor, layout, self.glue), (), self.border.lines, self.rules)

    def _between(self, tensor: Tensor, source: Layout, target: Layout) -> Tensor:
        """A tensor without samples goes from one layout to another.

        In each, a rank's gradient is that of its samples: complete on all ranks that hold the same.
        """
        if not tensor.requires_grad or source.batch == target.batch or source.devices != target.devices:
            return tensor
        return _spread(tensor, self.mover.group, 1 / (target.replicas * source.batch))

    def show(self, piece: RankPiece) -> Tensor:
        """A piece in the glue layout, as glue code sees it."""
        split = self.target(piece.shape)
        moved = self.mover(piece.tensor, piece.split, split, piece.shape)
        return entering(moved, self.border.cuts(split, piece.shape), self.border.lines, self.rules)

    def hand(self, piece: RankPiece) -> Tensor:
        """What glue code is given of what a layer returned; it moves once code looks at it."""
        if piece.split == self.target(piece.shape):
            return self.show(piece)
        # by its own shape: what a stage receives is handed over before its first micro-batch begins
        return layout_tensor(piece, piece.shape[0] // self.glue.batch, self.show)

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
        """What came from the stage before, as glue code is given it."""
        lying, source = arrived

        def arrive(place: str, tensor: Tensor) -> Tensor:
            return self.hand(RankPiece(tensor, *lying[place])) if place in lying else self.see(tensor, source)

        return map_places(value, arrive)

    def cut_batch(self, part: Any, device: torch.device) -> Any:
        """This rank's share of pictures, and of all whose last dims are the pictures' pixels, as glue code sees it.

        Ids of tokens, masks and labels stay whole: layers that share tokens take their own.

        Args:
            part: this rank's samples, whole.
            device: where to put it.
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


def _sides(part: Any) -> tuple[int, ...]:
    """Extents of the pixels of the batch's pictures: its floating-point tensor of the most dims."""
    pictures = [tensor for tensor in tensors_of(part) if tensor.is_floating_point() and tensor.dim() > PIXELS]
    return tuple(max(pictures, key=lambda tensor: tensor.dim()).shape[PIXELS:]) if pictures else ()


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None, factor: float) -> Tensor:
        ctx.group, ctx.factor = group, factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = gradient * ctx.factor
        dist.all_reduce(total, group=ctx.group)
        return total, None, None


def _spread(tensor: Tensor, group: dist.ProcessGroup | None, factor: float) -> Tensor:
    """The tensor; its gradient is the sum of the ranks' times a factor."""
    spread: Tensor = _Spread.apply(tensor, group, factor)  # type: ignore[no-untyped-call]
    return spread
