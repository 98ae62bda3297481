"""Where states lie and what moves them, against the closed forms of the papers and a grid of ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.model.graph import LayerKind, Recompute
from galvatron_lite.parallelism.base import Communication, DimensionContext, LayerWork, Moment
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes, buffer_bytes
from galvatron_lite.parallelism.ranks import expert_spread_of, group_along, spread_of
from galvatron_lite.parallelism.registry import dimensions
from galvatron_lite.parallelism.strategy import Strategies, Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.search.space import strategies_for
from tests.factories import make_kind

ITEMS = 1200
KIND = make_kind("block", ITEMS, tensor_degrees=4)


def work(strategy: Strategy, kind: LayerKind = KIND, samples: float = 64.0, item: int = 2) -> LayerWork:
    """One device's work where every item has the same size."""
    context = DimensionContext(strategy.devices, 8, item, item, item, item, 1)
    items = float(kind.parameters.total)
    start = LayerWork(samples, 1, False, Recompute.NONE, items, items, items, items)
    return reduce(lambda known, dimension: dimension.apply(known, kind, strategy, context), dimensions(), start)


def sent_items(communications: list[Communication], item: int = 2) -> float:
    """Items that one device sends, by the ring algorithms."""
    passes = {Collective.ALL_REDUCE: 2, Collective.ALL_GATHER: 1, Collective.REDUCE_SCATTER: 1}
    return sum(
        one.count * passes[one.collective] * (one.group.size - 1) / one.group.size * one.size / item
        for one in communications
    )


@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_volume_of_a_step_is_rajbhandaris(stage: int, volume: int) -> None:
    # arXiv:1910.02054, section 7: 2 psi with replicated states, 2 psi in stages 1 and 2, 3 psi in stage 3.
    strategy = Strategy(zero=8, zero_stage=stage) if stage else Strategy(data=8)
    assert sent_items(list(work(strategy).communications)) == pytest.approx(volume * ITEMS * 7 / 8)


@pytest.mark.parametrize(("stage", "bytes_an_item"), [(0, 16), (1, 4 + 12 / 64), (3, 16 / 64)])
def test_states_at_rest_are_rajbhandaris(stage: int, bytes_an_item: float) -> None:
    # Figure 1 there: 2 bytes of parameter and gradient each, 12 of optimizer states, 64 devices.
    done = work(Strategy(zero=64, zero_stage=stage) if stage else Strategy(data=64))
    held = 2 * done.parameter_items + 2 * done.gradient_items + 12 * done.state_items
    assert held / ITEMS == pytest.approx(bytes_an_item)


@pytest.mark.parametrize("strategy", [Strategy(zero=8, zero_stage=1), Strategy(zero=4, zero_stage=1, context=2)])
def test_masters_halve_the_gather(strategy: Strategy) -> None:
    items = float(ITEMS)
    start = LayerWork(64.0, 1, False, Recompute.NONE, items, items, items, items)
    context = DimensionContext(strategy.devices, 8, 2, 2, 4, 4, 1, masters=True)
    done = reduce(lambda known, dimension: dimension.apply(known, KIND, strategy, context), dimensions(), start)
    gathers = [one for one in done.communications if one.collective is Collective.ALL_GATHER]
    assert [(one.size, one.moment) for one in gathers] == [(2 * ITEMS, Moment.STEP)]
    assert (done.narrow_items, done.master_items) == (ITEMS, ITEMS / 8)


def test_stage_1_moves_once_a_step_and_keeps_gradients() -> None:
    done = work(Strategy(zero=4, zero_stage=1))
    assert {one.moment for one in done.communications} == {Moment.STEP}
    assert all(one.overlaps for one in done.communications)
    assert done.gradients_persist
    assert (done.gathered_items, done.transient_items, done.reduce_items) == (0, 0, 0)


def test_groups_of_shards_reduce_among_themselves() -> None:
    done = work(Strategy(data=2, zero=4, zero_stage=1))
    reduce_ = [one for one in done.communications if one.collective is Collective.ALL_REDUCE]
    assert [(one.size, one.group) for one in reduce_] == [(ITEMS / 4 * 2, RankGroup(2, 4, 4))]


def test_context_ranks_share_states_or_are_replicas() -> None:
    sharded = work(Strategy(data=1, zero=2, zero_stage=1, context=4, tensor=2))
    assert sharded.state_items == ITEMS / 2 / 8
    assert {one.group for one in sharded.communications if one.moment is Moment.STEP} == {RankGroup(8, 2, 2)}
    alone = work(Strategy(zero_stage=1, context=4, data=2))
    assert alone.state_items == ITEMS / 4
    plain = work(Strategy(data=2, context=4, tensor=2))
    assert [one.group for one in plain.communications if one.moment is Moment.STEP] == [RankGroup(8, 2, 2)]
    assert sharded.samples == plain.samples == 64 / 8


degrees = st.sampled_from([1, 2, 4])


ORDER = ("data", "zero", "context", "tensor")
"""Outermost first."""


