"""What blocking collectives cost beside their transfer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from galvatron_lite.parallelism.base import DimensionContext, LayerWork, Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.tensor.cost import TensorDimension
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.profiler.measure_overhead import BlockingCost, line_through, measure_waiting
from galvatron_lite.profiler.segments import SegmentCall
from tests.factories import make_kind

figures = st.floats(0, 1e-2)
sizes = st.integers(1, 2**30)


@given(figures, st.floats(0, 1e-8), st.tuples(sizes, sizes).filter(lambda pair: pair[0] != pair[1]))
def test_points_of_a_line_give_the_line(fixed: float, per_byte: float, places: tuple[int, int]) -> None:
    found = line_through([(size, fixed + per_byte * size) for size in places])
    assert found.per_byte == pytest.approx(per_byte, rel=1e-3, abs=1e-9)
    wanted = max(fixed + per_byte * size for size in places)
    assert found.fixed + found.per_byte * max(places) == pytest.approx(wanted, rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(sizes, st.floats(-1e-2, 1e-2)), min_size=2, max_size=2))
def test_noise_never_makes_it_negative(points: list[tuple[int, float]]) -> None:
    found = line_through(points)
    assert min(found.fixed, found.per_byte) >= 0


def test_one_process_never_waits() -> None:
    call = SegmentCall((torch.zeros(1, 2),), {}, None)
    assert measure_waiting(nn.Linear(2, 2), TensorPlan(), [call], torch.device("cpu")) == BlockingCost()


@pytest.mark.parametrize("shared", [False, True])
def test_the_cost_model_counts_every_blocking_collective(shared: bool) -> None:
    kind = replace(
        make_kind("block", 100), tensor_collectives=4, tensor_degrees=2, output_bytes=1000, sequence_parallel=True
    )
    strategy = Strategy(data=2, tensor=2, sequence_parallel=shared)
    host = {"tensor": 1e-3, "tensor_per_byte": 1e-6}
    context = DimensionContext(4, 4, 4, 4, 4, 4, 1, host=host)
    work = LayerWork(8.0, 1, False, Recompute.NONE, 1.0, 1.0, 1.0, 1.0)
    found = TensorDimension().apply(work, kind, strategy, context)
    collectives = 8 if shared else 4
    assert found.microbatch_overhead == pytest.approx(collectives * (1e-3 + 1e-6 * 4 * 1000))
