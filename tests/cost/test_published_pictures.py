"""Memory of ConvNeXt-XL with shared pixels, against what PyTorch's multi-GPU example is published to need.

``torch/distributed/tensor/examples/convnext_example.py``: fp32, Adam, pictures (7, 3, 512, 1024), LayerNorm in steps.
One GPU: 43.28 GiB; shared pixels and checkpointing: 11.89 GiB. Both are tensors alone, without the driver's context.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import galvatron_lite as g
from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.stage import Shape
from galvatron_lite.cost.step import price_stages
from galvatron_lite.model.graph import ModelGraph, Recompute, Role
from galvatron_lite.model.shapes.registry import build_graph, load_model, load_shape
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile

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
    return (cost.memory.total - cost.memory.context) / GIB


def test_one_gpu_needs_what_was_published(profile: Profile) -> None:
    assert profile.graph.parameters == 350_196_968
    assert needed(profile, 1) == pytest.approx(43.28, rel=0.03)


@pytest.mark.parametrize(("ways", "plain", "again"), [(1, 43.1, 10.4), (2, 24.1, 7.8), (4, 14.7, 6.5)])
def test_shares_need_what_follows_from_saved_tensors(profile: Profile, ways: int, plain: float, again: float) -> None:
    """Figures from a list of what autograd saves, an even share of which each GPU holds, without halos."""
    assert needed(profile, ways) == pytest.approx(plain, rel=0.03)
    assert needed(profile, ways, Recompute.FULL) == pytest.approx(again, rel=0.05)


@pytest.mark.parametrize(("sides", "most"), [((720, 1280), 62.2), ((512, 2048), 80.9)])
def test_other_sizes(sides: tuple[int, int], most: float) -> None:
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
