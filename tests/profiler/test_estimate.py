"""Estimated profiles: which points there are, how they relate, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.calibration.schema import StackConstants
from galvatron_lite.calibration.store import constants_for_device, constants_for_stack, load_calibration
from galvatron_lite.cluster.catalog import device_named, load_cluster
from galvatron_lite.cluster.cluster import DeviceGroup
from galvatron_lite.errors import InputError
from galvatron_lite.files import read_value, write_value
from galvatron_lite.model.graph import (
    Layer,
    LayerKind,
    ModelGraph,
    Operator,
    OperatorClass,
    Recompute,
    Role,
    Sharding,
    TensorSplit,
)
from galvatron_lite.profiler.estimate import SAMPLES, estimate_profile, tensor_degrees
from galvatron_lite.profiler.roofline import machine_of, operator_seconds
from galvatron_lite.profiler.schema import LayerPoint, OriginKind, Profile
from galvatron_lite.stacks.catalog import GALVATRON
from galvatron_lite.stacks.schema import Stack
from tests.processor_time import least, process_seconds


def block(hidden: int, heads: int, tokens: int = 2048) -> LayerKind:
    def matmul(name: str, inner: int, columns: int) -> Operator:
        flops, moved = 2 * tokens * inner * columns, 2 * tokens * (inner + columns)
        shape = (tokens, inner, columns)
        return Operator(
            name,
            OperatorClass.MATMUL,
            shape,
            1,
            flops,
            2 * flops,
            moved,
            2 * moved,
            2 * inner * columns,
            Sharding.TENSOR,
        )

    def memory(name: str, items: int, sharding: Sharding) -> Operator:
        return Operator(name, OperatorClass.MEMORY, (items,), 1, items, items, 4 * items, 6 * items, 0, sharding)

    size = tokens * hidden
    attention_shape = (heads, heads, tokens, tokens, hidden // heads)
    flops = 4 * tokens * size
    return LayerKind(
        name="block",
        parameters=TensorSplit(tensor=12 * hidden**2, whole=4 * hidden),
        operators=(
            memory("norm1", size, Sharding.SEQUENCE),
            matmul("qkv", hidden, 3 * hidden),
            Operator("attention", OperatorClass.ATTENTION, attention_shape, 1, flops, 2 * flops, 8 * size, 16 * size, 0,
                     Sharding.TENSOR),
            matmul("out", hidden, hidden),
            memory("norm2", size, Sharding.SEQUENCE),
            matmul("up", hidden, 4 * hidden),
            memory("act", 4 * size, Sharding.TENSOR),
            matmul("down", 4 * hidden, hidden),
        ),
        kept={
            Recompute.NONE: TensorSplit(tensor=24 * size, sequence=8 * size),
            Recompute.SELECTIVE: TensorSplit(tensor=16 * size, sequence=2 * size),
            Recompute.FULL: TensorSplit(sequence=2 * size),
        },
        working=TensorSplit(tensor=16 * size),
        forward_working=TensorSplit(sequence=4 * size),
        input_bytes=2 * size,
        output_bytes=2 * size,
        tensor_degrees=heads,
        tensor_collectives=4,
        sequence_parallel=True,
    )  # fmt: skip


def model(hidden: int = 1024, heads: int = 16, layers: int = 2, precision: str = "bf16") -> ModelGraph:
    names = tuple(Layer(f"layers.{index}", "block", Role.BLOCK) for index in range(layers))
    return ModelGraph("test", names, {"block": block(hidden, heads)}, 2048, precision)


def profile(gpus: int = 8, graph: ModelGraph | None = None, samples: tuple[int, ...] = SAMPLES) -> Profile:
    graph = graph or model()
    return estimate_profile(
        graph, load_cluster("a100-80gb", gpus), precision=graph.precision, name="test", samples=samples
    )


NO_HOST = Stack(name="test", states=GALVATRON.states, constants=StackConstants(step_host=1e-3))
"""A stack whose host launches kernels in no time."""


def by_recompute(points: tuple[LayerPoint, ...]) -> dict[tuple[int, int, bool], dict[Recompute, LayerPoint]]:
    found: dict[tuple[int, int, bool], dict[Recompute, LayerPoint]] = {}
    for point in points:
        found.setdefault((point.samples, point.tensor, point.sequence_parallel), {})[point.recompute] = point
    return found


def test_points_cover_every_legal_choice_once() -> None:
    points = profile().layers
    keys = [(p.kind, p.samples, p.tensor, p.sequence_parallel, p.recompute) for p in points]
    assert len(keys) == len(set(keys)) == len(SAMPLES) * 3 * (1 + 2 * 3)
    assert {p.tensor for p in points} == {1, 2, 4, 8}
    assert not any(p.sequence_parallel for p in points if p.tensor == 1)


@pytest.mark.parametrize(
    ("largest", "devices", "degrees"),
    [
        (96, 1024, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)),
        (12, 4, (1, 2, 3, 4)),
        (1, 64, (1,)),
        (128, 128, (1, 2, 4, 8, 16, 32, 64)),
    ],
)
def test_tensor_degrees_divide_what_the_structure_allows(largest: int, devices: int, degrees: tuple[int, ...]) -> None:
    kind = replace(block(64, 4), tensor_degrees=largest)
    assert tensor_degrees(kind, devices) == degrees


def test_recompute_adds_exactly_what_runs_again() -> None:
    kind = model().kinds["block"]
    machine = machine_of(device_named("A100-80GB"), "bf16")
    made = estimate_profile(model(), load_cluster("a100-80gb", 8), precision="bf16", name="test", stack=NO_HOST)
    for (samples, degree, split), points in by_recompute(made.layers).items():
        none, selective, full = points[Recompute.NONE], points[Recompute.SELECTIVE], points[Recompute.FULL]
        assert none.forward == selective.forward == full.forward
        assert full.backward == pytest.approx(none.backward + none.forward, rel=1e-12)
        again = sum(
            operator_seconds(machine, operator, samples, degree, split).forward
            for operator in kind.operators
            if operator.kind is OperatorClass.MEMORY
        )
        assert selective.backward == pytest.approx(none.backward + again, rel=1e-12)


def test_memory_follows_the_graph() -> None:
    size = 2048 * 1024
    points = by_recompute(profile().layers)[4, 2, True]
    none, selective, full = points[Recompute.NONE], points[Recompute.SELECTIVE], points[Recompute.FULL]
    assert none.kept == 4 * 16 * size
    assert none.working == none.kept + 4 * 8 * size
    assert none.forward_working == none.kept + 4 * 2 * size
    assert full.kept == 4 * size
    assert full.working == none.working + full.kept
    assert selective.working == none.working
    assert all(point.kept <= point.forward_working for point in points.values())


@settings(deadline=None)
@given(st.lists(st.integers(1, 64), min_size=2, max_size=5, unique=True))
def test_time_and_memory_grow_with_samples(samples: list[int]) -> None:
    points = profile(samples=tuple(sorted(samples))).layers
    lines: dict[tuple[int, bool, Recompute], list[LayerPoint]] = {}
    for point in points:
        lines.setdefault((point.tensor, point.sequence_parallel, point.recompute), []).append(point)
    for line in lines.values():
        for first, second in pairwise(line):
            assert first.forward <= second.forward * (1 + 1e-12)
            assert first.backward <= second.backward * (1 + 1e-12)
            assert first.kept < second.kept


def test_every_figure_says_that_it_is_estimated() -> None:
    made = profile()
    assert made.origin.kind is made.communication_origin.kind is OriginKind.ESTIMATED
    assert "A100-SXM4-80GB" in made.origin.source
    assert (made.gather_precision, made.reduce_precision, made.parameter_precision) == ("bf16", "fp32", "fp32")
    assert not made.fits
    assert not made.collectives
    assert profile(graph=model(precision="fp32")).gather_precision == "fp32"


def test_the_optimizer_is_bound_by_memory_traffic() -> None:
    graph, cluster = model(), load_cluster("a100-80gb", 8)
    fused = estimate_profile(graph, cluster, precision="bf16", name="x", optimizer="adamw-fused").optimizer
    # Update 28; norm of the fp32 gradient 4, clipping 8; gradients form anew in backward, so nothing is zeroed.
    fitted = constants_for_stack(load_calibration(), GALVATRON.name)
    reached = constants_for_device(load_calibration(), cluster.device.name, cluster.device.source).memory
    assert fused.seconds_per_item == pytest.approx(fitted.optimizer * fitted.memory * (28 + 4 + 8) / (reached * 2039e9))
    plain = profile().optimizer
    assert (plain.state_bytes, plain.working_bytes, plain.working_share) == (8, 4.0, 1.0)
    assert plain.seconds_per_item > fused.seconds_per_item


def test_unlike_devices_are_as_slow_as_the_slowest() -> None:
    graph, fast = model(), load_cluster("a100-80gb", 8)
    slow = replace(fast, groups=(DeviceGroup(device_named("V100"), 8),))
    mixed = replace(fast, groups=(DeviceGroup(fast.device, 4), DeviceGroup(device_named("V100"), 4)))
    made = estimate_profile(graph, mixed, precision="fp16", name="mixed")
    assert made.layers == estimate_profile(graph, slow, precision="fp16", name="slow").layers
    assert "A100" in made.origin.source
    assert "V100" in made.origin.source


def test_what_cannot_be_estimated_is_refused() -> None:
    cluster = load_cluster("a100-80gb", 8)
    with pytest.raises(InputError, match="capture it anew"):
        estimate_profile(model(), cluster, precision="fp32", name="x")
    with pytest.raises(InputError, match="precision"):
        estimate_profile(model(), cluster, precision="int8", name="x")
    with pytest.raises(InputError, match="adamw"):
        estimate_profile(model(), cluster, precision="bf16", name="x", optimizer="shampoo")


def test_a_large_model_is_estimated_in_a_blink() -> None:
    graph, cluster = model(12288, 96, 96), load_cluster("a100-80gb", 1024)
    made: list[Profile] = []

    def estimate() -> None:
        made.append(estimate_profile(graph, cluster, precision="bf16", name="x"))

    assert least(lambda: process_seconds(estimate), 0.3) < 0.3
    assert len(made[0].layers) < 3000


def test_a_profile_reads_back_the_same(tmp_path: Path) -> None:
    made = profile(samples=(1, 2))
    write_value(tmp_path / "profile.json", made)
    assert read_value(Profile, tmp_path / "profile.json") == made


def test_estimates_never_import_torch() -> None:
    modules = "galvatron_lite.profiler.estimate, galvatron_lite.cluster.catalog, galvatron_lite.cluster.collectives"
    code = f"import sys, {modules}, galvatron_lite.cluster.probe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
