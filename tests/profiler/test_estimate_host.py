"""Estimates of host time, of the optimizer's update, and of matmuls under tensor and expert parallelism."""

from __future__ import annotations

from dataclasses import replace
from math import hypot

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.calibration.schema import StackConstants
from galvatron_lite.cluster.catalog import device_named, load_cluster
from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cluster.collectives import collective_seconds
from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass, Recompute, Sharding
from galvatron_lite.profiler.estimate import PassTime, estimate_profile, handling_bytes, layer_times, optimizer_cost
from galvatron_lite.profiler.machine import BACKWARD_HOST, COLLECTIVE_LAUNCHES, MISALIGNED, Machine, machine_of, stream
from galvatron_lite.profiler.roofline import matmul, matmul_at, operator_seconds
from galvatron_lite.profiler.schema import LayerPoint
from galvatron_lite.stacks.catalog import GALVATRON
from galvatron_lite.stacks.schema import Stack, StateLayout
from tests.processor_time import least, process_seconds
from tests.profiler.test_estimate import block, model


def stack(kernel_host: float) -> Stack:
    return replace(GALVATRON, name="test", constants=StackConstants(kernel_host=kernel_host, step_host=1e-3))


def point(own: Stack, samples: int = 1, tensor: int = 1, recompute: Recompute = Recompute.NONE) -> LayerPoint:
    wanted = [("block", tensor, False, recompute, samples)]
    cluster = load_cluster("a100-80gb", 8)
    made = estimate_profile(model(256, 4), cluster, precision="bf16", name="x", stack=own, wanted=wanted)
    (only,) = made.layers
    return only


@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0))
def test_device_and_host_run_side_by_side(device: float, host: float) -> None:
    seconds = PassTime(device, host).seconds
    assert max(device, host) * (1 - 1e-12) <= seconds <= hypot(device, host) * (1 + 1e-12)


def test_a_small_layer_takes_as_long_as_its_launches() -> None:
    # norm, 4 matmuls, attention, norm, activation: 8 kernels; backward 3 + 4 x 2 + 3 = 14.
    small = point(stack(1e-3))
    assert small.forward == pytest.approx(8e-3, rel=1e-3)
    assert small.backward == pytest.approx(14e-3 * BACKWARD_HOST, rel=1e-3)
    again = point(stack(1e-3), recompute=Recompute.FULL)
    # Backward needs all but the result of the last matmul.
    assert again.backward == pytest.approx(14e-3 * BACKWARD_HOST + 7e-3, rel=1e-3)
    whole = point(replace(stack(1e-3), early_stop=False), recompute=Recompute.FULL)
    assert whole.backward == pytest.approx(14e-3 * BACKWARD_HOST + 8e-3, rel=1e-3)


def test_collectives_of_a_tensor_group_are_launched_too() -> None:
    # 8 kernels and 2 all-reduces.
    for degree in (2, 4):
        assert point(stack(1e-3), tensor=degree).forward == pytest.approx(
            (8 + 2 * COLLECTIVE_LAUNCHES) * 1e-3, rel=1e-3
        )


def test_factors_of_a_stack_stretch_what_they_name() -> None:
    kind = block(4096, 32)
    device = device_named("A100-80GB")

    def seconds(own: StackConstants) -> float:
        machine = machine_of(device, "bf16", None, own)
        return layer_times(machine, kind, StateLayout(), 8).forward.seconds

    plain = seconds(StackConstants())
    grown = {name: seconds(StackConstants(**{name: 2.0})) - plain for name in ("matmul", "attention", "memory")}
    assert sum(grown.values()) == pytest.approx(plain, rel=0.02)
    assert grown["matmul"] > grown["attention"] > 0 < grown["memory"]


def marked(kind: LayerKind) -> LayerKind:
    operators = [replace(item, precision="fp8" if item.kind is OperatorClass.MATMUL else "") for item in kind.operators]
    return replace(kind, operators=tuple(operators))


