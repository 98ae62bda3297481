"""The perception network: published counts, which parameters reach its outputs, its loss and its losses' gradients."""

from __future__ import annotations

from functools import cache
from math import floor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes import load_model
from galvatron_lite.model.zoo import build
from galvatron_lite.model.zoo.perception import VoxelGrid, birds_eye_view, edge_loss, edges
from galvatron_lite.parallelism.branch.find import find_regions
from tests.model.models import assert_learns

SEGMENTATION, RECONSTRUCTION = (46.48e6, 262.4e9), (27.61e6, 188.5e9)
"""Parameters and FLOPs at (1, 16, 1000, 1000), counted in the authors' models."""
DEAD = 46.46e6
"""Of the segmentation network's parameters, those that do not reach its output."""


def on_meta(name: str, **fields: object) -> nn.Module:
    with torch.device("meta"):
        return build(name, **fields)


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def without_gradient(model: nn.Module) -> tuple[int, int]:
    """Items of parameters that the sum of both outputs reaches, and of those that it does not."""
    outputs = model(torch.rand(1, model.config.channels, model.config.image_size, model.config.image_size))
    sum(output.sum() for output in outputs).backward()
    found = [(parameter.grad is None, parameter.numel()) for parameter in model.segmentation.parameters()]
    assert all(parameter.grad is not None for parameter in model.reconstruction.parameters())
    return sum(size for dead, size in found if not dead), sum(size for dead, size in found if dead)


def test_as_published_all_levels_but_the_finest_are_dropped() -> None:
    """The same levels are dead at the published size: all but the first of each list of levels."""
    model = build("perception-published-mini")
    alive, dead = without_gradient(model)
    levels = (model.segmentation.downs[0], model.segmentation.sides[0], model.segmentation.ups[-1])
    assert alive == sum(map(parameters_of, levels))
    large = on_meta("perception-published").segmentation
    used = sum(map(parameters_of, (large.downs[0], large.sides[0], large.ups[-1])))
    assert (used, parameters_of(large) - used) == (22_035, 46_460_064)
    assert parameters_of(large) - used == pytest.approx(DEAD, abs=0.005e6)
    assert alive + dead == parameters_of(model.segmentation)


def test_edges_are_those_of_sobels_kernels() -> None:
    """As a convolution; a ramp of slope s has edges of 8 s, a plain picture none."""
    kernel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    pictures = torch.rand(2, 1, 9, 7, generator=torch.Generator().manual_seed(0))
    slopes = F.conv2d(pictures, torch.stack([kernel, kernel.T])[:, None])
    torch.testing.assert_close(edges(pictures), slopes.square().sum(dim=1, keepdim=True).sqrt())
    rows, columns = torch.meshgrid(torch.arange(9.0), torch.arange(7.0), indexing="ij")
    assert torch.allclose(edges(3 * rows + 4 * columns), torch.tensor(8 * 5.0))
    assert not edges(torch.ones(1, 1, 5, 5)).any()