@given(degrees, degrees, degrees, degrees, st.booleans())
def test_groups_are_those_of_the_grid(data: int, zero: int, context: int, tensor: int, sharded: bool) -> None:
    """Ranks that differ in zero and context only hold the shards of one copy; those that differ in data, copies."""
    strategy = Strategy(data, zero if sharded else 1, 1 if sharded else 0, tensor, context=context)
    spread = spread_of(strategy)
    assert members(spread.shards) == ranks(strategy, {"zero", "context"} if sharded else set())
    assert members(spread.replicas) == ranks(strategy, {"data"} if sharded else {"data", "context"})
    assert members(group_along(strategy, "tensor")) == ranks(strategy, {"tensor"})
    assert members(group_along(strategy, "context")) == ranks(strategy, {"context"})
    for group in (spread.shards, spread.replicas, *(group_along(strategy, name) for name in ("tensor", "context"))):
        assert group.siblings * group.size == strategy.devices
        assert members(group)[-1] == group.reach


def ranks(strategy: Strategy, free: set[str]) -> list[int]:
    """Ranks that differ from rank 0 in some dimensions only, by a grid of all ranks."""
    places = product(*(range(getattr(strategy, name)) for name in ORDER))
    return [
        rank
        for rank, place in enumerate(places)
        if all(at == 0 or name in free for name, at in zip(ORDER, place, strict=True))
    ]


def members(group: RankGroup) -> list[int]:
    """Ranks of the group that rank 0 is in."""
    return [place * group.stride for place in range(group.size)]


@given(st.lists(st.tuples(degrees, degrees, degrees, degrees), min_size=1))
def test_groups_of_many_are_those_of_each(chosen: list[tuple[int, int, int, int]]) -> None:
    made = [Strategy(d, z, 1, t, context=c, expert=2) for d, z, c, t in chosen]
    for groups in (
        lambda one: group_along(one, "tensor"), lambda one: group_along(one, "context"),
        lambda one: spread_of(one).shards, lambda one: spread_of(one).replicas,
    ):  # fmt: skip
        many = groups(Strategies.of(made))
        for place, strategy in enumerate(made):
            own = groups(strategy)
            for name in ("size", "stride", "siblings"):
                assert np.broadcast_to(getattr(many, name), len(made))[place] == getattr(own, name)


@given(degrees, degrees, degrees, degrees, st.sampled_from([1, 2, 4, 8]))
def test_every_device_holds_its_part_of_the_experts_once(
    data: int, zero: int, context: int, tensor: int, expert: int
) -> None:
    strategy = Strategy(data, zero, 1, tensor, context=context, expert=expert)
    if strategy.devices % (expert * tensor):
        return
    spread = expert_spread_of(strategy)
    assert spread.shards.size * spread.replicas.size * expert * tensor == strategy.devices
    assert (spread.replicas.size - 1) * spread.replicas.stride < strategy.devices


WHOLE = make_kind("block", 1200, tensor_degrees=4, recompute=list(Recompute), whole=40)


def measured(strategy: Strategy) -> LayerWork:
    context = DimensionContext(strategy.devices, 8, 4, 2, 4, 4, 1, {"zero": 0.5, "data": 0.25})
    items = float(WHOLE.parameters.total)
    start = LayerWork(32.0, 1, False, Recompute.NONE, items, items, items, items)
    return reduce(lambda known, dimension: dimension.apply(known, WHOLE, strategy, context), dimensions(), start)


def sent(done: LayerWork, moment: Moment) -> list[tuple[Collective, float, RankGroup, int]]:
    return [(c.collective, c.size, c.group, c.count) for c in done.communications if c.moment is moment]


def test_recompute_repeats_tensor_communication_but_no_gathers() -> None:
    done = measured(Strategy(zero=2, zero_stage=3, tensor=2, recompute=Recompute.FULL))
    backward = [c[0] for c in sent(done, Moment.BACKWARD)]
    assert backward.count(Collective.ALL_REDUCE) == 2
    assert backward.count(Collective.ALL_GATHER) == 1


def test_tensor_is_not_offered_where_the_structure_forbids_it() -> None:
    alone = replace(make_kind("odd", 10), tensor_reason="heads do not divide")
    assert {option.tensor for option in strategies_for(alone, 4)} == {1}
    assert [dimension.reason(alone) for dimension in dimensions() if "heads" in dimension.reason(alone)]


def test_pipeline_figures() -> None:
    assert boundary_bytes(100, 8, Strategy(data=2, tensor=2)) == 400
    assert boundary_bytes(100, 8, Strategy(data=2, tensor=2, sequence_parallel=True)) == 200
    assert [Schedule.ONE_F_ONE_B.in_flight(4, stage, 3) for stage in range(4)] == [3, 3, 2, 1]
    assert Schedule.GPIPE.in_flight(4, 3, 7) == 7
    assert [buffer_bytes(3, 10, count, Schedule.ONE_F_ONE_B) for count in (1, 2, 8)] == [20, 26, 26]
    assert [buffer_bytes(3, 10, count, Schedule.ZERO_BUBBLE_1P) for count in (1, 2, 8)] == [10, 26, 26]


def test_divisors_of_a_number() -> None:
    assert all(divisors(n) == tuple(d for d in range(1, n + 1) if n % d == 0) for n in range(1, 200))
