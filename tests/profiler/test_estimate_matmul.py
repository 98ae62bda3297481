"""Matmuls whose shapes are split, grouped, batched or badly aligned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.cluster.catalog import device_named
from galvatron_lite.model.graph import Operator, OperatorClass, Sharding
from galvatron_lite.profiler.machine import MISALIGNED, machine_of, stream
from galvatron_lite.profiler.roofline import matmul, matmul_at

A100 = machine_of(device_named("A100-80GB"), "bf16")


def linear(name: str, rows: int, inner: int, columns: int, count: int = 1) -> Operator:
    flops, moved = 2 * rows * inner * columns * count, 2 * rows * (inner + columns) * count
    weights = 2 * inner * columns * count
    shape = (rows, inner, columns)
    return Operator(
        name, OperatorClass.MATMUL, shape, count, flops, 2 * flops, moved, 2 * moved, weights, Sharding.TENSOR
    )


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


def test_experts_fill_waves_together() -> None:
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
    heads, tokens, size = 16, 2048, 64
    flops, moved = 2 * heads * tokens * size * tokens, 2 * heads * (2 * tokens * size + tokens * tokens)
    shape = (heads * tokens, size, tokens)
    scores = Operator("scores", OperatorClass.MATMUL, shape, 1, flops, 2 * flops, moved, 2 * moved, 0, Sharding.TENSOR)
    seconds = matmul(A100, scores, 8, 2)
    assert seconds.forward >= stream(A100, 4 * moved)
    assert seconds.forward < 1.4 * stream(A100, 4 * moved)  # 64 inner items hardly fill the pipeline
    assert matmul(A100, replace(scores, backward_flops=0), 1, 1).backward == 0.0


def attention_scores(heads: int, size: int, tokens: int = 2048) -> Operator:
    flops, moved = 2 * heads * tokens * size * tokens, 2 * heads * (2 * tokens * size + tokens * tokens)
    shape = (heads * tokens, size, tokens)
    return Operator("scores", OperatorClass.MATMUL, shape, 1, flops, 2 * flops, moved, 2 * moved, 0, Sharding.TENSOR)


def test_heads_that_begin_between_16_bytes_leave_tensor_cores() -> None:
    even, odd = (matmul(A100, attention_scores(heads, 13824 // heads), 1, 1).forward for heads in (96, 128))
    # 2 x 2048 x 2048 x 13824 operations at fp32's 19.5 TFLOP/s and more, for 108 inner items hardly fill a tile.
    least = 2 * 2048**2 * 13824 / 19.5e12
    assert least < odd < 3 * least
    assert odd > 3 * even
    assert matmul(A100, attention_scores(96, 64, 197), 1, 1).forward < even / 50  # 197 keys: a vision transformer's
    aligned = matmul(A100, attention_scores(128, 104), 1, 1).forward
    assert aligned < odd / 3


def test_a_bias_adds_one_pass_over_its_gradient() -> None:
    plain = linear("mlp.up", 2048, 4096, 16384)
    bias = replace(plain, backward_moved=plain.backward_moved + 2 * 2048 * 16384)
    extra = matmul(A100, bias, 4, 1).backward - matmul(A100, plain, 4, 1).backward
    assert extra == pytest.approx(stream(A100, 4 * 2 * 2048 * 16384))