def test_only_marked_matmuls_run_in_8_bits() -> None:
    device, kind = device_named("H100"), block(8192, 64)
    wide, narrow = machine_of(device, "bf16"), machine_of(device, "fp8")

    def forward(machine: Machine, layer: LayerKind) -> float:
        return layer_times(machine, layer, StateLayout(), 4).forward.seconds

    assert forward(narrow, kind) == forward(wide, kind)
    gain = forward(wide, kind) / forward(narrow, marked(kind))
    assert 1.3 < gain < 2.0


def test_bf16_activations_and_8_bit_names() -> None:
    graph, cluster = replace(model(), precision="fp8"), load_cluster("h100", 8)
    for precision in ("fp8", "mxfp8", "nvfp4"):
        made = estimate_profile(graph, cluster, precision=precision, name="x", samples=(1,))
        assert made.gather_precision == "bf16"


def test_only_what_is_wanted_is_estimated() -> None:
    graph, cluster = model(), load_cluster("a100-80gb", 8)
    full = estimate_profile(graph, cluster, precision="bf16", name="x")
    none = Recompute.NONE
    wanted = [("block", 2, True, Recompute.FULL, 4), ("block", 1, False, none, 1), ("absent", 1, False, none, 1)]
    some = estimate_profile(graph, cluster, precision="bf16", name="x", wanted=wanted)
    assert len(some.layers) == 2
    assert set(some.layers) <= set(full.layers)


def test_a_point_is_estimated_in_a_third_of_a_millisecond() -> None:
    graph, cluster = model(4096, 32), load_cluster("a100-80gb", 8)
    wanted = [("block", 8, True, Recompute.FULL, count) for count in range(1, 101)]

    def estimate() -> None:
        estimate_profile(graph, cluster, precision="bf16", name="x", wanted=wanted)

    limit = 3e-4 * len(wanted)
    assert least(lambda: process_seconds(estimate), limit) < limit


A100 = machine_of(device_named("A100-80GB"), "bf16")


@pytest.mark.parametrize(
    ("states", "moved"),
    [
        # fp32 throughout, in buckets: norm 4, clipping 8, zeroing 4.
        (StateLayout(), 16),
        # Gradients form anew in backward: nothing to zero.
        (StateLayout(buffered_gradients=False), 12),
        # Megatron with fp32 main gradients: bf16 parameters are written from the masters, 4 read and 2 written.
        (StateLayout(parameters="bf16", optimizer_bytes=12), 16 + 6),
        # fp16 gradients too: cast to the masters', 2 read and 4 written; their buffer of 2 is zeroed.
        (StateLayout(parameters="fp16", gradients="fp16", optimizer_bytes=12), 12 + 6 + 6 + 2),
        # Pure bf16: no masters, all gradients at 2 bytes.
        (StateLayout(parameters="bf16", gradients="bf16", buffered_gradients=False), 6),
    ],
)
def test_memory_passes_of_an_update(states: StateLayout, moved: int) -> None:
    assert handling_bytes(states) == moved
    cost = optimizer_cost([A100], "adam-fused", states)
    assert cost.seconds_per_item == pytest.approx((28 + moved) / A100.bandwidth)


def test_masters_are_held_beside_moments() -> None:
    assert optimizer_cost([A100], "adamw", StateLayout(parameters="bf16", optimizer_bytes=12)).state_bytes == 12
    assert optimizer_cost([A100], "adamw").state_bytes == 8
    assert optimizer_cost([A100], "sgd").state_bytes == 4


def test_an_update_makes_the_masters_gradients_from_narrow_ones() -> None:
    narrow = StateLayout(parameters="bf16", gradients="bf16", optimizer_bytes=12)
    assert optimizer_cost([A100], "adam-fused", narrow).working_bytes == 4
    assert optimizer_cost([A100], "adamw", narrow).working_bytes == 8
    assert optimizer_cost([A100], "adam-fused", replace(narrow, gradients="fp32")).working_bytes == 0


