"""A whole profile of a tiny model: alone, interrupted, and with two processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.errors import InfeasibleError
from galvatron_lite.model.graph import Recompute, Role
from galvatron_lite.parallelism.base import DimensionContext, LayerWork
from galvatron_lite.parallelism.pipeline.deferral import Deferral, defer_weights
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.tensor.cost import TensorDimension
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.profiler import measure_bench
from galvatron_lite.profiler.measure import fit_collectives, fit_line, machine_name, measure_profile
from galvatron_lite.profiler.measure_hardware import (
    group_shapes,
    make_group,
    measure_collective,
    measure_optimizer,
    measure_overlap,
    measure_throughput,
    prepare,
    ranks_of,
)
from galvatron_lite.profiler.measure_overhead import BlockChain, Line, chain_run, line_through, measure_waiting
from galvatron_lite.profiler.schema import BRANCH_HOST, CollectivePoint, OriginKind, Overlap, Profile
from galvatron_lite.profiler.segments import SegmentCall
from galvatron_lite.profiler.store import journal_path, last_profile, profile_hash, read_profile
from galvatron_lite.profiler.timing import TimingRule
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.space import Fixed
from tests.factories import make_kind
from tests.pool import WorkerPool
from tests.profiler.models import LAYERS, small_gpt, token_batch

QUICK = TimingRule(warmup=1, least=2, most=2, seconds=0.02)


def measure(folder: Path, **options: object) -> Profile:
    return measure_profile(small_gpt(), token_batch(4), folder=folder, name="tiny", rule=QUICK, device="cpu", **options)


class Rows(nn.Module):
    """A batch norm over rows has no statistics of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.norm(x)).pow(2).mean()


def test_a_model_that_does_not_run_on_one_sample(tmp_path: Path) -> None:
    batch = {"x": torch.randn(8, 8)}
    profile = measure_profile(Rows(), batch, folder=tmp_path, name="rows", rule=QUICK, device="cpu")
    assert {point.samples for point in profile.layers} == {2, 4, 8}
    assert find_plan(profile, devices=1, global_batch=8, budget=2**30).microbatches < 8
    with pytest.raises(InfeasibleError):
        find_plan(profile, devices=1, global_batch=8, budget=2**30, fixed=Fixed(microbatches=8))
    pictures = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    assert trace(pictures, torch.randn(2, 1, 8, 8), loss_fn=lambda output, _: output.mean()).least_samples == 1


def test_one_process_measures_a_profile(tmp_path: Path) -> None:
    profile = measure(tmp_path, tensor_degrees=(1, 2), max_samples=2)
    assert read_profile(last_profile(tmp_path)) == profile
    assert last_profile(tmp_path).stat().st_size < 300_000
    assert profile.origin.kind is OriginKind.MEASURED
    assert profile.communication_origin.kind is OriginKind.ESTIMATED
    assert len([layer for layer in profile.graph.layers if layer.role is Role.BLOCK]) == LAYERS
    whole = [point for point in profile.layers if point.kind == "block" and point.tensor == 1]
    assert {(point.samples, point.recompute) for point in whole} == {(n, r) for n in (1, 2) for r in Recompute}
    assert {point.samples for point in profile.layers if point.kind == "after"} == {1, 2}
    assert all(point.forward > 0 and point.working >= point.kept for point in profile.layers)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_kept_bytes_agree_with_the_captured_graph(tmp_path: Path) -> None:
    """Two independent ways: the allocator's events of a real run, and counting on the meta device."""
    profile = measure(tmp_path, max_samples=2)
    captured = profile.graph.kinds["block"].kept[Recompute.NONE].total
    one, two = (
        next(p for p in profile.layers if (p.kind, p.samples, p.recompute) == ("block", samples, Recompute.NONE))
        for samples in (1, 2)
    )
    assert two.kept - one.kept == captured


