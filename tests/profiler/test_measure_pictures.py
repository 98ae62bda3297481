"""Layers on a share of their pixels: what is run, and what plans are made of it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.model.graph import Operator, OperatorClass, Recompute, Role, SplitDims
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.backends import ANY
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.measure import Scope, before_settings, layer_settings, make_tasks, measure_profile
from galvatron_lite.profiler.measure_bench import LayerBench
from galvatron_lite.profiler.measure_layers import (
    cut_pictures,
    first_share,
    measured_channel_splits,
    measured_grids,
    with_sharded_pixels,
)
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.segments import SegmentCall
from galvatron_lite.profiler.timing import TimingRule, run_tasks
from galvatron_lite.search.space import Fixed, Space
from tests.factories import make_kind
from tests.pool import WorkerPool

QUICK = TimingRule(warmup=1, least=2, most=2, seconds=0.02)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    model = build("resnet-mini", depths=(1, 2))
    folder = tmp_path_factory.mktemp("profiles")
    return measure_profile(
        model, model.example_batch(2), folder=folder, name="mini", rule=QUICK, device="cpu", max_samples=2,
        tensor_degrees=(1, 2),
    )  # fmt: skip


def test_for_one_device_pictures_are_whole_and_few(profile: Profile) -> None:
    scope = Scope(profile.graph, "fp32", (1, 4), (1,), 1, profile.cluster, torch.device("cpu"), QUICK)
    assert any(setting.samples < 1 for setting in layer_settings(scope))
    brief = replace(scope, unsplit=True)
    assert {setting.samples for setting in layer_settings(brief)} == {1, 4}
    assert before_settings(brief) == []


def test_every_block_and_the_stem_are_run_on_shares(profile: Profile) -> None:
    roles = {layer.kind: layer.role for layer in profile.graph.layers}
    for name, kind in profile.graph.kinds.items():
        found = {point.samples for point in profile.layers if point.kind == name and point.samples < 1}
        expected = {first_share(kind, grid) for grid in measured_grids(kind) if roles[name] is not Role.AFTER}
        assert found == expected
        assert roles[name] is Role.AFTER or 0.5 in found


def test_a_share_keeps_its_share(profile: Profile) -> None:
    for name, kind in profile.graph.kinds.items():
        own = {
            one.samples: one for one in profile.layers
            if one.kind == name and one.recompute is Recompute.NONE and one.filters * one.channels * one.tensor == 1
        }  # fmt: skip
        whole = own[2].kept - own[1].kept
        for samples in own.keys() - {1, 2}:
            # what does not shrink: statistics of batch normalisations, a row of sums
            assert own[samples].kept == pytest.approx(whole * samples, rel=0.02, abs=1500)
        assert kind.dims.in_channels


def test_every_layer_is_run_with_slices_of_its_weights(profile: Profile) -> None:
    for name, kind in profile.graph.kinds.items():
        own = [point for point in profile.layers if point.kind == name and point.samples == 1]
        found = {(by, getattr(point, by)) for point in own for by in ("filters", "channels") if getattr(point, by) > 1}
        assert found == set(measured_channel_splits(kind, (1, 2)))
    block = next(layer.kind for layer in profile.graph.layers if layer.role is Role.BLOCK)
    kept = {
        (one.filters, one.channels): one.kept
        for one in profile.layers
        if (one.kind, one.samples, one.recompute) == (block, 1, Recompute.NONE) and one.tensor == 1
    }
    assert max(kept[2, 1], kept[1, 2]) < kept[1, 1]


def test_slices_are_run_at_every_second_number_of_samples(profile: Profile) -> None:
    scope = Scope(profile.graph, "fp32", (1, 2, 4), (1, 2), 1, profile.cluster, torch.device("cpu"), QUICK)
    bench = Mock()
    bench.measure_block.side_effect = lambda setting: [replace(profile.layers[0], samples=setting.samples)]
    tasks = [task for task in make_tasks(scope, bench) if task.key.startswith("block") and "filters 2" in task.key]
    assert {points[0]["samples"] for points in run_tasks(tasks, None).values()} == {1, 4}


def test_slices_are_offered_and_priced(profile: Profile) -> None:
    known = profile.on(load_cluster("a100-80gb", 2))
    pricer, space = LayerPricer(known), Space(known.graph, 8, ANY)
    for name, kind in known.graph.kinds.items():
        strategies = [one for one in space.strategies(name, 2, Fixed()) if one.slices > 1]
        assert {by for by, _ in measured_channel_splits(kind, (2,))} == {
            "filters" if one.filters > 1 else "channels" for one in strategies
        }
        assert pricer.price_many(name, strategies, 4, 1).valid.all()


def test_all_that_is_offered_is_priced_at_the_shape_that_was_run(profile: Profile) -> None:
    known = profile.on(load_cluster("a100-80gb", 4))
    pricer, space = LayerPricer(known), Space(known.graph, 8, ANY)
    for name in known.graph.kinds:
        strategies = [one for one in space.strategies(name, 4, Fixed()) if one.spatial > 1]
        assert strategies
        assert pricer.price_many(name, strategies, 4, 1).valid.all()
    block = next(layer.kind for layer in known.graph.layers if layer.role is Role.BLOCK)
    point = next(
        one for one in known.layers
        if (one.kind, one.samples, one.recompute) == (block, 0.25, Recompute.NONE)
    )  # fmt: skip
    cost = pricer.price(block, Strategy(width=4), 1, 1)
    assert (cost.forward, cost.backward) == (point.forward, point.backward)


class Flat(nn.Module):
    """A block that makes a row of its picture."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.mlp = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4 * 64, 4 * 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.mix(x).flatten(1)).view_as(x)


