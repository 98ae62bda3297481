"""Rooflines of single operators against closed forms and against what they must never break."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.calibration.schema import DeviceConstants, StackConstants
from galvatron_lite.cluster.catalog import device_named
from galvatron_lite.cluster.cluster import Device
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Operator, OperatorClass, Sharding
from galvatron_lite.profiler.machine import ATTENTION_BLOCK, KERNEL_TAIL, RAMP_INNER, machine_of
from galvatron_lite.profiler.roofline import (
    DEPTHWISE,
    DEPTHWISE_RATE,
    FIRST,
    INNER,
    LAST,
    RAMP,
    matmul_seconds,
    operator_seconds,
)

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


SHARE = 0.6
REACHED = DeviceConstants({"bf16": 0.8, "fp32": 0.9}, 0.7, 0.6, 0.8, {"bf16": SHARE, "fp32": 0.9, "tf32": SHARE})
DEVICE = device_named("A100-80GB")
TUNED_A100 = machine_of(DEVICE, "bf16", REACHED)


def convolution(
    inputs: int, outputs: int, extent: int, kernel: int = 1, groups: int = 1, *, last: bool = True, first: bool = False
) -> Operator:
    weight = inputs // groups * outputs * kernel * kernel
    flops = 2 * weight * extent * extent
    moved = 2 * (inputs + outputs) * extent * extent
    shape = (inputs, outputs, groups, extent, extent, kernel, kernel, 1, 1)
    back = flops if first else 2 * flops
    return Operator("conv", OperatorClass.CONVOLUTION, shape, 1, flops, back, moved, 2 * moved, 2 * weight,
                    channels_last=last)  # fmt: skip


def test_a_dense_convolution_in_full_tiles_by_hand() -> None:
    # 108 x 16 tiles of 128 pixels, 256 channels deep, 3 x 3, are 16 full waves.
    samples, call = 54, convolution(256, 128, 64, 3)
    expected = 2 * samples * 64 * 64 * 128 * (9 * 256 + RAMP) / (312e12 * SHARE)
    assert operator_seconds(TUNED_A100, call, samples).forward == pytest.approx(expected, rel=1e-9)


def test_three_input_channels_cost_a_whole_step() -> None:
    # 27 inner items are computed as 32, and the ramp weighs more than the work.
    call = convolution(3, 128, 128, 3)
    compute = 2 * 64 * 128 * 128 * 128 * (INNER + RAMP) / (312e12 * SHARE)
    moved = 64 * call.moved / TUNED_A100.bandwidth
    assert operator_seconds(TUNED_A100, call, 64).forward == pytest.approx(max(compute, moved), rel=0.02)


def test_channels_first_are_converted_on_the_way_in_and_out() -> None:
    last, first = convolution(64, 64, 56), convolution(64, 64, 56, last=False)
    extra = operator_seconds(TUNED_A100, first, 64).forward - operator_seconds(TUNED_A100, last, 64).forward
    assert extra == pytest.approx(FIRST.conversions * 64 * first.moved / TUNED_A100.bandwidth, rel=0.05)


def test_plain_fp32_needs_no_conversion_and_tf32_does() -> None:
    plain, tensor = machine_of(DEVICE, "fp32", REACHED), machine_of(DEVICE, "tf32", REACHED)
    first, last = convolution(64, 64, 56, last=False), convolution(64, 64, 56)
    assert operator_seconds(plain, first, 64) == operator_seconds(plain, last, 64)
    assert operator_seconds(tensor, first, 64).forward > 2 * 64 * first.moved / tensor.bandwidth


@pytest.mark.parametrize(
    ("precision", "kernel", "faster"), [("fp32", 3, 1.5), ("fp32", 1, 1.0), ("fp32", 5, 1.0), ("tf32", 3, 1.0)]
)
def test_winograd_serves_three_by_three_in_fp32(precision: str, kernel: int, faster: float) -> None:
    call = convolution(256, 256, 28, kernel, last=False)
    plain, wide = (machine_of(DEVICE, precision, REACHED, StackConstants(winograd=factor)) for factor in (1.0, 1.5))
    times = [operator_seconds(machine, call, 64).forward for machine in (plain, wide)]
    assert times[0] / times[1] == pytest.approx(faster, rel=1e-6)


@pytest.mark.parametrize(("precision", "slower"), [("fp32", 2.0), ("bf16", 1.0)])
def test_volumes_are_slower_in_32_bits(precision: str, slower: float) -> None:
    volume = replace(convolution(64, 64, 32, 3), shape=(64, 64, 1, 32, 32, 32, 3, 3, 3, 1, 1, 1))
    volume = replace(volume, flops=2 * 64 * 64 * 27 * 32**3)
    plain, half = (machine_of(DEVICE, precision, REACHED, StackConstants(volumes=share)) for share in (1.0, 0.5))
    times = [operator_seconds(machine, volume, 8).forward for machine in (half, plain)]
    assert times[0] / times[1] == pytest.approx(slower, rel=1e-6)


def test_the_first_layer_has_no_input_gradient() -> None:
    whole, first = convolution(64, 64, 56, 3), convolution(64, 64, 56, 3, first=True)
    assert (
        1.8 < operator_seconds(TUNED_A100, whole, 64).backward / operator_seconds(TUNED_A100, first, 64).backward < 2.5
    )


def test_a_frozen_convolution_has_no_backward() -> None:
    assert operator_seconds(TUNED_A100, replace(convolution(64, 64, 56, 3), backward_flops=0), 64).backward == 0


def test_a_depthwise_convolution_moves_memory_and_works_on_the_fp32_units() -> None:
    call = convolution(256, 256, 56, 3, 256)
    seconds, moved = operator_seconds(TUNED_A100, call, 64), 64 * call.moved / TUNED_A100.bandwidth
    work = 64 * call.flops / (19.5e12 * DEPTHWISE_RATE)
    assert seconds.forward == pytest.approx(DEPTHWISE[0] * moved + work, rel=0.03)
    assert seconds.backward == pytest.approx(DEPTHWISE[1] * moved + 2 * work, rel=0.03)


def test_groups_that_no_kernel_serves_channels_last() -> None:
    # Multiples of 32 groups have kernels of their own channels last, others none; channels first it does not matter.
    served, other = convolution(256, 256, 56, 3, 32), convolution(192, 192, 56, 3, 24)
    rates = [call.flops / operator_seconds(TUNED_A100, call, 64).forward for call in (served, other)]
    assert rates[0] > 2 * rates[1]
    assert rates[0] <= 312e12 * SHARE * LAST.grouped
    first = [operator_seconds(TUNED_A100, replace(call, channels_last=False), 64).forward for call in (served, other)]
    assert served.flops / first[0] == pytest.approx(other.flops / first[1], rel=0.05)


def test_outputs_spread_over_devices_share_the_work() -> None:
    call = replace(convolution(512, 512, 28, 3), sharding=Sharding.TENSOR)
    one, four = operator_seconds(TUNED_A100, call, 256, 1).forward, operator_seconds(TUNED_A100, call, 256, 4).forward
    assert 3.4 < one / four < 4.2


channels = st.integers(1, 64).map(lambda n: 8 * n)


@given(channels, channels, st.integers(4, 64), st.sampled_from([1, 3, 5, 7]), st.integers(1, 64), st.booleans())
def test_no_convolution_beats_its_data_sheet(
    inputs: int, outputs: int, extent: int, kernel: int, samples: int, last: bool
) -> None:
    call = convolution(inputs, outputs, extent, kernel, last=last)
    seconds = operator_seconds(TUNED_A100, call, samples)
    assert seconds.forward >= samples * call.flops / (312e12 * SHARE)
    assert seconds.forward >= samples * call.moved / DEVICE.memory_bandwidth
    assert seconds.backward >= samples * 2 * call.flops / (312e12 * SHARE)
