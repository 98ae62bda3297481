"""Channel and filter parallelism: collectives by hand, the closed form of Kahira et al. 2021, what is split."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.model.graph import LayerKind, ModelGraph, Operator, OperatorClass, Recompute, SplitDims, TensorSplit
from galvatron_lite.model.shapes import load_model
from galvatron_lite.parallelism.base import Communication, DimensionContext, LayerWork, Moment, PictureSplit
from galvatron_lite.parallelism.channel.cost import ChannelDimension
from galvatron_lite.parallelism.channel.parts import OperatorPart, divides, each_divides, parts_of, sliced_kind
from galvatron_lite.parallelism.pictures import has_weights, items_of
from galvatron_lite.parallelism.spatial.cost import SpatialDimension
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.schema import LayerPoint
from tests.factories import make_cluster, make_graph, make_kind, make_profile
from tests.parallelism.test_states_cost import work

SIDE = 16


def convolved(inputs: int, outputs: int, kernel: int = 1, groups: int = 1, *, gradient: bool = True) -> Operator:
    shape = (inputs, outputs, groups, SIDE, SIDE, kernel, kernel, 1, 1)
    weights = outputs * inputs // groups * kernel**2
    flops, moved = 2 * weights * SIDE**2, 2 * (inputs + outputs) * SIDE**2
    back = 2 * flops if gradient else flops
    return Operator("conv", OperatorClass.CONVOLUTION, shape, 1, flops, back, moved, 2 * moved, 2 * weights)


def memory(channels: int) -> Operator:
    items = channels * SIDE**2
    return Operator("relu", OperatorClass.MEMORY, (items,), 1, 0, 0, 4 * items, 6 * items)


def layer(*operators: Operator) -> LayerKind:
    dense = [one for one in operators if has_weights(one)]
    inputs, outputs = dense[0].shape[0], dense[-1].shape[1]
    weights = sum(items_of(one)[2] for one in dense)
    dims = SplitDims(in_channels=inputs, out_channels=outputs, height=SIDE, width=SIDE)
    plain = make_kind("block", 0, recompute=list(Recompute))
    kept = {choice: TensorSplit(whole=4096) for choice in Recompute}
    return replace(plain, parameters=TensorSplit(whole=weights), operators=operators, dims=dims, kept=kept)


PAIR = layer(convolved(32, 64), memory(64), convolved(64, 64, 3, 64), convolved(64, 32))


def calls(strategy: Strategy, kind: LayerKind) -> list[tuple[Collective, Moment, float]]:
    """Collectives in the passes, and items a sample of all their calls."""
    found = work(strategy, kind, samples=float(strategy.batch_degree)).communications
    return [(one.collective, one.moment, one.size * one.count / 2) for one in found if one.moment is not Moment.STEP]


def test_shares_are_gathered_behind_pooling_and_once_where_two_are_added() -> None:
    pool = Operator("pool", OperatorClass.MEMORY, (64 * 8 * 8, 64, 16, 16, 2, 2, 2, 2), 1, 0, 0, 4, 4)
    pooled = (Collective.ALL_GATHER, Moment.FORWARD, 64 * SIDE**2 / 4)
    assert pooled in calls(Strategy(filters=4), layer(convolved(32, 64), memory(64), pool))
    # before the blocks: at once, as the model's own code may pool
    stem = replace(layer(convolved(3, 64, gradient=False), pool), name="before")
    assert calls(Strategy(filters=2), stem) == [(Collective.ALL_GATHER, Moment.FORWARD, 64 * SIDE**2)]
    added = layer(convolved(32, 16), convolved(16, 16), convolved(16, 64), convolved(32, 64), memory(64))
    assert (Collective.ALL_GATHER, Moment.FORWARD, 64 * SIDE**2) in calls(Strategy(filters=2), added)
    joined = replace(added, dims=replace(added.dims, out_channels=128))
    assert (Collective.ALL_GATHER, Moment.FORWARD, 2 * 64 * SIDE**2) in calls(Strategy(filters=2), joined)


@pytest.mark.parametrize(("strategy", "units"), [("filters", 3), ("channels", 2)])
@pytest.mark.parametrize("ways", [2, 4])
def test_seconds_are_those_of_the_closed_form(ways: int, strategy: str, units: int) -> None:
    """Kahira et al. 2021, table 3: 3 (p - 1) (a + B y / p d b) for layers whose inputs are others' outputs; channels
    reduce and scatter, which the paper names as the saving of one in three."""
    alpha, bandwidth, batch = 1e-6, 1e9, 4
    kind = layer(convolved(32, 32, 3))
    points = [
        LayerPoint("block", 1, 1, False, Recompute.NONE, 1e-3, 2e-3, 1000, 1000, 1000, **{strategy: ways})
    ]  # fmt: skip
    profile = make_profile(make_graph([kind], ["block"]), points, make_cluster(ways, 0, bandwidth, alpha))
    cost = LayerPricer(profile).price("block", Strategy(**{strategy: ways}), batch, 1)
    once = (ways - 1) * (alpha + batch * 32 * SIDE**2 * 4 / ways / bandwidth)
    assert cost.forward_exposed + cost.backward_exposed == pytest.approx(units * once, rel=1e-9)
    assert LayerPricer(profile).price("block", Strategy(data=ways), batch, 1) is None


def test_weights_and_their_states_are_divided() -> None:
    weights = 32 * 64 + 64 * 9 + 64 * 32
    for strategy in (Strategy(filters=4), Strategy(channels=4)):
        assert work(strategy, PAIR).parameters == weights / 4
    assert work(Strategy(zero=2, zero_stage=3, filters=4), PAIR).state_items == weights / 8
    before = layer(convolved(32, 32, 3, 32), convolved(32, 64))  # depthwise in front of a pair: whole on each
    assert work(Strategy(filters=4), before).parameters == 32 * 9 + 32 * 64 / 4


def test_a_device_works_on_operators_of_the_sharded_shape() -> None:
    first, _, depthwise, second = sliced_kind(PAIR, "filters", 4).operators
    assert first.shape[:3] == (32, 16, 1)
    assert depthwise.shape[:3] == (16, 16, 16)
    assert second.shape[:3] == (16, 32, 1)
    every = sliced_kind(PAIR, "filters", 4).operators
    assert sum(one.flops for one in every) == sum(one.flops for one in PAIR.operators) / 4
    assert first.moved == 2 * (32 + 16) * SIDE**2
    assert first.weight_bytes == PAIR.operators[0].weight_bytes / 4


def test_degrees_divide_what_is_split() -> None:
    assert divides(PAIR, "filters", 64)
    assert divides(PAIR, "channels", 32)
    assert not divides(PAIR, "channels", 64)
    assert not divides(layer(convolved(3, 64)), "channels", 2)
    assert not divides(layer(convolved(32, 32, 3, 32)), "filters", 2)  # nothing dense
    for name in ("gpt2", "llama2-7b"):
        for kind in load_model(name).kinds.values():
            for degree in ("filters", "channels"):
                assert list(ChannelDimension(degree=degree).choices(kind, 8)) == [{degree: 1}]


def test_convnext_blocks_are_pairs() -> None:
    block = load_model("convnext-xl").kinds["stage1_block"]
    parts = [part for one, part in parts_of(block.operators, "filters") if has_weights(one)]
    assert parts == [OperatorPart.WHOLE, OperatorPart.FILTERS, OperatorPart.CHANNELS]


# Shared channels where pictures come together behind every convolution: against figures counted by hand.


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