def test_the_slowest_device_and_the_stack_count() -> None:
    slow = machine_of(device_named("T4"), "fp16")
    assert optimizer_cost([A100, slow], "adamw") == optimizer_cost([slow], "adamw")
    plain = optimizer_cost([A100], "adamw").seconds_per_item
    stack = StackConstants(optimizer=1.5, kernel_host=1e-5)
    stretched = optimizer_cost([A100], "adamw-loop", StateLayout(), stack)
    assert stretched.seconds_per_item == pytest.approx(1.5 * plain)
    assert stretched.seconds_per_tensor == pytest.approx(8e-5)


def linear(name: str, rows: int, inner: int, columns: int, count: int = 1) -> Operator:
    flops, moved = 2 * rows * inner * columns * count, 2 * rows * (inner + columns) * count
    weights = 2 * inner * columns * count
    shape = (rows, inner, columns)
    return Operator(
        name, OperatorClass.MATMUL, shape, count, flops, 2 * flops, moved, 2 * moved, weights, Sharding.TENSOR
    )


def batched(name: str, heads: int, rows: int, inner: int, columns: int) -> Operator:
    """A matmul of two activations for each head, the heads folded into the rows."""
    flops, moved = 2 * heads * rows * inner * columns, 2 * heads * (rows * inner + inner * columns + rows * columns)
    shape = (heads * rows, inner, columns)
    return Operator(name, OperatorClass.MATMUL, shape, 1, flops, 2 * flops, moved, 2 * moved, 0, Sharding.TENSOR)


def test_names_tell_which_extent_is_split() -> None:
    by_columns = matmul(A100, linear("mlp.up", 2048, 4096, 16384), 1, 8).forward
    by_rows = matmul(A100, linear("mlp.down", 2048, 16384, 4096), 1, 8).forward
    assert by_columns == matmul_at(A100.linear, 2048, 4096, 2048)
    assert by_rows == matmul_at(A100.linear, 2048, 2048, 4096)
    unknown = matmul(A100, linear("module.weight", 2048, 4096, 4096), 1, 4).forward
    ways = matmul_at(A100.linear, 2048, 4096, 1024), matmul_at(A100.linear, 2048, 1024, 4096)
    assert unknown == pytest.approx(sum(ways) / 2)


@pytest.mark.parametrize(("columns", "factor"), [(50304, 1.0), (50308, MISALIGNED[8]), (50306, MISALIGNED[4]),
                                                 (50257, MISALIGNED[2])])  # fmt: skip
def test_rows_that_begin_between_16_bytes_are_slow(columns: int, factor: float) -> None:
    seconds = matmul(A100, linear("head", 2048, 1024, columns), 1, 1).forward
    assert seconds == pytest.approx(factor * matmul_at(A100.linear, 2048, 1024, columns))


@pytest.mark.parametrize(("degree", "factor"), [(2, 1.0), (4, MISALIGNED[8]), (8, MISALIGNED[4])])
def test_an_uneven_share_is_rounded_down(degree: int, factor: float) -> None:
    # 50257 entries on 2, 4, 8 ranks: 25128, 12564 and 6282, multiples of 8, 4 and 2.
    seconds = matmul(A100, linear("head", 2048, 1024, 50257), 1, degree).forward
    assert seconds == pytest.approx(factor * matmul_at(A100.linear, 2048, 1024, 50257 / degree))


@pytest.mark.parametrize(("columns", "factor"), [(50257, MISALIGNED[2]), (50304, 1.0)])
def test_all_wait_for_the_slower_of_uneven_shares(columns: int, factor: float) -> None:
    # 50257 entries on 2 ranks: 25129 on the first one, which is odd.
    machine = machine_of(A100.device, "bf16", uneven=True)
    seconds = matmul(machine, linear("head", 2048, 1024, columns), 1, 2).forward
    assert seconds == pytest.approx(factor * matmul_at(machine.linear, 2048, 1024, columns / 2))


