"""Bytes of borders that ranks really send, against what the cost says of the rank that sends most."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.nn import functional

from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass, SplitDims
from galvatron_lite.parallelism.base import Moment
from galvatron_lite.parallelism.sharded.collectives import distribute
from galvatron_lite.parallelism.sharded.tensor import image_specs, to_local
from galvatron_lite.parallelism.spatial.cost import samples_of
from galvatron_lite.parallelism.strategy import Strategy
from tests.factories import make_kind
from tests.parallelism.shared_pictures import STRICT, double, grid_of
from tests.parallelism.test_spatial_cost import sends
from tests.parallelism.thread_group import ThreadGroup, run_threads

SAMPLES, CHANNELS, ITEM = 2, 3, 8


def layer_of(extents: tuple[int, int], kernel: int, stride: int, padding: int, dilation: int) -> LayerKind:
    shape = (CHANNELS, 4, 1, *extents, kernel, kernel, stride, stride, padding, padding, dilation, dilation)
    operator = Operator("conv", OperatorClass.CONVOLUTION, shape, 1, 1, 2, 1, 1, 1)
    dims = SplitDims(in_channels=CHANNELS, out_channels=4, height=extents[0], width=extents[1])
    return replace(make_kind("block", 0), operators=(operator,), dims=dims)


@pytest.mark.parametrize("grid", [(1, 2), (1, 3), (3, 1), (2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize(
    ("extents", "kernel", "stride", "padding", "dilation"),
    [
        ((12, 12), 3, 1, 1, 1),
        ((13, 11), 5, 1, 2, 1),
        ((14, 16), 3, 1, 2, 2),
        ((15, 13), 3, 2, 1, 1),
        ((16, 12), 2, 2, 0, 1),
        ((13, 14), 4, 1, 0, 1),
        ((17, 13), 7, 2, 3, 1),
    ],
)
def test_bytes_on_the_wire_are_those_of_the_formula(
    grid: tuple[int, int], extents: tuple[int, int], kernel: int, stride: int, padding: int, dilation: int
) -> None:
    kind, strategy = layer_of(extents, kernel, stride, padding, dilation), Strategy(height=grid[0], width=grid[1])
    picture, weight = double(SAMPLES, CHANNELS, *extents), double(4, CHANNELS, kernel, kernel)

    def work(group: ThreadGroup) -> tuple[list[int], list[int]]:
        """Bytes that a rank sends along each side in forward, and in backward."""
        lines = grid_of(group, *grid)
        used = [line for line in lines if isinstance(line, ThreadGroup)]
        leaf = picture.clone().requires_grad_()
        out = functional.conv2d(
            distribute(leaf, image_specs(picture.shape, lines), STRICT), weight, None, stride, padding, dilation
        )
        forward = [line.sent_bytes for line in used]
        to_local(out).sum().backward()
        return forward, [line.sent_bytes - there for line, there in zip(used, forward, strict=True)]

    ranks = run_threads(grid[0] * grid[1], work)
    # a rank gives the gradients of all that it borrowed back
    borrowed = [max(back[side] for _, back in ranks) for side in range(len(ranks[0][0]))]
    for moment in (Moment.FORWARD, Moment.BACKWARD):
        priced = [one.size * one.count * ITEM / 2 / 4 * SAMPLES for one in sends(strategy, kind, moment)]
        assert priced == pytest.approx([size for size in borrowed if size])
    for side in range(len(borrowed)):
        assert sum(there[side] for there, _ in ranks) == sum(back[side] for _, back in ranks)


def test_the_share_is_that_of_the_rank_with_most_pixels() -> None:
    kind, picture = layer_of((13, 11), 3, 1, 1, 1), double(1, CHANNELS, 13, 11)

    def work(group: ThreadGroup) -> int:
        return to_local(distribute(picture, image_specs(picture.shape, grid_of(group, 2, 3)), STRICT)).numel()

    most = max(run_threads(6, work))
    assert samples_of(kind, Strategy(height=2, width=3), 1) == pytest.approx(most / picture.numel())
