"""Rooflines of single operators against closed forms and against what they must never break."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.cluster.catalog import device_named
from galvatron_lite.cluster.cluster import Device
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Operator, OperatorClass, Sharding
from galvatron_lite.profiler.machine import (
    ATTENTION_BLOCK,
    KERNEL_TAIL,
    RAMP_INNER,
)
from galvatron_lite.profiler.roofline import machine_of, matmul_seconds, operator_seconds

A100 = machine_of(device_named("A100-80GB"), "bf16")
DEVICES = ("A100-80GB", "V100", "T4", "RTX-3090", "RTX-Titan", "H100", "H200", "B200", "GB200")


def operator(kind: OperatorClass, shape: tuple[int, ...], flops: int, sharding: Sharding = Sharding.NONE) -> Operator:
    return Operator("op", kind, shape, 1, flops, 2 * flops, 10_000, 20_000, 0, sharding)


def matmul(rows: int, inner: int, columns: int, sharding: Sharding = Sharding.NONE) -> Operator:
    call = operator(OperatorClass.MATMUL, (rows, inner, columns), 2 * rows * inner * columns, sharding)
    return replace(call, weight_bytes=2 * inner * columns)


def test_a_matmul_of_whole_waves_by_hand() -> None:
    # 108 multiprocessors, 108 tiles of 256 x 128: one full wave.
    rows, inner, columns = 256 * 9, 8192, 128 * 12
    expected = 2 * rows * columns * (inner + RAMP_INNER) / (312e12 * A100.constants.matmul["bf16"])
    assert matmul_seconds(A100, rows, inner, columns) == pytest.approx(expected)


def test_one_tile_more_costs_a_whole_wave_at_most() -> None:
    full = matmul_seconds(A100, 256 * 9, 8192, 128 * 12)
    more = matmul_seconds(A100, 256 * 9 + 1, 8192, 128 * 12)
    assert full < more <= 2 * full


def test_a_thin_matmul_is_bound_by_its_weights() -> None:
    expected = KERNEL_TAIL + 2 * (16384 + 16384**2 + 16384) / A100.bandwidth
    assert matmul_seconds(A100, 1, 16384, 16384) == pytest.approx(expected)


def test_nothing_is_faster_than_a_launch() -> None:
    assert matmul_seconds(A100, 1, 1, 1) == A100.device.launch_overhead


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("extent", [256, 1000, 4096, 16384])
def test_no_operator_beats_its_data_sheet(name: str, extent: int) -> None:
    machine = machine_of(device_named(name), "fp16")
    seconds = matmul_seconds(machine, extent, extent, extent)
    assert 2 * extent**3 / seconds < machine.peak
    assert 3 * extent**2 * 2 / seconds < machine.device.memory_bandwidth


@pytest.mark.parametrize(("name", "low", "high"), [("A100-80GB", 240, 280), ("H100", 680, 760), ("V100", 90, 105)])
def test_large_matmuls_reach_what_cublas_is_known_for(name: str, low: float, high: float) -> None:
    machine = machine_of(device_named(name), "fp16")
    assert low < 2 * 8192**3 / matmul_seconds(machine, 8192, 8192, 8192) / 1e12 < high


@given(
    st.sampled_from(DEVICES),
    st.sampled_from(list(OperatorClass)),
    st.integers(1, 64),
    st.integers(1, 64),
    st.sampled_from([1, 2, 4, 8]),
)
def test_more_samples_never_take_less_time(
    name: str, kind: OperatorClass, samples: int, more: int, degree: int
) -> None:
    shapes = {
        OperatorClass.MATMUL: (512, 768, 3072),
        OperatorClass.ATTENTION: (12, 12, 512, 512, 64),
        OperatorClass.CONVOLUTION: (64, 128, 1, 56, 56, 3, 3, 2, 2),
        OperatorClass.MEMORY: (10_000,),
    }
    machine = machine_of(device_named(name), "fp16")
    call = operator(kind, shapes[kind], 10**9, Sharding.TENSOR)
    few = operator_seconds(machine, call, samples, degree)
    many = operator_seconds(machine, call, samples + more, degree)
    assert 0 < few.forward <= many.forward * (1 + 1e-12)
    assert 0 < few.backward <= many.backward * (1 + 1e-12)


@given(st.sampled_from([2, 4, 8]), st.integers(1, 16))
def test_a_shard_costs_less_than_the_whole_and_no_less_than_its_share(degree: int, samples: int) -> None:
    call = matmul(2048, 4096, 4096, Sharding.TENSOR)
    whole = operator_seconds(A100, call, samples).forward
    shard = operator_seconds(A100, call, samples, degree).forward
    flops_floor = call.flops * samples / degree / (A100.peak * A100.constants.matmul["bf16"])
    assert flops_floor < shard < whole


def test_sharding_decides_what_a_degree_divides() -> None:
    tokens = operator(OperatorClass.MEMORY, (10**9,), 0, Sharding.SEQUENCE)
    big = Operator("op", OperatorClass.MEMORY, (1,), 1, 0, 0, 10**9, 10**9, 0, tokens.sharding)
    whole = operator_seconds(A100, big, 1)
    assert operator_seconds(A100, big, 1, 4, False) == whole
    assert operator_seconds(A100, big, 1, 4, True).forward == pytest.approx(KERNEL_TAIL + 0.25e9 / A100.bandwidth)
    replicated = matmul(1024, 1024, 1024)
    assert operator_seconds(A100, replicated, 1, 8) == operator_seconds(A100, replicated, 1)


def test_backward_of_a_matmul_is_two_matmuls() -> None:
    seconds = operator_seconds(A100, matmul(2048, 4096, 8192), 4)
    by_hand = matmul_seconds(A100, 8192, 8192, 4096) + matmul_seconds(A100, 4096, 8192, 8192)
    assert seconds.backward == pytest.approx(by_hand)
    frozen = replace(matmul(64, 64, 64), backward_flops=0)
    assert operator_seconds(A100, frozen, 1).backward == 0.0


def test_heads_folded_into_the_rows_are_what_a_batched_matmul_divides() -> None:
    flops = 2 * 16 * 1024 * 64 * 1024
    heads = operator(OperatorClass.MATMUL, (16 * 1024, 64, 1024), flops, Sharding.TENSOR)
    assert operator_seconds(A100, heads, 8, 4) == operator_seconds(A100, heads, 2, 1)
    assert operator_seconds(A100, replace(heads, moved=10**9), 1).forward > 10**9 / A100.bandwidth


@pytest.mark.parametrize(("head", "low", "high"), [(128, 200, 225), (64, 165, 195)])
def test_fused_attention_reaches_its_published_rate(head: int, low: float, high: float) -> None:
    # FlashAttention-2 on A100, arXiv 2307.08691 figure 5: 16k keys, forward, no mask.
    heads, length = 2048 // head, 16384
    flops = 4 * heads * length * length * head
    call = operator(OperatorClass.ATTENTION, (heads, heads, length, length, head), flops)
    assert low < flops / operator_seconds(A100, call, 1).forward / 1e12 < high


def test_a_causal_mask_halves_attention_but_for_the_blocks_on_the_diagonal() -> None:
    keys = 8192
    call = operator(OperatorClass.ATTENTION, (32, 32, keys, keys, 128), 4 * 32 * keys**2 * 128)
    whole, masked = operator_seconds(A100, call, 1), operator_seconds(A100, replace(call, causal=True), 1)
    share = (1 + ATTENTION_BLOCK / keys) / 2
    for all_keys, seen in ((whole.forward, masked.forward), (whole.backward, masked.backward)):
        assert share < seen / all_keys < share * 1.03  # fewer keys a query run at a slightly lower rate


def test_precisions_a_device_lacks() -> None:
    volta = device_named("V100")
    assert machine_of(volta, "bf16").peak == volta.peak["fp32"]
    assert machine_of(device_named("H100"), "fp8").peak == pytest.approx(1978.9e12)
    with pytest.raises(InputError, match="fp32"):
        machine_of(volta, "int4")
    with pytest.raises(InputError, match="has peaks for bf16 only"):
        machine_of(Device("own", 1, 1.0, {"bf16": 1.0}), "fp32")


def test_scales_of_rows_have_slower_kernels_than_scales_of_tensors_and_faster_ones_than_bf16() -> None:
    """torchtitan, commit 7a04053: 7186, 6420 and 5760 tokens/s."""
    device = device_named("H100")
    tensors, rows, wide = (
        matmul_seconds(machine_of(device, precision), 8192, 8192, 8192) for precision in ("fp8", "fp8-rowwise", "bf16")
    )
    assert tensors < rows < wide


def test_a_slice_of_weights_is_cast_by_each_tensor_rank() -> None:
    cast = Operator("mlp.up.cast", OperatorClass.MEMORY, (1,), 1, 0, 0, 0, 0, 10**9, Sharding.SEQUENCE)
    whole, slice_ = (operator_seconds(A100, cast, 1, degree, True).forward for degree in (1, 8))
    assert (whole - KERNEL_TAIL) / (slice_ - KERNEL_TAIL) == pytest.approx(8)
