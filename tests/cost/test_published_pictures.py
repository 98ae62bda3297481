"""Published figures of convolutional networks; stages whose tensors skip layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import galvatron_lite as g
from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.cost.stage import Shape, price_stage
from galvatron_lite.cost.step import price_stages
from galvatron_lite.model.graph import ModelGraph, Passed, Recompute, Role
from galvatron_lite.model.shapes.registry import build_graph, load_model, load_shape
from galvatron_lite.model.shapes.tape import with_skips
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.result import plan_of
from tests.cost.test_step import simple
from tests.factories import make_graph, make_kind

GIB = 2**30
PICTURES = 7
SIZE: dict[str, object] = {"image_height": 512, "image_width": 1024, "fused_norm": False}


def profile_of(graph: ModelGraph) -> Profile:
    return estimate_profile(graph, load_cluster("a100-80gb", 8), precision="fp32", name="test", optimizer="adam")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of(load_model("convnext-xl", overrides=SIZE, precision="fp32"))


def needed(profile: Profile, ways: int, recompute: Recompute = Recompute.NONE, pictures: int = PICTURES) -> float:
    """GiB of tensors on a GPU."""
    graph = profile.graph
    again = {Role.BLOCK: recompute}
    strategies = [Strategy(width=ways, recompute=again.get(layer.role, Recompute.NONE)) for layer in graph.layers]
    (cost,) = price_stages(LayerPricer(profile), Shape(ways, 1, 1, pictures), [len(graph.layers)], strategies)
    return cost.memory.tensors / GIB


def test_one_gpu_needs_what_was_published(profile: Profile) -> None:
    assert profile.graph.parameters == 350_196_968
    assert needed(profile, 1) == pytest.approx(43.28, rel=0.03)


@pytest.mark.parametrize(("ways", "plain", "again"), [(1, 43.1, 10.4), (2, 24.1, 7.8), (4, 14.7, 6.5)])
def test_shares_need_what_follows_from_saved_tensors(profile: Profile, ways: int, plain: float, again: float) -> None:
    """Figures from a list of what autograd saves, an even share of which each GPU holds, without halos."""
    assert needed(profile, ways) == pytest.approx(plain, rel=0.03)
    assert needed(profile, ways, Recompute.FULL) == pytest.approx(again, rel=0.05)


@pytest.mark.parametrize(("sides", "most"), [((720, 1280), 62.2), ((512, 2048), 80.9)])
def test_other_picture_sizes(sides: tuple[int, int], most: float) -> None:
    """Six cameras of 720p, and twice the width."""
    sizes: dict[str, object] = {**SIZE, "image_height": sides[0], "image_width": sides[1]}
    profile = profile_of(load_model("convnext-xl", overrides=sizes, precision="fp32"))
    assert needed(profile, 1, pictures=6 if sides[0] == 720 else 7) == pytest.approx(most, rel=0.03)


def test_a_plan_for_four_gpus_takes_no_more_than_was_published(profile: Profile) -> None:
    budget = 11.9 * GIB
    plan = g.plan(profile, cluster="a100-80gb", gpus=4, batch=PICTURES, mem=int(budget), backend="any", runners_up=0)
    assert max(stage.memory.total for stage in plan.stages) <= budget
    assert any(run.strategy.spatial == 4 for stage in plan.stages for run in stage.runs)


class Norm(nn.Module):
    """LayerNorm over channels that lie first, step by step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        spread = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(spread + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Block(nn.Module):
    """Depthwise convolution, norm, two convolutions of one pixel, learned scale, residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.act = Norm(width), nn.GELU()
        self.up, self.down = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)
        self.scale = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.act(self.up(self.norm(self.mix(x)))))


class Network(nn.Module):
    """A ConvNeXt of two stages."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 4, 4), Norm(widths[0]))
        self.first = nn.Sequential(*(Block(widths[0]) for _ in range(3)))
        self.down = nn.Sequential(Norm(widths[0]), nn.Conv2d(*widths, 2, 2))
        self.second = nn.Sequential(*(Block(widths[1]) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(widths[1]), nn.Linear(widths[1], 10)

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        x = self.second(self.down(self.first(self.stem(pictures))))
        return functional.cross_entropy(self.head(self.norm(x.mean((-2, -1)))), labels)


def test_a_captured_network_of_that_kind_keeps_and_needs_the_same() -> None:
    """Block by block what autograd saves, and the highest moment of backward, as the shapes have it."""
    widths, batch = (16, 32), {"pictures": torch.zeros(2, 3, 64, 96), "labels": torch.zeros(2, dtype=torch.int64)}
    captured = trace(Network(widths), batch)
    shape = {"depths": (3, 3), "widths": widths, "classes": 10, "image_height": 64, "image_width": 96}
    built = build_graph(load_shape("convnext-xl", overrides={**shape, "fused_norm": False}), precision="fp32")
    assert captured.parameters == built.parameters
    pairs = [
        (captured.kind_of(left), built.kind_of(right))
        for left, right in zip(captured.layers, built.layers, strict=True)
        if left.role is Role.BLOCK
    ]
    assert len(pairs) == 7
    for own, other in pairs:
        assert {name: size.total for name, size in own.kept.items()} == {
            name: size.total for name, size in other.kept.items()
        }
    totals = [needed(profile_of(graph), 1) for graph in (captured, built)]
    assert totals[0] == pytest.approx(totals[1], rel=0.01)


BOUNDARY, SKIP, BANDWIDTH = 1000, 300, 1e4


def skipping(profile: Profile, *skips: Passed) -> Profile:
    return replace(profile, graph=with_skips(profile.graph, skips))


def plan(profile: Profile, schedule: Schedule = Schedule.ONE_F_ONE_B) -> Plan:
    made = plan_of(
        profile.graph, devices=3, global_batch=4, microbatches=4, cuts=(0, 1, 2, 3), strategies=[Strategy()] * 3,
        schedule=schedule,
    )  # fmt: skip
    return evaluate(profile, made)


@pytest.mark.parametrize("borrowed", [False, True])
def test_a_skip_travels_through_every_stage_between(borrowed: bool) -> None:
    chain = plan(simple(3))
    skipped = plan(skipping(simple(3), Passed("l0", ("l2",), SKIP, borrowed=borrowed)))
    more = [b.memory.total - a.memory.total for a, b in zip(chain.stages, skipped.stages, strict=True)]
    # A buffer for each send and receive of it and of its gradient; the last stage, one micro-batch in flight, keeps it.
    assert more == [2 * SKIP, 4 * SKIP, 2 * SKIP + (SKIP if borrowed else 0)]
    seconds = [b.microbatch_seconds - a.microbatch_seconds for a, b in zip(chain.stages, skipped.stages, strict=True)]
    assert seconds == pytest.approx([0, 0, 0], abs=1e-9)
    shape = Shape(3, 3, 4, 1)
    costs = price_stages(
        LayerPricer(skipping(simple(3), Passed("l0", ("l2",), SKIP))), shape, [1, 1, 1], [Strategy()] * 3
    )
    sends = [(cost.times.send_forward, cost.times.send_backward) for cost in costs]
    one = (BOUNDARY + SKIP) / BANDWIDTH
    assert sends == [pytest.approx((one, 0)), pytest.approx((one, one)), pytest.approx((0, one))]


def test_every_stage_that_reads_a_borrowed_tensor_keeps_it_for_each_micro_batch_in_flight() -> None:
    lent = Passed("l0", ("l1", "l2"), SKIP, borrowed=True)
    chain, skipped = plan(simple(3)), plan(skipping(simple(3), lent))
    more = [b.memory.activations - a.memory.activations for a, b in zip(chain.stages, skipped.stages, strict=True)]
    assert more == [0, 2 * SKIP, SKIP]
    chain, skipped = plan(simple(3), Schedule.GPIPE), plan(skipping(simple(3), lent), Schedule.GPIPE)
    more = [b.memory.activations - a.memory.activations for a, b in zip(chain.stages, skipped.stages, strict=True)]
    assert more == [0, 4 * SKIP, 4 * SKIP]


def test_a_skip_is_laid_out_anew_with_what_goes_beside_it() -> None:
    kind = make_kind("block", 1000, tensor_degrees=2, boundary=BOUNDARY)
    points = simple(2).layers
    points = (*points, *(replace(point, tensor=2) for point in points))
    chain = replace(simple(2), graph=make_graph([kind], ["block"] * 3), layers=points)
    skipped = skipping(chain, Passed("l0", ("l2",), SKIP))
    strategies = [Strategy(data=2), Strategy(data=2), Strategy(tensor=2)]
    shape = Shape(2, 1, 1, 4)
    costs = [price_stages(LayerPricer(one), shape, [3], strategies)[0] for one in (chain, skipped)]
    # Each of two devices sends its half of the micro-batch's samples to the other; on the way back each has the
    # gradients of all samples already.
    moved = [4 * size / 2 / BANDWIDTH for size in (BOUNDARY, BOUNDARY + SKIP)]
    assert [cost.moving for cost in costs] == pytest.approx(moved)


def test_inside_a_stage_a_skip_goes_straight_to_its_readers() -> None:
    kind = make_kind("block", 1000, tensor_degrees=2, boundary=BOUNDARY)
    points = (*simple(4).layers, *(replace(point, tensor=2) for point in simple(4).layers))
    chain = replace(simple(4), graph=make_graph([kind], ["block"] * 5), layers=points)
    skipped = skipping(chain, Passed("l0", ("l2", "l4"), SKIP))
    by_sample, by_rows = Strategy(data=2), Strategy(tensor=2)
    strategies = [by_sample, by_rows, by_sample, by_sample, by_rows]
    costs = price_stages(LayerPricer(skipped), Shape(4, 2, 2, 4), [3, 2], strategies)
    # In the first stage it waits by samples until the third layer reads it, and leaves as that layer has it; in the
    # second it comes in by samples, and goes to the last layer together with what the first one of the stage makes.
    moved = [4 * size / 2 / BANDWIDTH for size in (2 * BOUNDARY, BOUNDARY + SKIP)]
    assert [cost.moving for cost in costs] == pytest.approx(moved)


def test_equal_stages_of_unlike_boundaries_are_not_taken_for_one_another() -> None:
    profile = skipping(simple(3), Passed("l0", ("l2",), SKIP, borrowed=True))
    shape, strategies = Shape(3, 3, 4, 1), [Strategy()] * 3
    together = price_stages(LayerPricer(profile), shape, [1, 1, 1], strategies, memory=False)
    ranges = [range(stage, stage + 1) for stage in range(3)]
    alone = [price_stage(LayerPricer(profile), shape, s, ranges[s], strategies, ranges[s]) for s in range(3)]
    assert together == alone
