"""Shared channels where pictures come together behind every convolution: against figures counted by hand."""

from dataclasses import replace

import pytest

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.model.graph import LayerKind, ModelGraph, OperatorClass
from galvatron_lite.model.shapes import load_model
from galvatron_lite.parallelism.base import Communication, DimensionContext, LayerWork, Moment, PictureSplit
from galvatron_lite.parallelism.channel.cost import ChannelDimension
from galvatron_lite.parallelism.channel.parts import each_divides, sliced_kind
from galvatron_lite.parallelism.spatial.cost import SpatialDimension
from galvatron_lite.parallelism.strategy import Strategy

EACH = PictureSplit(gathers_each=True, own_statistics=True, whole_weights=True)


@pytest.fixture(scope="module")
def resnet() -> ModelGraph:
    return load_model("resnet50", precision="fp32")


def block(graph: ModelGraph) -> LayerKind:
    """The second bottleneck of the second stage: 512 -> 128 -> 128 -> 512 channels on 28 x 28 pixels."""
    return next(
        kind
        for kind in graph.kinds.values()
        if [one.shape[:2] for one in kind.operators if one.kind is OperatorClass.CONVOLUTION]
        == [(512, 128), (128, 128), (128, 512)]
    )


def moved(kind: LayerKind, strategy: Strategy, pictures: PictureSplit = EACH) -> tuple[LayerWork, list[Communication]]:
    context = DimensionContext(strategy.devices, 4, 4, 4, 4, 4, 1, pictures=pictures)
    items = float(kind.parameters.total)
    work = LayerWork(8.0, 1, False, next(iter(kind.kept)), items, items, items, items)
    dimension = ChannelDimension(degree="filters" if strategy.filters > 1 else "channels")
    done = dimension.apply(work, kind, strategy, context)
    return done, list(done.communications)


def carried(found: list[Communication], collective: Collective, moment: Moment) -> float:
    return sum(one.size * one.count for one in found if one.collective is collective and one.moment is moment)


PIXELS = 28 * 28
SAMPLE = 4 * 8
"""Bytes of an item times samples."""


def test_filters_gather_every_output_and_scatter_its_gradient(resnet: ModelGraph) -> None:
    _, found = moved(block(resnet), Strategy(filters=4))
    made = (128 + 128 + 512) * PIXELS * SAMPLE
    assert carried(found, Collective.ALL_GATHER, Moment.FORWARD) == made
    assert carried(found, Collective.REDUCE_SCATTER, Moment.BACKWARD) == made
    assert sum(one.count for one in found) == 6


def test_channels_sum_every_output_and_gather_every_gradient(resnet: ModelGraph) -> None:
    _, found = moved(block(resnet), Strategy(channels=4))
    assert carried(found, Collective.ALL_REDUCE, Moment.FORWARD) == (128 + 128 + 512) * PIXELS * SAMPLE
    assert carried(found, Collective.ALL_GATHER, Moment.BACKWARD) == (512 + 128 + 128) * PIXELS * SAMPLE


def test_weights_are_whole(resnet: ModelGraph) -> None:
    kind = block(resnet)
    whole, _ = moved(kind, Strategy(filters=4))
    shared, _ = moved(kind, Strategy(filters=4), replace(EACH, whole_weights=False))
    assert whole.gradient_items == kind.parameters.total
    assert shared.gradient_items < kind.parameters.total / 3


def test_only_convolutions_are_divided(resnet: ModelGraph) -> None:
    kind = block(resnet)
    sliced = sliced_kind(kind, "filters", 4, each=True)
    for own, one in zip(sliced.operators, kind.operators, strict=True):
        assert own.flops == (one.flops // 4 if one.kind is OperatorClass.CONVOLUTION else one.flops)
    assert sliced.kept == kind.kept


def test_layers_without_convolutions_are_run_by_all(resnet: ModelGraph) -> None:
    """The classes (1000) are no multiple of 32; they are not split, so that does not matter."""
    head = resnet.kinds[resnet.layers[-1].kind]
    assert each_divides(head, "filters", 32)
    assert each_divides(block(resnet), "filters", 128)
    assert not each_divides(block(resnet), "filters", 256)


def test_own_statistics_are_not_summed(resnet: ModelGraph) -> None:
    kind, strategy = block(resnet), Strategy(height=4)
    items = float(kind.parameters.total)
    work = LayerWork(8.0, 1, False, next(iter(kind.kept)), items, items, items, items)
    plain = DimensionContext(4, 4, 4, 4, 4, 4, 1)
    summed = SpatialDimension().apply(work, kind, strategy, plain).communications
    own = SpatialDimension().apply(work, kind, strategy, replace(plain, pictures=EACH)).communications
    assert {one.collective for one in own} == {Collective.SEND_RECV}
    assert {one.collective for one in summed} > {Collective.SEND_RECV}