def test_all_experts_share_the_waves_of_one_kernel() -> None:
    # 64 experts of a few tiles each: together near the device's rate, far faster than one after another.
    grouped = matmul(A100, linear("mlp.experts.up", 256, 4096, 512, 64), 1, 1).forward
    single = matmul_at(A100.linear, 256, 4096, 512)
    assert grouped == matmul_at(A100.linear, 256, 4096, 512, 64)
    floor = 64 * 2 * 256 * 4096 * 512 / (312e12 * A100.constants.matmul["bf16"])
    assert floor < grouped < 1.25 * floor
    assert grouped < 0.6 * 64 * single


@given(st.sampled_from([2, 4, 8]))
def test_spread_experts_see_more_rows_and_hold_fewer_weights(expert: int) -> None:
    call = linear("mlp.experts.up", 64, 2048, 1408, 64)
    spread = matmul(A100, call, 1, 1, expert).forward
    assert spread == matmul_at(A100.linear, 64 * expert, 2048, 1408, 64 / expert)
    assert spread <= matmul(A100, call, 1, 1).forward


def test_scores_of_plain_attention_are_bound_by_what_they_write() -> None:
    scores = batched("scores", 16, 2048, 64, 2048)
    seconds, written = matmul(A100, scores, 8, 2), stream(A100, 4 * scores.moved)
    assert written <= seconds.forward < 1.4 * written  # 64 inner items hardly fill the pipeline
    assert matmul(A100, replace(scores, backward_flops=0), 1, 1).backward == 0.0


