"""Estimates against published measurements."""

from __future__ import annotations

from statistics import median

import pytest

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cluster.collectives import collective_seconds
from galvatron_lite.model.graph import Operator, OperatorClass
from galvatron_lite.profiler.roofline import machine_of, operator_seconds

SEQUENCE, DEGREE = 2048, 8


def matmul(name: str, rows: int, inner: int, columns: int) -> Operator:
    flops, moved = 2 * rows * inner * columns, 2 * rows * (inner + columns)
    shape = (rows, inner, columns)
    return Operator(name, OperatorClass.MATMUL, shape, 1, flops, 2 * flops, moved, 2 * moved, 2 * inner * columns)


def batched(name: str, heads: int, rows: int, inner: int, columns: int) -> Operator:
    """A matmul of two activations a head, the heads folded into the rows."""
    flops, moved = 2 * heads * rows * inner * columns, 2 * heads * (rows * inner + inner * columns + rows * columns)
    return Operator(name, OperatorClass.MATMUL, (heads * rows, inner, columns), 1, flops, 2 * flops, moved, 2 * moved)


def memory(name: str, items: int, forward: int, backward: int, count: int = 1) -> Operator:
    """``forward`` and ``backward``: bytes moved for one item."""
    return Operator(name, OperatorClass.MEMORY, (items,), count, items, items, forward * items, backward * items)


def megatron_shard(hidden: int, heads: int, sequence_parallel: bool) -> list[Operator]:
    """One of 8 tensor-parallel shards of a GPT block of 2022: batched matmuls, one fused softmax, dropout."""
    local, tokens = heads // DEGREE, SEQUENCE // (DEGREE if sequence_parallel else 1)
    scores = local * SEQUENCE * SEQUENCE
    return [
        memory("layer norms", 2 * tokens * hidden, 4, 6, 2),
        matmul("qkv", SEQUENCE, hidden, 3 * hidden // DEGREE),
        batched("scores", local, SEQUENCE, hidden // heads, SEQUENCE),
        memory("softmax", scores, 4, 6),
        memory("attention dropout", scores, 5, 5),
        batched("context", local, SEQUENCE, SEQUENCE, hidden // heads),
        matmul("projection", SEQUENCE, hidden // DEGREE, hidden),
        matmul("up", SEQUENCE, hidden, 4 * hidden // DEGREE),
        memory("gelu", 4 * hidden // DEGREE * SEQUENCE, 4, 6),
        matmul("down", SEQUENCE, 4 * hidden // DEGREE, hidden),
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


def test_a_22b_block_takes_as_long_as_korthikanti_measured() -> None:
    """Table 4 of arXiv 2205.05198: A100-80GB, hidden 6144, 64 heads, micro-batch 4, tensor degree 8 (ms)."""
    forward, backward, again = megatron_block(6144, 64, 4, False)
    split_forward, split_backward, split_again = megatron_block(6144, 64, 4, True)
    pairs = [
        (forward, 7.7e-3),
        (backward, 11.9e-3),
        (forward + backward, 19.5e-3),
        (backward + again, 13.2e-3),
        (split_forward, 7.2e-3),
        (split_backward, 11.8e-3),
        (split_backward + split_again, 13.1e-3),
    ]
    errors = [abs(estimate / measured - 1) for estimate, measured in pairs]
    assert median(errors) < 0.10
    assert max(errors) < 0.15


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


def test_a_gpt3_block_reaches_the_share_of_peak_megatron_is_known_for() -> None:
    forward, backward, _ = megatron_block(12288, 96, 1, False)
    flops = 3 * (24 * SEQUENCE * 12288**2 + 4 * SEQUENCE**2 * 12288) / DEGREE
    assert 0.50 < flops / (forward + backward) / 312e12 < 0.62


def test_a_llama_7b_block_takes_as_long_as_hetu_galvatron_measured() -> None:
    """Its shipped ``computation_profiling_bf16_llama2-7b.json``: 3.937 ms forward a sample at micro-batch 8."""
    tokens, hidden, inner = 2048, 4096, 11008
    attention = Operator(
        "attention",
        OperatorClass.ATTENTION,
        (32, 32, tokens, tokens, 128),
        1,
        4 * tokens**2 * hidden,
        1,
        1,
        1,
        causal=True,
    )
    block = [
        memory("norms", 2 * tokens * hidden, 4, 6, 2),
        *(matmul(name, tokens, hidden, hidden) for name in ("q", "k", "v", "out")),
        memory("rotary", 2 * tokens * hidden, 4, 4, 2),
        attention,
        *(matmul(name, tokens, hidden, inner) for name in ("gate", "up")),
        memory("silu x up", tokens * inner, 6, 10),
        matmul("down", tokens, inner, hidden),
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
