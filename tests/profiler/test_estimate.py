"""Estimated profiles: which points there are, how they relate, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from galvatron_lite.calibration.schema import StackConstants
from galvatron_lite.calibration.store import constants_for_device, constants_for_stack, load_calibration
from galvatron_lite.cluster.catalog import device_named, load_cluster
from galvatron_lite.cluster.cluster import DeviceGroup
from galvatron_lite.cost.layer import LayerPricer
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
from galvatron_lite.model.kernels import Kernels
from galvatron_lite.model.shapes import DecoderShape, build_graph
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.estimate import SAMPLES, estimate_profile, layer_times
from galvatron_lite.profiler.machine import machine_of
from galvatron_lite.profiler.roofline import operator_seconds
from galvatron_lite.profiler.schema import LayerPoint, OriginKind, Profile
from galvatron_lite.stacks.catalog import GALVATRON, match_stack
from galvatron_lite.stacks.schema import Stack, StateLayout
from tests.processor_time import least, process_seconds


def block(hidden: int, heads: int, tokens: int = 2048) -> LayerKind:
    def matmul(name: str, inner: int, columns: int) -> Operator:
        flops, moved = 2 * tokens * inner * columns, 2 * tokens * (inner + columns)
        shape, weights = (tokens, inner, columns), 2 * inner * columns
        return Operator(
            name, OperatorClass.MATMUL, shape, 1, flops, 2 * flops, moved, 2 * moved, weights, Sharding.TENSOR
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


SEQUENCE, HIDDEN, BATCH, DEGREE = 2048, 6144, 4, 8
NONE, SELECTIVE, FULL = Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL

# Table 4 of arXiv 2205.05198: sequence parallel, recompute, forward ms, backward ms (recompute included).
TABLE_4 = (
    (False, NONE, 7.7, 11.9),
    (True, NONE, 7.2, 11.8),
    (False, FULL, 7.7, 19.5),
    (False, SELECTIVE, 7.7, 13.2),
    (True, SELECTIVE, 7.2, 13.1),
)


@cache
def profile_22b(sequence_parallel: bool, recompute: Recompute) -> Profile:
    shape = DecoderShape(name="22B", layers=48, hidden=HIDDEN, heads=64, vocab=51200, seq_len=SEQUENCE, dropout=0.1)
    stack = match_stack("Megatron-LM")
    graph = build_graph(shape, precision="fp16", kernels=replace(stack.kernels, selective="attention"))
    wanted = [("block", DEGREE, sequence_parallel, choice, BATCH) for choice in {recompute, NONE}]
    return estimate_profile(
        graph, load_cluster("a100-80gb", DEGREE), precision="fp16", name="22B", stack=stack, wanted=wanted
    )


def point_22b(sequence_parallel: bool, recompute: Recompute) -> LayerPoint:
    points = profile_22b(sequence_parallel, recompute).layers
    return next(point for point in points if point.recompute is recompute)


def milliseconds(sequence_parallel: bool, recompute: Recompute) -> tuple[float, float]:
    """Forward and backward with their collectives, as far as compute does not hide them."""
    strategy = Strategy(tensor=DEGREE, sequence_parallel=sequence_parallel, recompute=recompute)
    cost = LayerPricer(profile_22b(sequence_parallel, recompute)).price("block", strategy, BATCH, stages=1)
    return 1e3 * cost.forward_seconds, 1e3 * cost.backward_seconds


@pytest.mark.parametrize(("sequence_parallel", "recompute", "forward", "backward"), TABLE_4)
def test_a_22b_block_takes_as_long_as_korthikanti_measured(
    sequence_parallel: bool, recompute: Recompute, forward: float, backward: float
) -> None:
    there, back = milliseconds(sequence_parallel, recompute)
    assert there == pytest.approx(forward, rel=0.05)
    assert back == pytest.approx(backward, rel=0.05)


def test_the_table_as_a_whole() -> None:
    pairs = [
        pair for split, again, *ms in TABLE_4 for pair in zip(milliseconds(split, again), ms, strict=True)
    ]  # fmt: skip
    assert fmean(abs(estimate / measured - 1) for estimate, measured in pairs) < 0.04


def test_attention_alone_runs_again_under_selective_recompute() -> None:
    """The paper: 1.3 ms more backward, and 3.9 % of FLOPs for 64 heads of 96 at 2048 tokens."""
    extra = point_22b(True, SELECTIVE).backward - point_22b(True, NONE).backward
    assert extra == pytest.approx(1.3e-3, rel=0.15)


def test_full_recompute_stops_before_the_last_matmul_and_the_residual_behind_it() -> None:
    """Sums of gradients at a residual addition are no reason to run it again (``set_checkpoint_early_stop``)."""
    shape = DecoderShape(name="g", layers=2, hidden=1024, heads=8, vocab=512, seq_len=512)
    graph = build_graph(shape, kernels=Kernels(flash_attention=True))
    machine, kind = machine_of(device_named("A100-80GB"), "bf16"), graph.kinds["block"]
    full, stopped = (layer_times(machine, kind, StateLayout(), 4, early_stop=stop).full for stop in (False, True))
    tail = kind.operators[-2:]
    assert [operator.name for operator in tail] == ["mlp.down", "mlp.residual"]
    skipped = sum(operator_seconds(machine, operator, 4).forward for operator in tail)
    assert stopped.device == pytest.approx(full.device - skipped)


def test_attention_in_a_ring_takes_longer_by_the_factor_of_the_stack() -> None:
    shape = DecoderShape(name="long", layers=2, hidden=4096, heads=32, vocab=512, seq_len=65536)
    graph = build_graph(shape, kernels=Kernels(flash_attention=True))
    stack = replace(match_stack("torchtitan"), constants=StackConstants(ring=1.5))

    def forward(context: int) -> float:
        wanted = [("block", 1, False, NONE, 1)]
        cluster = load_cluster("a100-80gb", 8)
        made = estimate_profile(
            graph, cluster, precision="bf16", name="long", stack=stack, wanted=wanted, context=context
        )
        return made.layers[0].forward

    (core,) = (one for one in graph.kinds["block"].operators if one.kind is OperatorClass.ATTENTION)
    alone = operator_seconds(machine_of(device_named("A100-80GB"), "bf16"), core, 1).forward
    assert forward(2) - forward(1) == pytest.approx(0.5 * alone)
    assert forward(8) == forward(2)


def test_torch_copies_gathered_tokens_and_asynchronous_tensor_parallelism_does_not() -> None:
    shape = DecoderShape(name="g", layers=2, hidden=1024, heads=8, vocab=512, seq_len=512)
    cluster, graph = load_cluster("a100-80gb", 8), build_graph(shape)
    stack = match_stack("torchtitan FSDP2 torch.compile")
    a, b = (
        estimate_profile(graph, cluster, precision="bf16", name="g", stack=one, wanted=[]).overhead.gathered_per_byte
        for one in (stack, replace(stack, copies_gathered=False))
    )
    machine = machine_of(device_named("A100-80GB"), "bf16", None, constants_for_stack(load_calibration(), "torchtitan"))
    assert (a, b) == (pytest.approx(2 / machine.bandwidth), 0)