class Network(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 1), nn.Linear(4, 2)
        self.blocks = nn.ModuleList(Flat() for _ in range(2))

    def forward(self, picture: Tensor, target: Tensor) -> Tensor:
        x = self.stem(picture)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), target)


def test_what_needs_its_picture_whole_is_run_whole(tmp_path: Path) -> None:
    batch = {"picture": torch.randn(2, 3, 8, 8), "target": torch.zeros(2, dtype=torch.int64)}
    profile = measure_profile(Network(), batch, folder=tmp_path, name="flat", rule=QUICK, device="cpu", max_samples=1)
    assert {point.samples for point in profile.layers if point.kind == "block"} == {1}
    assert {point.samples for point in profile.layers if point.kind == "before"} >= {1, 0.5, 0.25}


def test_only_pictures_are_cut() -> None:
    side = (3, 3, 1, 7, 7, 1, 1, 1, 1)
    operator = Operator("conv", OperatorClass.CONVOLUTION, side, 1, 1, 2, 1, 1, 1)
    dims = SplitDims(in_channels=3, out_channels=3, height=7, width=7)
    kind = replace(make_kind("block", 9), operators=(operator,), dims=dims)
    grid = measured_grids(kind)[0]
    picture, mask = torch.arange(2 * 3 * 7 * 7.0).view(2, 3, 7, 7), torch.zeros(2, 3, 7, 7, dtype=torch.int64)
    cut = cut_pictures({"x": picture, "mask": mask, "row": torch.zeros(2, 3)}, kind, grid)
    assert torch.equal(cut["x"], picture[..., :4] if grid[2] == 2 else picture[:, :, :4])
    assert cut["mask"].shape == mask.shape
    assert cut["row"].shape == (2, 3)


def test_a_block_on_its_share_makes_its_share() -> None:
    """It runs as in training: the result is the first device's, but for what reads its neighbours' pixels."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 1))
    picture, dims = torch.randn(2, 3, 8, 9), SplitDims(in_channels=3, out_channels=3, height=8, width=9)
    kind = replace(make_kind("block", 9), dims=dims)
    call = SegmentCall((picture,), {}, None)
    whole = block(picture)
    (given,) = cut_pictures(call.args, kind, (1, 1, 3))
    made = with_sharded_pixels(copy.deepcopy(block), call, kind, (1, 1, 3))(given)
    assert type(made) is Tensor
    assert made.shape == (2, 3, 8, 3)
    assert torch.allclose(made[..., :2], whole[..., :2])  # the last column reads one that a neighbour has
    assert not torch.allclose(made[..., 2], whole[..., 2])


def test_the_runtime_s_own_time_on_shares_is_measured_and_priced(profile: Profile) -> None:
    assert 0 <= profile.overhead.spatial < 0.1
    overhead = replace(profile.overhead, spatial=0.25, spatial_per_byte=1e-6, spatial_exchange=0.01)
    known = replace(profile.on(load_cluster("a100-80gb", 4)), overhead=overhead)
    layer = next(layer for layer in known.graph.layers if layer.role is Role.BLOCK)
    # convolutions with windows borrow pixels in either pass, and batch norms sum in both
    modules = build("resnet-mini", depths=(1, 2)).get_submodule(layer.modules[0]).modules()
    windows, norms = 0, 0
    for module in modules:
        windows += isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1)
        norms += isinstance(module, nn.BatchNorm2d)
    pricer = LayerPricer(known)
    costs = [pricer.price(layer.kind, one, 4, 1) for one in (Strategy(width=2, data=2), Strategy(data=4))]
    kept = known.graph.kind_of(layer).kept[Recompute.NONE].total  # of a sample: two samples on half of the columns
    expected = [0.25 + 1e-6 * kept + 0.01 * 2 * (windows + norms), 0.0]
    assert [cost.host for cost in costs if cost] == [pytest.approx(one) for one in expected]


def exchange_overhead() -> float:
    torch.manual_seed(0)
    model = build("resnet-mini", depths=(1, 2))
    batch = model.example_batch(2)
    bench = LayerBench(model, trace(model, batch), batch, None, torch.device("cpu"), QUICK)
    return bench.measure_overhead().spatial_exchange


def test_waiting_in_exchanges_is_measured_between_two_ranks(pool: WorkerPool) -> None:
    first, second = pool.run(2, exchange_overhead)
    assert first == second  # both ranks price alike
    assert 0 <= first < 0.1
