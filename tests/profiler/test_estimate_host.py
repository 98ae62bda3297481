"""Layers against the host that launches their kernels, and what estimates are asked for."""

from __future__ import annotations

from dataclasses import replace
from math import hypot

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.calibration.schema import StackConstants
from galvatron_lite.cluster.catalog import device_named, load_cluster
from galvatron_lite.model.graph import LayerKind, OperatorClass, Recompute
from galvatron_lite.profiler.estimate import behind_host, estimate_profile, layer_times
from galvatron_lite.profiler.machine import BACKWARD_HOST, COLLECTIVE_LAUNCHES, Machine, machine_of
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
    together = behind_host(device, host)
    assert max(device, host) * (1 - 1e-12) <= together <= hypot(device, host) * (1 + 1e-12)


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


def test_a_large_layer_hides_its_host() -> None:
    slow, fast = point(stack(1e-6), samples=64), point(stack(1e-12), samples=64)
    assert slow.forward == pytest.approx(fast.forward, rel=1e-3)


def test_factors_of_a_stack_stretch_what_they_name() -> None:
    kind = block(4096, 32)
    device = device_named("A100-80GB")

    def seconds(own: StackConstants) -> float:
        machine = machine_of(device, "bf16", None, own)
        return layer_times(machine, kind, StateLayout(), 8).forward

    plain = seconds(StackConstants())
    doubled = {
        "matmul": StackConstants(matmul=2.0),
        "attention": StackConstants(attention=2.0),
        "memory": StackConstants(memory=2.0),
    }
    grown = {name: seconds(own) - plain for name, own in doubled.items()}
    assert sum(grown.values()) == pytest.approx(plain, rel=0.02)
    assert grown["matmul"] > grown["attention"] > 0 < grown["memory"]


def marked(kind: LayerKind) -> LayerKind:
    operators = [replace(item, precision="fp8" if item.kind is OperatorClass.MATMUL else "") for item in kind.operators]
    return replace(kind, operators=tuple(operators))


def test_only_marked_matmuls_run_in_8_bits() -> None:
    device, kind = device_named("H100"), block(8192, 64)
    wide, narrow = machine_of(device, "bf16"), machine_of(device, "fp8")

    def forward(machine: Machine, layer: LayerKind) -> float:
        return layer_times(machine, layer, StateLayout(), 4).forward

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
