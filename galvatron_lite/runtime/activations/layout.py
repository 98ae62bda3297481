"""Layouts of activations on the ranks of a stage, where each rank holds boxes of the full tensor, and their exchange.

An ``ActivationLayout`` is the number of shares of samples, tokens, pixels and channels under a strategy. An
``AxisSplit`` describes one tensor in a layout, dim by dim: a picture (samples, channels, [[planes,] rows,] columns) and
the scores computed from it have different splits in one layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product
from math import prod
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.layout import Layout, layout_of
from galvatron_lite.parallelism.shares import Range, mirrored, part_of, share
from galvatron_lite.parallelism.strategy import Strategy

INNER, PIXELS = 1, 2
"""The dim of tokens or channels, and the first dim of pixels."""
IDS, HIDDEN = 2, 3
"""Numbers of dims of ids (samples, tokens), and of a hidden state (samples, tokens, features)."""


@dataclass(frozen=True, slots=True)
class Axis:
    """How one dim of a tensor is shared: the rank at ``place`` takes share ``place // stride % shares``."""

    shares: int = 1
    stride: int = 1  # ranks from one share to the next
    inner: int = 1  # number of equal parts of each share, for neighbouring ranks
    # whether a share is an early and a late piece (``shares.mirrored``): tokens of context parallelism
    mirrored: bool = False

    def pieces(self, place: int, extent: int) -> tuple[Range, ...]:
        """The ranges of a dim that the rank at ``place`` of the stage holds, in order."""
        number = place // self.stride % self.shares
        if not self.mirrored:
            start, length = share(extent, self.shares, number)
            return ((start, start + length),)
        pieces = mirrored(extent, self.shares, number)
        if self.inner == 1:
            return pieces
        each = sum(stop - start for start, stop in pieces) // self.inner
        first = place // (self.stride // self.inner) % self.inner * each
        return part_of(pieces, first, first + each)


WHOLE = Axis()
"""The axis of a dim that is not shared."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: (start, stop) along each dim, ends excluded."""

    ranges: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the box."""
        return tuple(max(0, stop - start) for start, stop in self.ranges)

    @property
    def items(self) -> int:
        """Number of items inside."""
        return prod(self.shape)

    def meet(self, other: Box) -> Box:
        """The intersection with another box; without items if they are disjoint."""
        pairs = zip(self.ranges, other.ranges, strict=True)
        return Box(tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs))

    def within(self, other: Box) -> Box:
        """The same items, relative to the start of another box."""
        pairs = zip(self.ranges, other.ranges, strict=True)
        return Box(tuple((start - first, stop - first) for (start, stop), (first, _) in pairs))

    def shifted(self, dim: int, items: int) -> Box:
        """The box moved by a number of items along a dim."""
        start, stop = self.ranges[dim]
        return Box((*self.ranges[:dim], (start + items, stop + items), *self.ranges[dim + 1 :]))


Boxes = tuple[Box, ...]
"""A rank's part of a tensor: one box, or several that are concatenated along a dim."""
Everyone = tuple[Boxes, ...]
"""The parts of all ranks; boxes are equal or disjoint."""


def all_of(shape: Sequence[int]) -> Box:
    """The box of a full tensor."""
    return Box(tuple((0, extent) for extent in shape))


def cut_box(tensor: Tensor, box: Box) -> Tensor:
    """A view of the items of a box."""
    for dim, (start, stop) in enumerate(box.ranges):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


@dataclass(frozen=True, slots=True)
class AxisSplit:
    """How the ranks of a stage share one tensor; ranks that differ in no axis hold the same part."""

    devices: int  # ranks of the stage
    axes: tuple[Axis, ...]  # by dim

    def box(self, place: int, shape: Sequence[int]) -> Box:
        """The box that the rank at ``place`` of the stage holds of a full tensor of that shape.

        Raises:
            InputError: it holds several boxes.
        """
        boxes = self.boxes(place, shape)
        if len(boxes) != 1:
            remedy = "Here each rank must hold one box: plan the layers that share tokens with context=1."
            raise InputError("split of tokens", len(boxes), remedy)
        return boxes[0]

    def boxes(self, place: int, shape: Sequence[int]) -> Boxes:
        """The boxes that the rank at ``place`` holds, in the order in which its tensor concatenates them.

        At most one dim has several pieces.
        """
        pieces = [axis.pieces(place, extent) for extent, axis in zip(shape, self.axes, strict=True)]
        return tuple(Box(ranges) for ranges in product(*pieces))

    @property
    def pieced(self) -> int | None:
        """The dim whose shares may have several pieces."""
        return next((dim for dim, axis in enumerate(self.axes) if axis.mirrored), None)


