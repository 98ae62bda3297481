"""Convolutions by shape and layout against closed forms and what they must never break."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.calibration.schema import DeviceConstants, StackConstants
from galvatron_lite.cluster.catalog import device_named
from galvatron_lite.model.graph import Operator, OperatorClass, Sharding
from galvatron_lite.profiler.roofline import (
    DEPTHWISE,
    DEPTHWISE_RATE,
    FIRST,
    INNER,
    LAST,
    RAMP,
    machine_of,
    operator_seconds,
)

SHARE = 0.6
REACHED = DeviceConstants({"bf16": 0.8, "fp32": 0.9}, 0.7, 0.6, 0.8, {"bf16": SHARE, "fp32": 0.9, "tf32": SHARE})
DEVICE = device_named("A100-80GB")
A100 = machine_of(DEVICE, "bf16", REACHED)


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
    assert operator_seconds(A100, call, samples).forward == pytest.approx(expected, rel=1e-9)


def test_three_input_channels_cost_a_whole_step() -> None:
    # 27 inner items are computed as 32, and the ramp weighs more than the work.
    call = convolution(3, 128, 128, 3)
    compute = 2 * 64 * 128 * 128 * 128 * (INNER + RAMP) / (312e12 * SHARE)
    moved = 64 * call.moved / A100.bandwidth
    assert operator_seconds(A100, call, 64).forward == pytest.approx(max(compute, moved), rel=0.02)


def test_channels_first_are_converted_on_the_way_in_and_out() -> None:
    last, first = convolution(64, 64, 56), convolution(64, 64, 56, last=False)
    extra = operator_seconds(A100, first, 64).forward - operator_seconds(A100, last, 64).forward
    assert extra == pytest.approx(FIRST.conversions * 64 * first.moved / A100.bandwidth, rel=0.05)


def test_plain_fp32_needs_no_conversion_and_tf32_does() -> None:
    plain, tensor = machine_of(DEVICE, "fp32", REACHED), machine_of(DEVICE, "tf32", REACHED)
    first, last = convolution(64, 64, 56, last=False), convolution(64, 64, 56)
    assert operator_seconds(plain, first, 64) == operator_seconds(plain, last, 64)
    assert operator_seconds(tensor, first, 64).forward > 2 * 64 * first.moved / tensor.bandwidth


def test_tf32_channels_last_is_not_converted() -> None:
    tensor = machine_of(DEVICE, "tf32", REACHED)
    last, first = convolution(64, 64, 56), convolution(64, 64, 56, last=False)
    extra = operator_seconds(tensor, first, 64).forward - operator_seconds(tensor, last, 64).forward
    assert extra == pytest.approx(FIRST.conversions * 64 * first.moved / tensor.bandwidth, rel=0.05)


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
    assert 1.8 < operator_seconds(A100, whole, 64).backward / operator_seconds(A100, first, 64).backward < 2.5


def test_a_frozen_convolution_has_no_backward() -> None:
    assert operator_seconds(A100, replace(convolution(64, 64, 56, 3), backward_flops=0), 64).backward == 0


def test_a_depthwise_convolution_moves_memory_and_works_on_the_fp32_units() -> None:
    call = convolution(256, 256, 56, 3, 256)
    seconds, moved = operator_seconds(A100, call, 64), 64 * call.moved / A100.bandwidth
    work = 64 * call.flops / (19.5e12 * DEPTHWISE_RATE)
    assert seconds.forward == pytest.approx(DEPTHWISE[0] * moved + work, rel=0.03)
    assert seconds.backward == pytest.approx(DEPTHWISE[1] * moved + 2 * work, rel=0.03)


def test_a_wider_depthwise_kernel_costs_more_for_the_same_bytes() -> None:
    small, wide = (operator_seconds(A100, convolution(128, 128, 56, size, 128), 64) for size in (3, 7))
    assert small.forward < wide.forward < 49 / 9 * small.forward


def test_groups_that_no_kernel_serves_channels_last() -> None:
    # Multiples of 32 groups have kernels of their own channels last, others none; channels first it does not matter.
    served, other = convolution(256, 256, 56, 3, 32), convolution(192, 192, 56, 3, 24)
    rates = [call.flops / operator_seconds(A100, call, 64).forward for call in (served, other)]
    assert rates[0] > 2 * rates[1]
    assert rates[0] <= 312e12 * SHARE * LAST.grouped
    first = [operator_seconds(A100, replace(call, channels_last=False), 64).forward for call in (served, other)]
    assert served.flops / first[0] == pytest.approx(other.flops / first[1], rel=0.05)


def test_more_groups_of_the_same_width_cost_their_share() -> None:
    few, many = convolution(1024, 1024, 28, 3, 32), convolution(2048, 2048, 28, 3, 64)
    ratio = operator_seconds(A100, many, 64).forward / operator_seconds(A100, few, 64).forward
    assert ratio == pytest.approx(2, rel=0.02)


def test_outputs_spread_over_devices_share_the_work() -> None:
    call = replace(convolution(512, 512, 28, 3), sharding=Sharding.TENSOR)
    one, four = operator_seconds(A100, call, 256, 1).forward, operator_seconds(A100, call, 256, 4).forward
    assert 3.4 < one / four < 4.2


channels = st.integers(1, 64).map(lambda n: 8 * n)


@given(channels, channels, st.integers(4, 64), st.sampled_from([1, 3, 5, 7]), st.integers(1, 64), st.booleans())
def test_no_convolution_beats_its_data_sheet(
    inputs: int, outputs: int, extent: int, kernel: int, samples: int, last: bool
) -> None:
    call = convolution(inputs, outputs, extent, kernel, last=last)
    seconds = operator_seconds(A100, call, samples)
    assert seconds.forward >= samples * call.flops / (312e12 * SHARE)
    assert seconds.forward >= samples * call.moved / DEVICE.memory_bandwidth
    assert seconds.backward >= samples * 2 * call.flops / (312e12 * SHARE)


@given(channels, st.integers(4, 64), st.integers(1, 32))
def test_more_samples_never_cost_less(width: int, extent: int, samples: int) -> None:
    call = convolution(width, width, extent, 3)
    fewer, more = operator_seconds(A100, call, samples), operator_seconds(A100, call, 2 * samples)
    assert more.forward >= 0.99 * fewer.forward
