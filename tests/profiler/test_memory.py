"""The tracker against allocations whose sizes are known."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from galvatron_lite.profiler.memory import MemoryPhase, storage_bytes, track_peak


def test_temporary_inside_an_operator() -> None:
    """(a * b).sum() makes the product and the sum; the product is gone afterwards."""
    left, right = torch.ones(64, 64), torch.ones(64, 64)
    with track_peak() as tracked:
        total = (left * right).sum()
    assert tracked.peak == 64 * 64 * 4 + 4
    assert tracked.end == storage_bytes([total]) == 4


def test_marks_split_phases() -> None:
    with track_peak() as tracked:
        kept = torch.empty(100)
        tracked.mark()
        torch.empty(300)
        tracked.mark()
        del kept
    assert tracked.phases == (MemoryPhase(0, 400, 400), MemoryPhase(400, 1600, 400), MemoryPhase(400, 400, 0))


@pytest.mark.parametrize("between_steps", [True, False])
def test_what_no_tensor_of_python_holds_does_not_count_between_steps(between_steps: bool) -> None:
    """Here a result that autograd alone holds, in place of what a thread has released; a gradient nobody has read."""
    with track_peak() as tracked:
        weight = nn.Parameter(torch.ones(100))
        (weight * weight).sum().backward()
        total = weight.exp().sum()
        tracked.mark(between_steps=between_steps)
    assert tracked.phases[-1].start == 4 * (100 + 100 + 1 + (0 if between_steps else 100))
    del total


def test_backward_of_a_linear_layer() -> None:
    """Forward keeps nothing new (input and weight exist); backward makes one gradient of each, kept or freed."""
    layer = nn.Linear(32, 16, bias=False)
    layer.weight.grad = torch.zeros_like(layer.weight)
    inputs, given_grad = torch.ones(8, 32), torch.ones(8, 16)
    with track_peak() as tracked:
        output = layer(inputs)
        tracked.mark()
        output.backward(given_grad)
        del output
    forward, backward = tracked.phases
    assert forward.end == 8 * 16 * 4
    assert backward.peak == 8 * 16 * 4 + 16 * 32 * 4
    assert backward.end == 0


def test_released_older_tensors_do_not_count() -> None:
    old = torch.empty(1000)
    with track_peak() as tracked:
        del old
        new = torch.empty(10)
    assert tracked.end == storage_bytes([new])


def test_an_error_inside_passes_through() -> None:
    with pytest.raises(ValueError, match="inside"), track_peak():
        raise ValueError("inside")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4000), st.booleans()), min_size=1, max_size=12))
def test_any_sequence_of_allocations(steps: list[tuple[int, bool]]) -> None:
    """Peak and end equal a simulation of the same allocations and releases."""
    live, peak, held = 0, 0, list[torch.Tensor]()
    with track_peak() as tracked:
        for items, release in steps:
            held.append(torch.empty(items))
            live += 4 * items
            peak = max(peak, live)
            if release:
                live -= 4 * held.pop(0).numel()
    assert (tracked.peak, tracked.end) == (peak, live)


def test_storages_count_once() -> None:
    whole = torch.empty(10, 10)
    assert storage_bytes([whole, whole[2:], whole.t()]) == 400