class ActivationLayout(Layout):
    """The layout of activations under a strategy."""

    __slots__ = ()

    @classmethod
    def of(cls, strategy: Strategy) -> Self:
        """The layout of the inputs and outputs of a block under a strategy."""
        return cls(*layout_of(strategy))

    @property
    def full_tokens(self) -> Self:
        """The layout with the same samples and pixels, and all tokens and channels."""
        return self.replicated("sequence", "channels")

    @property
    def token_axis(self) -> Axis:
        """The axis of the tokens by context parallelism, without the parts of sequence parallelism."""
        return Axis(self.tokens, self.stride("tokens"), mirrored=True) if self.tokens > 1 else WHOLE

    @property
    def pixel_axes(self) -> tuple[Axis, Axis, Axis]:
        """The axes of planes, rows and columns."""
        planes, rows, columns = (
            Axis(getattr(self, name), self.stride(name)) if getattr(self, name) > 1 else WHOLE
            for name in ("planes", "rows", "columns")
        )
        return planes, rows, columns

    def samples(self, shape: Sequence[int]) -> AxisSplit:
        """The split of a tensor of which only the samples are shared.

        Raises:
            InputError: they cannot be shared evenly.
        """
        if shape[0] % self.batch:
            raise InputError("samples", shape[0], f"A micro-batch must be divisible by {self.batch}.")
        rows = Axis(self.batch, self.replicas) if self.batch > 1 else WHOLE
        return AxisSplit(self.devices, (rows, *[WHOLE] * (len(shape) - 1)))

    def hidden(self, shape: Sequence[int], pictures: bool = True) -> AxisSplit:
        """The split of a hidden state: samples are shared, and tokens, channels or pixels.

        Raises:
            InputError: samples or tokens cannot be shared evenly.
        """
        split = self.samples(shape)
        axes = list(split.axes)
        if len(axes) > INNER and self.sequence * self.channels > 1:
            if shape[INNER] % (self.sequence * self.tokens):
                remedy = f"With sequence parallelism they must be divisible by {self.sequence * self.tokens}."
                raise InputError("tokens", shape[INNER], remedy)
            axes[INNER] = Axis(self.sequence * self.channels, self.copies)
        if len(axes) == HIDDEN and self.tokens > 1:
            axes[INNER] = replace(self.token_axis, inner=self.sequence)
        count = len(axes) - PIXELS
        if pictures and 0 < count <= len(self.sides) and self._fills(shape[PIXELS:]):
            axes[PIXELS:] = self.pixel_axes[len(self.sides) - count :]
        return AxisSplit(self.devices, tuple(axes))

    def _fills(self, extents: Sequence[int]) -> bool:
        return all(extent >= ways for extent, ways in zip(extents, self.sides[-len(extents) :], strict=True))


@dataclass(frozen=True, slots=True)
class Route:
    """What a rank sends and receives to change the split of a tensor."""

    held: Boxes  # its part before
    wanted: Boxes  # its part after
    sends: tuple[Boxes, ...]  # to each rank of the stage
    receives: tuple[Boxes, ...]  # from each rank
    local: bool  # whether no rank of the stage needs anything from others, and each has one box


@lru_cache(maxsize=4096)
def route(source: AxisSplit, target: AxisSplit, shape: tuple[int, ...], place: int) -> Route:
    """The route of the rank at ``place`` from one split of a tensor of full shape ``shape`` to another."""
    ranks = range(source.devices)
    before, after = (tuple(split.boxes(rank, shape) for rank in ranks) for split in (source, target))
    return route_boxes(before, after, place)


@lru_cache(maxsize=4096)
def holders_of(everyone: Everyone) -> Mapping[Box, tuple[int, ...]]:
    """The ranks that hold each box, in order."""
    ranks: dict[Box, dict[int, None]] = {}
    for rank, boxes in enumerate(everyone):
        for box in boxes:
            ranks.setdefault(box, {})[rank] = None
    return {box: tuple(same) for box, same in ranks.items()}


@lru_cache(maxsize=4096)
def first_only(everyone: Everyone) -> Everyone:
    """The parts of all ranks, with each box only on the first rank that holds it."""
    first = {box: ranks[0] for box, ranks in holders_of(everyone).items()}
    return tuple(
        tuple(box for box in dict.fromkeys(boxes) if first[box] == rank) for rank, boxes in enumerate(everyone)
    )


