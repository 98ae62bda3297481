"""Update time from bytes, by how a stack holds its states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galvatron_lite.calibration.schema import StackConstants
from galvatron_lite.cluster.catalog import device_named
from galvatron_lite.errors import InputError
from galvatron_lite.profiler.estimate import handling_bytes, optimizer_cost
from galvatron_lite.profiler.machine import machine_of
from galvatron_lite.stacks.schema import StateLayout

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
def test_what_passes_around_an_update(states: StateLayout, moved: int) -> None:
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


def test_unknown_optimizers_are_named() -> None:
    with pytest.raises(InputError, match="adamw-fused"):
        optimizer_cost([A100], "shampoo")