def test_heads_that_begin_between_16_bytes_leave_tensor_cores() -> None:
    def scores(heads: int, size: int, tokens: int = 2048) -> float:
        return matmul(A100, batched("scores", heads, tokens, size, tokens), 1, 1).forward

    even, odd = (scores(heads, 13824 // heads) for heads in (96, 128))
    # 2 x 2048 x 2048 x 13824 operations at fp32's 19.5 TFLOP/s and more, for 108 inner items hardly fill a tile.
    shortest = 2 * 2048**2 * 13824 / 19.5e12
    assert shortest < odd < 3 * shortest
    assert odd > 3 * even
    assert scores(96, 64, 197) < even / 50  # 197 keys: a vision transformer's
    assert scores(128, 104) < odd / 3


def test_a_bias_adds_one_pass_over_its_gradient() -> None:
    plain = linear("mlp.up", 2048, 4096, 16384)
    bias = replace(plain, backward_moved=plain.backward_moved + 2 * 2048 * 16384)
    extra = matmul(A100, bias, 4, 1).backward - matmul(A100, plain, 4, 1).backward
    assert extra == pytest.approx(stream(A100, 4 * 2 * 2048 * 16384))


SEQUENCE, DEGREE = 2048, 8


def memory(name: str, items: int, forward: int, backward: int, count: int = 1) -> Operator:
    """``forward`` and ``backward``: bytes moved for one item."""
    return Operator(name, OperatorClass.MEMORY, (items,), count, items, items, forward * items, backward * items)


def megatron_shard(hidden: int, heads: int, sequence_parallel: bool) -> list[Operator]:
    """One of 8 tensor-parallel shards of a GPT block of 2022: batched matmuls, one fused softmax, dropout."""
    local, tokens = heads // DEGREE, SEQUENCE // (DEGREE if sequence_parallel else 1)
    scores = local * SEQUENCE * SEQUENCE
    return [
        memory("layer norms", 2 * tokens * hidden, 4, 6, 2),
        linear("qkv", SEQUENCE, hidden, 3 * hidden // DEGREE),
        batched("scores", local, SEQUENCE, hidden // heads, SEQUENCE),
        memory("softmax", scores, 4, 6),
        memory("attention dropout", scores, 5, 5),
        batched("context", local, SEQUENCE, SEQUENCE, hidden // heads),
        linear("projection", SEQUENCE, hidden // DEGREE, hidden),
        linear("up", SEQUENCE, hidden, 4 * hidden // DEGREE),
        memory("gelu", 4 * hidden // DEGREE * SEQUENCE, 4, 6),
        linear("down", SEQUENCE, 4 * hidden // DEGREE, hidden),
        memory("bias, dropout, add", 2 * tokens * hidden, 7, 5, 2),
    ]


def megatron_block(hidden: int, heads: int, samples: int, sequence_parallel: bool) -> tuple[float, float, float]:
    """Seconds of forward and of backward with communication, and of the attention core's forward."""
    cluster = load_cluster("a100-80gb", DEGREE)
    machine = machine_of(cluster.device, "fp16")
    shard = megatron_shard(hidden, heads, sequence_parallel)
    times = [operator_seconds(machine, operator, samples) for operator in shard]
    core = {"scores", "softmax", "attention dropout", "context"}
    again = sum(time.forward for time, operator in zip(times, shard, strict=True) if operator.name in core)
    size = samples * SEQUENCE * hidden * 2
    reduce = 2 * collective_seconds(cluster, Collective.ALL_REDUCE, size, RankGroup(DEGREE))
    return sum(time.forward for time in times) + reduce, sum(time.backward for time in times) + reduce, again


@pytest.mark.parametrize(
    ("hidden", "heads", "step", "stages", "chunks", "layers", "microbatches"),
    [(12288, 96, 13.75, 8, 3, 12, 64), (20480, 128, 37.83, 35, 3, 3, 280), (25600, 160, 71.49, 64, 1, 2, 512)],
)
def test_large_blocks_take_as_long_as_whole_steps_leave_them(
    hidden: int, heads: int, step: float, stages: int, chunks: int, layers: int, microbatches: int
) -> None:
    """Table 5 of arXiv 2205.05198: 175B, 530B and 1T with selective recompute, sequence parallelism, micro-batch 1.

    A step is microbatches + (stages - 1) / chunks turns of the last stage, which has ``layers`` blocks and the head
    (2hV of a block's 24h² FLOPs a token). What a step holds besides (optimizer, transfers) makes the estimate lower.
    """
    turns = microbatches + (stages - 1) / chunks
    measured = step / turns / (layers + 51200 / (12 * hidden))
    estimate = sum(megatron_block(hidden, heads, 1, True))
    assert 0.85 < estimate / measured < 1.05


def test_a_llama_7b_block_takes_as_long_as_hetu_galvatron_measured() -> None:
    """Its shipped ``computation_profiling_bf16_llama2-7b.json``: 3.937 ms forward a sample at micro-batch 8."""
    tokens, hidden, inner = 2048, 4096, 11008
    shape, flops = (32, 32, tokens, tokens, 128), 4 * tokens**2 * hidden
    attention = Operator("attention", OperatorClass.ATTENTION, shape, 1, flops, 1, 1, 1, causal=True)
    block = [
        memory("norms", 2 * tokens * hidden, 4, 6, 2),
        *(linear(name, tokens, hidden, hidden) for name in ("q", "k", "v", "out")),
        memory("rotary", 2 * tokens * hidden, 4, 4, 2),
        attention,
        *(linear(name, tokens, hidden, inner) for name in ("gate", "up")),
        memory("silu x up", tokens * inner, 6, 10),
        linear("down", tokens, inner, hidden),
        memory("residuals", 2 * tokens * hidden, 6, 2, 2),
    ]
    machine = machine_of(load_cluster("a100-80gb", 1).device, "bf16")
    seconds = sum(operator_seconds(machine, operator, 8).forward for operator in block) / 8
    assert seconds == pytest.approx(3.937e-3, rel=0.10)


@pytest.mark.parametrize(
    ("ranks", "mib", "milliseconds"), [(8, 256, 2.3584), (8, 1024, 8.1409), (4, 256, 2.0709), (4, 1024, 7.1874)]
)
def test_all_reduces_over_nvlink_take_as_long_as_measured(ranks: int, mib: int, milliseconds: float) -> None:
    """Hetu-Galvatron's ``sp_time_1nodes_8gpus_per_node.json``. Its bus bandwidth of up to 231 GB/s is DGX A100's."""
    cluster = load_cluster("a100-80gb", 8)
    seconds = collective_seconds(cluster, Collective.ALL_REDUCE, mib * 2**20, RankGroup(ranks))
    assert seconds == pytest.approx(milliseconds * 1e-3, rel=0.20)
