"""Between layers and the code around them: how a tensor lies, told by cuts (inside) and by splits (outside)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from galvatron_lite.parallelism.context.rules import rules_of
from galvatron_lite.parallelism.sharded.groups import AxisGroup, MirroredGroup, ProcessAxisGroup
from galvatron_lite.parallelism.sharded.tensor import Rules, ShardSpec, ShardSpecs
from galvatron_lite.parallelism.spatial.rules import PIXELS_RULES
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.layout import WHOLE, Axis, AxisSplit, Layout
from galvatron_lite.runtime.mesh import StrategyGroups
from galvatron_lite.runtime.placement import LayerAssignment


@dataclass(frozen=True, slots=True, eq=False)
class RankPiece:
    """A rank's part of a tensor of the stage."""

    tensor: Tensor  # a plain one; its gradient is complete on every rank that holds the same
    split: AxisSplit  # how the whole lies on the stage
    shape: tuple[int, ...]  # of the whole


@dataclass(frozen=True, slots=True, eq=False)
class BoundaryLayout:
    """What code in one layout works on."""

    layout: Layout  # of its activations
    # those along which its pictures or tokens are cut; none where it works on plain tensors
    axes: tuple[Axis, ...] = ()
    lines: tuple[AxisGroup, ...] = ()  # the ranks along each
    slices: AxisGroup | None = (
        None  # the ranks that share the channels of what enters and leaves; None where they are whole
    )
    outputs: tuple[int, ...] = ()  # channels of the pictures that leave, in order; empty where their shares are equal

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
        whole = self.layout.samples(shape)
        axes = list(whole.axes)
        for cut in cuts:
            axes[cut.dim] = next(axis for axis, line in zip(self.axes, self.lines, strict=True) if line is cut.group)
        return AxisSplit(whole.devices, tuple(axes))

    @property
    def replicas(self) -> int:
        """Ranks that have the same samples and a part each of gradients of what is whole; 1 where none are parts."""
        return prod(line.size for line in self.lines)


@dataclass(frozen=True, slots=True)
class Bordered:
    """A module of a layer, by its path, and what it works on."""

    path: str
    placed: LayerAssignment
    border: BoundaryLayout


def rules_under(strategy: Strategy) -> Rules:
    """What functions do with what a layer's ranks share: tokens or pixels."""
    return rules_of(strategy) if strategy.context > 1 else PIXELS_RULES


def border_of(layout: Layout, strategy: Strategy, groups: StrategyGroups) -> BoundaryLayout:
    """The border of a layer: lines of ranks along the tokens or the sides of pictures that its strategy shares."""
    if strategy.context > 1 and groups.context is not None:
        return BoundaryLayout(layout, (layout.token_axis,), (MirroredGroup(ProcessAxisGroup(groups.context)),))
    sides = zip(layout.pixel_axes, (groups.depth, groups.height, groups.width), strict=True)
    lines = [(axis, ProcessAxisGroup(group)) for axis, group in sides if axis != WHOLE and group is not None]
    if strategy.spatial == 1 or not lines:
        return BoundaryLayout(layout)
    return BoundaryLayout(layout, tuple(axis for axis, _ in lines), tuple(line for _, line in lines))
