"""What each dimension makes of one device's work, by the formulas of their papers."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.base import DimensionContext, LayerWork, Moment
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes, buffer_bytes
from galvatron_lite.parallelism.registry import dimensions
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.search.space import strategies_for
from tests.factories import make_kind

KIND = make_kind("block", 1200, tensor_degrees=4, recompute=list(Recompute), whole=40)


def work(strategy: Strategy) -> LayerWork:
    context = DimensionContext(strategy.devices, 8, 4, 2, 4, 4, 1, {"zero": 0.5, "data": 0.25})
    items = float(KIND.parameters.total)
    start = LayerWork(32.0, 1, False, Recompute.NONE, items, items, items, items)
    return reduce(lambda known, dimension: dimension.apply(known, KIND, strategy, context), dimensions(), start)


def sent(done: LayerWork, moment: Moment) -> list[tuple[Collective, float, RankGroup, int]]:
    return [(c.collective, c.size, c.group, c.count) for c in done.communications if c.moment is moment]


def test_data_reduces_gradients_once_a_step() -> None:
    done = work(Strategy(data=4))
    assert done.samples == 8
    assert done.state_items == done.gradient_items == 1240
    assert done.communications[0].overlaps
    assert sent(done, Moment.STEP) == [(Collective.ALL_REDUCE, 1240 * 4, RankGroup(4, 1, 1), 1)]
    assert done.step_overhead == 0.25


def test_recompute_repeats_tensor_communication_but_no_gathers() -> None:
    done = work(Strategy(zero=2, zero_stage=3, tensor=2, recompute=Recompute.FULL))
    backward = [c[0] for c in sent(done, Moment.BACKWARD)]
    assert backward.count(Collective.ALL_REDUCE) == 2
    assert backward.count(Collective.ALL_GATHER) == 1


def test_strategies_take_all_devices_and_are_legal() -> None:
    for devices in (1, 2, 6, 12):
        options = strategies_for(KIND, devices)
        assert len(set(options)) == len(options)
        for option in options:
            assert option.devices == devices
            assert KIND.tensor_degrees % option.tensor == 0
            assert (option.state_shards == 1) == (option.zero_stage == 0)
            assert option.tensor > 1 or not option.sequence_parallel
    assert {option.zero for option in strategies_for(KIND, 6)} == {1, 2, 3, 6}


def test_tensor_is_not_offered_where_the_structure_forbids_it() -> None:
    alone = replace(make_kind("odd", 10), tensor_reason="heads do not divide")
    assert {option.tensor for option in strategies_for(alone, 4)} == {1}
    assert [dimension.reason(alone) for dimension in dimensions() if "heads" in dimension.reason(alone)]


def test_pipeline_figures() -> None:
    assert boundary_bytes(100, 8, Strategy(data=2, tensor=2)) == 400
    assert boundary_bytes(100, 8, Strategy(data=2, tensor=2, sequence_parallel=True)) == 200
    assert [Schedule.ONE_F_ONE_B.in_flight(4, stage, 3) for stage in range(4)] == [3, 3, 2, 1]
    assert Schedule.GPIPE.in_flight(4, 3, 7) == 7
    assert [buffer_bytes(3, 10, count) for count in (1, 2, 8)] == [20, 26, 26]


def test_divisors() -> None:
    assert all(divisors(n) == tuple(d for d in range(1, n + 1) if n % d == 0) for n in range(1, 200))