@lru_cache(maxsize=4096)
def route_boxes(before: Everyone, after: Everyone, place: int) -> Route:
    """The route of the rank at ``place`` from the parts of all ranks before to those after.

    Boxes of ranks without a part have no items. If several ranks hold a box, the receiver uses its copy, or else they
    send it by turns.
    """
    ranks, holders = range(len(before)), holders_of(before)

    def sent(sender: int, receiver: int) -> Boxes:
        boxes = []
        for box in dict.fromkeys(before[sender]):
            same = holders[box]
            if sender == (receiver if receiver in same else same[receiver % len(same)]):
                boxes.append(box)
        overlaps = [held.meet(wanted) for wanted in dict.fromkeys(after[receiver]) for held in boxes]
        return tuple(box for box in overlaps if box.items)

    single = all(len(boxes) == 1 for boxes in (*before, *after))
    pairs = zip(before, after, strict=True)
    local = single and all(wanted[0].meet(held[0]) == wanted[0] or not wanted[0].items for held, wanted in pairs)
    sends, receives = (tuple(sent(place, rank) for rank in ranks), tuple(sent(rank, place) for rank in ranks))
    return Route(before[place], after[place], sends, receives, local)


def nothing(dims: int) -> Box:
    """A box without items."""
    return Box(((0, 0),) * dims)


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoxExchange:
    """Changes the splits of activations on a stage."""

    group: dist.ProcessGroup | None  # all ranks of the stage; None for a stage of one rank
    place: int  # this rank's place in the stage

    def __call__(self, tensor: Tensor, source: AxisSplit, target: AxisSplit, shape: Shape) -> Tensor:
        """Return this rank's part of a tensor under another split.

        ``shape`` is that of the full tensor. The gradient of a part that several ranks hold is complete on each.
        """
        if source == target or self.group is None:
            return tensor
        moved: Tensor = _Redistribute.apply(tensor, self, source, target, shape)  # type: ignore[no-untyped-call]
        return moved

    def move(self, tensor: Tensor, source: AxisSplit, target: AxisSplit, shape: Shape) -> Tensor:
        """Change the split without autograd, by an all-to-all of boxes; arguments as of ``__call__``."""
        path, dims = route(source, target, shape, self.place), (source.pieced or 0, target.pieced or 0)
        if path.local:
            part = cut_box(tensor, path.wanted[0].within(path.held[0]))
            return part.clone(memory_format=torch.contiguous_format)
        outgoing = [[_part(tensor, path.held, dims[0], box) for box in boxes] for boxes in path.sends]
        arriving = list(chain(*path.receives))
        extents = list(path.wanted[0].shape)
        extents[dims[1]] = sum(box.shape[dims[1]] for box in path.wanted)
        # a single box is in order already; no view, so that later code may change it in place
        is_single = len(arriving) <= 1 and len(path.wanted) == 1
        received = tensor.new_empty(extents if is_single else sum(box.items for box in arriving))
        all_to_all(outgoing, received, [sum(box.items for box in boxes) for boxes in path.receives], self.group)
        if is_single:
            return received
        result = received.new_empty(extents)
        for box, part in zip(arriving, torch.split(received, [box.items for box in arriving]), strict=True):
            _part(result, path.wanted, dims[1], box).copy_(part.view(box.shape))
        return result


def all_to_all(
    outgoing: Sequence[Sequence[Tensor]],
    received: Tensor,
    counts: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> int:
    """Send views to each rank of a group, and receive ``counts`` items from each into a contiguous tensor.

    Returns:
        Bytes sent.
    """
    pieces = [view.reshape(-1).to(received.device) for views in outgoing for view in views]
    sent, item = torch.cat(pieces) if pieces else received.new_empty(0), received.element_size()
    sizes = [item * sum(view.numel() for view in views) for views in outgoing]
    # as bytes: gloo does not know every dtype
    incoming = [item * count for count in counts]
    dist.all_to_all_single(received.view(-1).view(torch.uint8), sent.view(torch.uint8), incoming, sizes, group=group)
    return sent.nbytes


def _part(tensor: Tensor, held: Boxes, dim: int, box: Box) -> Tensor:
    """A view of a box of a rank's tensor, which concatenates the boxes that the rank holds along a dim."""
    before = 0
    for other in held:
        if other.meet(box) == box:
            return cut_box(tensor, box.within(other).shifted(dim, before))
        before += other.shape[dim]
    raise AssertionError("a box that is sent is held")


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, mover: BoxExchange, source: AxisSplit, target: AxisSplit, shape: Shape
    ) -> Tensor:
        ctx.arguments = (mover, source, target, shape)
        return mover.move(tensor, source, target, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        mover, source, target, shape = ctx.arguments
        return mover.move(gradient, target, source, shape), None, None, None, None
