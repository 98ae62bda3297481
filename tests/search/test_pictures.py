"""Convolutional networks: every strategy offered is priced, and the search finds what brute force finds."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from math import inf

import pytest

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.layer import LayerCost, LayerPricer
from galvatron_lite.cost.stage import Shape, transfer_seconds
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes.fields import ConvNextShape, ResNetShape
from galvatron_lite.model.shapes.registry import build_graph, load_model
from galvatron_lite.parallelism.backends import ANY, GALVATRON
from galvatron_lite.parallelism.layout import strategy_with
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.plans.written import parse_strategy
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.shapes import Request, bounds_of, open_problem, with_edges
from galvatron_lite.search.space import Fixed, Space
from galvatron_lite.search.tables import TICKS
from tests.factories import make_cluster
from tests.search.brute import brute_of
from tests.search.instances import Instance
from tests.search.test_exact import check

NETWORKS = {
    "resnet50": lambda: load_model("resnet50"),
    "convnext-xl": lambda: load_model("convnext-xl"),
    "cosmoflow": lambda: load_model("cosmoflow-512"),
    "u-net": lambda: load_model("unet", overrides={"image_size": 256}),
    "wide": lambda: build_graph(
        ConvNextShape(depths=(3, 3), widths=(96, 192), image_height=720, image_width=1280), precision="bf16"
    ),
}
SMALL = ResNetShape(depths=(1, 1), width=8, image_size=32, classes=16)


@dataclass(frozen=True, slots=True)
class Drawn(Space):
    """A few strategies of each layer, among all that is offered on so many devices.

    Attributes:
        seed: of the choice.
    """

    seed: int = 0

    def strategies(self, kind: str, devices: int, fixed: Fixed) -> tuple[Strategy, ...]:
        """Some strategies, in order."""
        every = Space(self.graph, self.node_devices, ANY, offload=True).strategies(kind, devices, fixed)
        shared = [one for one in every if one.spatial * one.slices > 1]
        draw = random.Random(f"{self.seed} {kind} {devices}")
        return tuple(sorted({*draw.sample(shared, min(3, len(shared))), *draw.sample(every, min(3, len(every)))}))


def estimated(graph: ModelGraph) -> Profile:
    return estimate_profile(graph, load_cluster("a100-80gb", 64), precision="bf16", name="test")


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("devices", [8, 64])
def test_every_strategy_offered_is_priced(name: str, devices: int) -> None:
    graph = NETWORKS[name]()
    pricer, space = LayerPricer(estimated(graph)), Space(graph, 8, ANY, offload=True)
    for key in graph.kinds:
        strategies = space.strategies(key, devices, Fixed())
        assert 0 < len(strategies) <= 400
        assert pricer.price_many(key, strategies, 64, 1).valid.all()


@pytest.mark.parametrize("name", ["resnet50", "u-net", "cosmoflow"])
def test_many_are_priced_as_each_alone_to_the_last_bit(name: str) -> None:
    graph = NETWORKS[name]()
    pricer, space = LayerPricer(estimated(graph)), Space(graph, 8, ANY)
    for key in graph.kinds:
        strategies = [one for one in space.strategies(key, 8, Fixed()) if one.spatial * one.slices > 1][::3]
        costs = pricer.price_many(key, strategies, 16, 1)
        for place, strategy in enumerate(strategies):
            alone = pricer.price(key, strategy, 16, 1)
            assert isinstance(alone, LayerCost)
            assert {own: getattr(costs, own)[place] for own in asdict(alone)} == asdict(alone)


def test_the_dimensions_are_offered_alone_within_a_node_and_run() -> None:
    graph = NETWORKS["wide"]()
    for key in graph.kinds:
        every = Space(graph, 8, ANY).strategies(key, 16, Fixed())
        shared = [one for one in every if one.spatial * one.slices > 1]
        assert shared
        assert all(one.spatial * one.slices <= 8 and one.tensor * one.context == 1 for one in shared)
        assert all(1 in (one.spatial, one.slices) and 1 in (one.filters, one.channels) for one in shared)
        runs = [one for one in Space(graph, 8, GALVATRON).strategies(key, 16, Fixed()) if one.spatial * one.slices > 1]
        near = [one for one in shared if one.offload is Offload.NONE]
        assert {*runs} == {*near}
        forbidden = Fixed(forbidden=("spatial", "filters", "channels"))
        assert not {*shared} & {*Space(graph, 8, ANY).strategies(key, 16, forbidden)}
    block = Space(graph, 8, ANY).strategies("stage0_block", 8, Fixed())
    # 180 x 320 pixels: the longer side alone, or the shortest edges
    assert {(one.height, one.width) for one in block} == {(1, 1), (1, 2), (1, 4), (2, 2), (1, 8), (2, 4)}


@pytest.mark.parametrize(
    "strategy",
    [Strategy(data=2, height=2, width=4), Strategy(zero=2, zero_stage=3, filters=4), Strategy(channels=2)],
)
def test_names_read_back(strategy: Strategy) -> None:
    assert parse_strategy(str(strategy)) == strategy


@pytest.mark.parametrize("seed", range(6))
def test_equals_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    cluster = replace(load_cluster("a100-80gb"), name="small") if seed % 2 else make_cluster(4)
    precision = "bf16" if seed % 2 else "fp32"
    graph = build_graph(SMALL, precision=precision)
    profile = estimate_profile(graph, cluster, precision=precision, name="test")
    space = Drawn(graph, 4, ANY, seed=seed)
    asked = Instance(profile, draw.choice([2, 4]), 4, (Schedule.ONE_F_ONE_B,), Fixed(), space)
    brute = brute_of(asked)
    peaks = brute.peaks()
    for budget in (peaks[0] - 1, peaks[0], draw.choice(peaks), peaks[-1]) if peaks else (10**12,):
        check(asked, brute, budget)


def test_bounds_of_stages_count_what_goes_over_their_boundaries() -> None:
    """Where links are slow: a stage takes at least the sends at its ends, which differ from cut to cut."""
    cluster = load_cluster("t4", 4)
    cluster = replace(cluster, levels=tuple(replace(level, bandwidth=1e6) for level in cluster.levels))
    profile = estimate_profile(build_graph(SMALL, precision="fp16"), cluster, precision="fp16", name="small")
    request = Request(profile.graph, 4, 8, 10**12, Fixed(), (Schedule.ONE_F_ONE_B,), Space(profile.graph, 4))
    pricer, shape, crossing = LayerPricer(profile), Shape(4, 4, 4, 2), profile.graph.crossings()
    problem = next(with_edges(open_problem(request, pricer, shape)))
    bounds, sender, checked = bounds_of(problem), strategy_with(problem.choice.wire), set()
    for stage, (start, stop) in product((1, 2), combinations(range(1, len(profile.graph.layers)), 2)):
        sizes = [boundary_bytes(crossing[cut], shape.microbatch, sender) for cut in (start, stop)]
        groups = (stage - 1, stage), (stage, stage + 1)
        sends = [transfer_seconds(pricer, size, sender, shape, pair) for size, pair in zip(sizes, groups, strict=True)]
        excess = float(bounds.excess[stage][start, stop])
        if excess < inf:
            assert excess > shape.microbatches * sum(sends) * TICKS
            checked.add(tuple(sizes))
    assert len(checked) == 3


def test_pixels_shared_are_memory_shared() -> None:
    """ConvNeXt-XL at (7, 3, 512, 1024) in fp32, the benchmark of PyTorch's pull request 113123: a device of p keeps 1/p
    of what one keeps, and the columns that arrived: 94.5 MiB a side of its 36 convolutions of 7 x 7 (two have one)."""
    shape = ConvNextShape(depths=(3, 3, 27, 3), widths=(256, 512, 1024, 2048), image_height=512, image_width=1024)
    graph = build_graph(shape, precision="fp32")
    profile = estimate_profile(graph, load_cluster("a100-80gb"), precision="fp32", name="test")
    pricer, kept = LayerPricer(profile), {}
    for ways in (1, 2, 4):
        costs = [pricer.price(layer.kind, Strategy(width=ways), 7, 1) for layer in graph.layers]
        kept[ways] = sum(cost.kept for cost in costs if cost) / 2**30
        assert None not in costs
    edge = 94.5 / 1024
    assert kept[4] - kept[1] / 4 == pytest.approx(2 * edge, rel=0.02)
    assert kept[2] - kept[1] / 2 == pytest.approx(edge, rel=0.02)


def test_volumes_share_pixels_where_they_are_large_and_channels_where_weights_are() -> None:
    """CosmoFlow of 512^3 at a sample for each four V100, which hold no whole one: pixels first, then filters."""
    profile = estimate_profile(
        load_model("cosmoflow-512", precision="fp32"), load_cluster("abci", 16), precision="fp32", name="test"
    )
    plan = find_plan(profile, devices=16, global_batch=4, budget=14 * 10**9, backend="any", runners_up=0)
    runs = [run for stage in plan.stages for run in stage.runs]
    assert runs[0].strategy.spatial == 4
    assert runs[-1].strategy.filters == 4
    assert all(run.strategy.batch_degree == 4 for run in runs)