def test_the_loss_is_the_weighted_sum_of_its_parts() -> None:
    draw = torch.Generator().manual_seed(0)
    one, two = (torch.randn(2, 1, 8, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    gap, steep = one - two, edges(one) - edges(two)
    small = [torch.where(x.abs() < 1, x**2 / 2, x.abs() - 0.5).mean() for x in (gap, steep)]
    expected = 0.85 * gap.square().mean() + 0.15 * steep.square().mean() + 0.85 * small[0] + 0.15 * small[1]
    torch.testing.assert_close(edge_loss(one, two), expected)
    assert edge_loss(one, one) == 0
    assert torch.autograd.gradcheck(lambda x: edge_loss(x, two), one.requires_grad_())


def test_gradients_of_plain_pictures_are_finite() -> None:
    picture = torch.zeros(1, 1, 6, 6, requires_grad=True)
    edge_loss(picture, torch.ones(1, 1, 6, 6)).backward()
    assert picture.grad is not None
    assert picture.grad.isfinite().all()


@pytest.mark.parametrize("name", ["perception-mini", "perception-published-mini"])
def test_the_networks_learn_their_example_batch(name: str) -> None:
    """The loss is the two networks' own, the second one's target the first one's output."""
    torch.manual_seed(0)
    model = build(name)
    batch = model.example_batch(3)
    segmented, rebuilt = model(batch["pictures"])
    expected = edge_loss(segmented, batch["targets"]) + edge_loss(rebuilt, segmented)
    torch.testing.assert_close(model(**batch), expected)
    assert_learns(model, batch)


@pytest.mark.parametrize("detached", [True, False])
def test_the_reconstruction_moves_its_target_only_where_asked(detached: bool) -> None:
    """With a segmentation that gives its targets already, no other gradient is left."""
    model = build("perception-mini", detached=detached).eval()
    picture = model.example_batch(1)["pictures"]
    model(picture, model(picture)[0].detach()).backward()
    moved = any(parameter.grad.any() for parameter in model.segmentation.parameters())
    assert moved != detached


def test_the_network_takes_point_clouds() -> None:
    model = build("perception-mini").eval()
    draw = torch.Generator().manual_seed(0)
    scans = [torch.rand(50, 3, generator=draw) * 8 - 4 for _ in range(4)]
    view = model.view(scans)
    assert view.shape == (1, 4, 36, 36)
    assert view.any()
    for one, direct in zip(model(scans), model(view), strict=True):
        assert torch.equal(one, direct)


@cache
def captured() -> ModelGraph:
    batch = {"pictures": torch.empty(2, 4, 36, 36), "targets": torch.empty(2, 1, 36, 36)}
    return trace(on_meta("perception-mini"), batch)


@pytest.mark.parametrize("name", ["perception", "perception-published", "perception-mini"])
def test_the_two_networks_are_branches(name: str) -> None:
    """They read the model's input alone, and only the loss reads both; in the shipped files and as captured."""
    graph = captured() if name.endswith("mini") else load_model(name)
    (region,) = find_regions(graph)
    assert [branch.roots for branch in region.branches] == [("segmentation",), ("reconstruction",)]
    assert region.exit == ("after",)


@pytest.mark.parametrize("name", ["perception", "perception-published"])
def test_counts_of_the_planned_graphs_are_the_published_ones(name: str) -> None:
    """Forward, of one sample; by the networks that layers belong to."""
    graph = load_model(name)
    for root, (parameters, flops) in (("segmentation", SEGMENTATION), ("reconstruction", RECONSTRUCTION)):
        kinds = [graph.kind_of(layer) for layer in graph.layers if layer.name.startswith(root)]
        assert sum(kind.parameters.total for kind in kinds) == pytest.approx(parameters, abs=0.005e6)
        assert sum(kind.flops for kind in kinds) == pytest.approx(flops, abs=0.05e9)
    assert graph.kinds["after"].flops == graph.kinds["before"].flops == 0


SMALL = VoxelGrid(side=6, depth=4, resolution=0.5)


def by_hand(scans: list[list[tuple[float, float, float]]], grid: VoxelGrid) -> Tensor:
    """Every voxel of every scan, the largest over the heights."""
    sizes = (grid.side, grid.side, grid.depth)
    voxels = torch.zeros(len(scans), *sizes)
    for place, scan in enumerate(scans):
        for point in scan:
            where = [floor(axis / grid.resolution + size / 2) for axis, size in zip(point, sizes, strict=True)]
            if all(0 <= index < size for index, size in zip(where, sizes, strict=True)):
                voxels[place, where[0], where[1], where[2]] = 1
    return voxels.amax(dim=3)[None]


quarters = st.integers(-10, 10).map(lambda steps: steps / 4)
"""Metres that are exact in binary: points on the borders of voxels, inside and outside of the grid."""
clouds = st.lists(st.lists(st.tuples(quarters, quarters, quarters), max_size=8), min_size=3, max_size=3)


@given(clouds)
@settings(max_examples=60, deadline=None)
def test_views_are_those_of_voxels_filled_one_by_one(scans: list[list[tuple[float, float, float]]]) -> None:
    tensors = [torch.tensor(scan, dtype=torch.float32).reshape(-1, 3) for scan in scans]
    assert torch.equal(birds_eye_view(tensors, SMALL, count=3), by_hand(scans, SMALL))


def test_the_published_grid() -> None:
    """200 x 200 m around the sensor, 5 m up and down, in steps of 0.2 m."""
    lone = birds_eye_view([torch.tensor([[-100.0, 99.9, 0.1]])] * 16, VoxelGrid())
    assert lone.sum() == 16
    assert lone[0, 0, 0, 999] == 1


def test_points_outside_or_without_a_number_leave_no_mark() -> None:
    far = torch.tensor([[9.0, 0, 0], [0, -9.0, 0], [0, 0, 9.0], [torch.nan, 0, 0], [0, torch.inf, 0], [1e30, 0, 0]])
    assert not birds_eye_view([far], SMALL, count=1).any()


CLOUD = torch.zeros(5, 3)


@pytest.mark.parametrize(
    ("scans", "named"),
    [
        ([CLOUD], "scans"),
        (CLOUD, "scans"),
        ([CLOUD, torch.zeros(3, 5)], r"scans\[1\]"),
        ([torch.zeros(3), CLOUD], r"scans\[0\]"),
        ([CLOUD, CLOUD.long()], r"scans\[1\]"),
        ([CLOUD, [[0.0, 0.0, 0.0]]], r"scans\[1\]"),
    ],
)
def test_inputs_that_are_no_lists_of_clouds_are_refused(scans: list[Tensor], named: str) -> None:
    with pytest.raises(InputError, match=named):
        birds_eye_view(scans, SMALL, count=2)


@pytest.mark.parametrize("field", ["side", "depth", "resolution"])
def test_a_grid_has_an_extent(field: str) -> None:
    with pytest.raises(InputError, match=field):
        VoxelGrid(**{field: 0})