def test_an_interrupted_measurement_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point is measured once over both runs, although the first one is cut off."""
    calls: Counter[object] = Counter()
    real = measure_bench.measure_block

    def counted(block: nn.Module, call: object, setting: object, *rest: object) -> object:
        if len(calls) == 4 and setting not in calls:
            calls["stopped"] += 1
            raise KeyboardInterrupt
        calls[setting] += 1
        return real(block, call, setting, *rest)

    monkeypatch.setattr(measure_bench, "measure_block", counted)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, max_samples=2)
    assert len(list(tmp_path.rglob("*.journal.jsonl"))) == 1
    profile = measure(tmp_path, max_samples=2)
    del calls["stopped"]
    assert set(calls.values()) == {1}
    assert len(calls) == len([point for point in profile.layers if point.kind == "block"])
    assert not journal_path(tmp_path, machine_name(profile.cluster), "tiny").exists()


def test_a_model_on_meta_and_a_factory(tmp_path: Path) -> None:
    def factory() -> nn.Module:
        with torch.device("meta"):
            return small_gpt()

    profile = measure_profile(factory, token_batch(2), folder=tmp_path, max_samples=1, rule=QUICK, device="cpu")
    assert profile.name == "GPT"
    assert all(point.samples == 1 for point in profile.layers)


def measure_together(folder: str) -> tuple[str, str]:
    profile = measure(Path(folder), max_samples=1)
    return profile_hash(profile), str(last_profile(Path(folder)))


def test_two_processes_make_one_profile(pool: WorkerPool, tmp_path: Path) -> None:
    ranks = pool.run(2, measure_together, folder=str(tmp_path))
    profile = read_profile(last_profile(tmp_path))
    assert {digest for digest, _ in ranks} == {profile_hash(profile)}
    assert profile.cluster.devices == 2
    assert {fit.collective for fit in profile.fits} == set(Collective)
    assert profile.cluster.levels[0].source == "measured"
    assert profile.communication_origin.kind is OriginKind.MEASURED
    assert {point.tensor for point in profile.layers if point.kind == "before"} == {1, 2}
    assert profile.overlap.compute_slowdown >= 1
    assert profile.overhead.step > 0
    assert profile.overhead.branch == BRANCH_HOST  # without branches it is not measured
    assert min(profile.overhead.zero, profile.overhead.data, profile.overhead.pipeline) >= 0


def test_optimizer_state_of_adamw() -> None:
    cost = measure_optimizer(torch.device("cpu"), QUICK)
    assert cost.state_bytes == 8
    assert cost.seconds_per_item > 0
    assert cost.working_bytes >= 4
    assert cost.working_share == 0.0


def test_throughput_is_plausible() -> None:
    found = measure_throughput(torch.device("cpu"), "fp32", QUICK)
    assert 1e8 < found.attention < 1e13
    assert 1e8 < found.matmul < 1e13
    assert 1e8 < found.bandwidth < 1e12
    assert 0 < found.launch < 1e-3


figures = st.floats(0, 1e-2)
sizes = st.integers(1, 2**30)


@given(figures, st.floats(0, 1e-8), st.tuples(sizes, sizes).filter(lambda pair: pair[0] != pair[1]))
def test_points_of_a_line_give_the_line(fixed: float, slope: float, places: tuple[int, int]) -> None:
    found = line_through([(size, fixed + slope * size) for size in places])
    assert found.slope == pytest.approx(slope, rel=1e-3, abs=1e-9)
    wanted = max(fixed + slope * size for size in places)
    assert found.fixed + found.slope * max(places) == pytest.approx(wanted, rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(sizes, st.floats(-1e-2, 1e-2)), min_size=2, max_size=2))
def test_noise_never_makes_a_line_negative(points: list[tuple[int, float]]) -> None:
    found = line_through(points)
    assert min(found.fixed, found.slope) >= 0


def test_a_chain_whose_gradients_wait_makes_them_all() -> None:
    block, call = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), SegmentCall((torch.ones(2, 4),), {}, None)
    deferral = Deferral()
    plain, split = BlockChain(block), BlockChain(block, lambda layer: defer_weights(layer, deferral))
    chain_run(plain, call)(lambda: None)
    chain_run(split, call, deferral=deferral)(lambda: None)
    assert not deferral.take()
    for one, other in zip(plain.parameters(), split.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad)


def test_one_process_never_waits() -> None:
    call = SegmentCall((torch.zeros(1, 2),), {}, None)
    assert measure_waiting(nn.Linear(2, 2), TensorPlan(), [call], torch.device("cpu")) == Line()


@pytest.mark.parametrize("shared", [False, True])
def test_the_cost_model_counts_every_blocking_collective(shared: bool) -> None:
    kind = replace(
        make_kind("block", 100), tensor_collectives=4, tensor_degrees=2, output_bytes=1000, sequence_parallel=True
    )
    strategy = Strategy(data=2, tensor=2, sequence_parallel=shared)
    host = {"tensor": 1e-3, "tensor_per_byte": 1e-6}
    context = DimensionContext(4, 4, 4, 4, 4, 4, 1, host=host)
    work = LayerWork(8.0, 1, False, Recompute.NONE, 1.0, 1.0, 1.0, 1.0)
    found = TensorDimension().apply(work, kind, strategy, context)
    collectives = 8 if shared else 4
    assert found.microbatch_overhead == pytest.approx(collectives * (1e-3 + 1e-6 * 4 * 1000))


@pytest.mark.parametrize("world", [1, 2, 4, 6, 8, 12])
def test_shapes_tile_the_world(world: int) -> None:
    shapes = group_shapes(world)
    for shape in shapes:
        groups = ranks_of(shape, world)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert len(groups) == shape.siblings
        for group in groups:
            assert {after - before for before, after in pairwise(group)} == {shape.stride}
    wanted = {
        (size, stride) for size in range(2, world + 1) for stride in range(1, world + 1) if world % (size * stride) == 0
    }
    assert {(shape.size, shape.stride) for shape in shapes} == wanted


def measure_everything() -> list[CollectivePoint]:
    device, points = torch.device("cpu"), list[CollectivePoint]()
    for shape in group_shapes(dist.get_world_size()):
        group = make_group(shape)
        for kind in Collective:
            if kind is not Collective.SEND_RECV or shape.size == 2:
                points += measure_collective(kind, shape, group, device, sizes=(4096, 16384), rule=QUICK)
    return points


def test_every_collective_is_measured(pool: WorkerPool) -> None:
    ranks = pool.run(4, measure_everything)
    assert all(points == ranks[0] for points in ranks)
    found = {(point.collective, point.group, point.stride) for point in ranks[0]}
    shapes = [(2, 1), (2, 2), (4, 1)]
    assert found == {
        (kind, size, stride)
        for kind in Collective
        for size, stride in shapes
        if kind is not Collective.SEND_RECV or size == 2
    }
    assert all(point.seconds > 0 and point.siblings * point.group == 4 for point in ranks[0])


def prepared_sizes() -> bool:
    """What is communicated runs, with sizes that do not divide evenly too."""
    for kind in Collective:
        for size in (4, 4096, 10_000):
            prepare(kind, size, None, torch.device("cpu"))()
    return True


def test_collectives_run_with_sizes_that_do_not_divide(pool: WorkerPool) -> None:
    assert pool.run(2, prepared_sizes) == [True, True]


def overlap_here() -> Overlap:
    return measure_overlap(torch.device("cpu"), QUICK)


def test_overlap_slows_down(pool: WorkerPool) -> None:
    ranks = pool.run(2, overlap_here)
    assert ranks[0] == ranks[1]
    assert ranks[0].compute_slowdown >= 1
    assert ranks[0].communication_slowdown >= 1


def test_alone_there_is_no_overlap() -> None:
    assert overlap_here() == Overlap()


SIZES = [4096 * 4**power for power in range(8)]
latencies = st.floats(1e-6, 1e-2)
bandwidths = st.floats(1e7, 1e12)


@given(latencies, bandwidths)
def test_a_line_is_fitted_exactly(latency: float, bandwidth: float) -> None:
    line = fit_line(SIZES, [latency + size / bandwidth for size in SIZES])
    for size in SIZES:
        assert line(size) == pytest.approx(latency + size / bandwidth, rel=1e-3)
    assert line.residual < 1e-3


@given(latencies, bandwidths, st.lists(st.floats(-0.05, 0.05), min_size=8, max_size=8))
def test_noise_changes_the_fitted_line_little(latency: float, bandwidth: float, noise: list[float]) -> None:
    exact = [latency + size / bandwidth for size in SIZES]
    line = fit_line(SIZES, [value * (1 + shift) for value, shift in zip(exact, noise, strict=True)])
    assert all(abs(line(size) / value - 1) < 0.2 for size, value in zip(SIZES, exact, strict=True))


@given(latencies, bandwidths, st.integers(2, 5))
def test_an_outlier_is_outvoted(latency: float, bandwidth: float, place: int) -> None:
    exact = [latency + size / bandwidth for size in SIZES]
    line = fit_line(SIZES, [value * (10 if index == place else 1) for index, value in enumerate(exact)])
    others = [abs(line(SIZES[i]) / exact[i] - 1) for i in range(8) if i != place]
    assert max(others) < 0.1


def test_fitted_latency_and_bandwidth_are_not_negative() -> None:
    falling = fit_line([1.0, 2.0, 3.0], [3.0, 2.0, 1.0])
    assert falling.slope > 0
    assert falling.latency >= 0
    steep = fit_line([1e6, 2e6], [1e-6, 1.0])
    assert steep.latency == 0.0
    assert fit_line([1e6], [0.5])(2e6) == pytest.approx(1.0)


def test_one_fit_for_each_shape_of_group() -> None:
    def points(group: int, stride: int, bandwidth: float) -> list[CollectivePoint]:
        return [
            CollectivePoint(Collective.ALL_REDUCE, group, stride, 1, size, 1e-4 + size / bandwidth) for size in SIZES
        ]

    fits = fit_collectives([*points(2, 1, 1e9), *points(2, 2, 1e8)])
    assert [(fit.stride, round(fit.bandwidth / 1e8)) for fit in fits] == [(1, 10), (2, 1)]
    assert all(fit.latency == pytest.approx(1e-4, rel=1e-3) and fit.residual < 1e-3 for fit in fits)
