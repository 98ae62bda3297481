"""The peak formula against a replay of allocations, event by event."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from galvatron_lite.cost.layer import LayerCost
from galvatron_lite.cost.memory import stage_memory, terms, worst_moment


def make_cost(draw: random.Random, zero: int) -> LayerCost:
    """A layer under no ZeRO (0), ZeRO-2 or ZeRO-3."""
    whole = draw.randint(0, 500)
    shard = whole // 4 if zero else whole
    kept = draw.randint(0, 800)
    return LayerCost(
        1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
        parameters=shard, gradients=0 if zero else shard, formed_gradients=shard if zero else 0, states=2 * shard,
        kept=kept, gathered=whole if zero == 2 else 0, gather=whole if zero == 3 else 0,
        gathering=whole if zero else 0, whole_gradients=whole if zero else 0, reducing=whole if zero else 0,
        working=kept + draw.randint(0, 500), forward_working=kept, updating=draw.randint(0, 400),
        passing_gradients=draw.choice([0, whole]), copies=0 if zero else draw.choice([0, whole]),
        new_gradient=0 if zero else draw.choice([0, 3 * whole]),
        cast_gradient=0 if zero else draw.choice([0, 4 * whole]), bucket=0 if zero else draw.choice([0, whole]),
    )  # fmt: skip


def replay(costs: list[LayerCost], microbatches: int) -> int:
    """Peak bytes of a single stage, one micro-batch after the other, by keeping a ledger of what is alive."""
    peak, formed = 0, [0] * len(costs)
    rest = sum(cost.parameters + cost.gradients + cost.states + cost.copies for cost in costs)
    for number in range(microbatches):
        held = 0
        for cost in costs:
            own = cost.gathered + cost.gather + cost.gathering + cost.forward_working
            peak = max(peak, rest + sum(formed) + held + own)
            held += cost.kept + cost.gathered
        pending = passing = 0
        for place in reversed(range(len(costs))):
            cost = costs[place]
            held -= cost.kept + cost.gathered
            prefetched = costs[place - 1].gather if place else 0
            new = cost.cast_gradient if microbatches == 1 else cost.new_gradient if number else 0
            middle = cost.gathered + cost.gather + max(cost.working, cost.kept + new) + cost.whole_gradients
            formed[place] = cost.formed_gradients
            # autograd goes from the newest to the oldest: copies of the first micro-batch come last in all others
            passing += cost.passing_gradients + (cost.copies if number else 0)
            alive = rest + sum(formed) + passing + held + prefetched
            peak = max(peak, alive + middle + pending, alive + cost.whole_gradients + cost.reducing + cost.bucket)
            pending = cost.reducing + cost.bucket
    return max(peak, rest + sum(formed) + sum(cost.updating - cost.copies for cost in costs))


@pytest.mark.parametrize("seed", range(60))
def test_equals_a_replay_in_the_steady_state(seed: int) -> None:
    """From the second micro-batch on all gradients exist, which is what the formula counts."""
    draw = random.Random(seed)
    costs = [make_cost(draw, draw.choice([0, 2, 3])) for _ in range(draw.randint(1, 6))]
    expected, predicted = replay(costs, 3), stage_memory(costs, 1, 3, 0, 0).total
    # A layer's own passing gradients are counted in its forward too, as those that form are below.
    assert expected <= predicted <= expected + max(cost.passing_gradients + cost.copies for cost in costs)
    lasting = [replace(cost, passing_gradients=0, copies=0) for cost in costs]
    assert stage_memory(lasting, 1, 3, 0, 0).total == replay(lasting, 3)


@pytest.mark.parametrize("seed", range(60))
def test_is_close_above_a_replay_of_one_microbatch(seed: int) -> None:
    """The formula counts a layer's own forming gradients in its forward, nothing else too much."""
    draw = random.Random(seed)
    costs = [make_cost(draw, draw.choice([0, 2, 3])) for _ in range(draw.randint(1, 6))]
    predicted, expected = stage_memory(costs, 1, 1, 0, 0).total, replay(costs, 1)
    assert expected <= predicted <= expected + sum(cost.formed_gradients + cost.passing_gradients for cost in costs)


def replay_filled(costs: list[LayerCost], microbatches: int) -> int:
    """Peak bytes of the backward passes of a stage that has all micro-batches in memory when they begin: parameters
    that were gathered in forward last for the first of them, gradients of shards form in it."""
    peak, formed = 0, [0] * len(costs)
    rest = sum(cost.parameters + cost.gradients + cost.states + cost.copies for cost in costs)
    for left in reversed(range(microbatches)):
        held = left * sum(cost.kept for cost in costs) + sum(cost.kept for cost in costs)
        gathered, pending = [cost.gathered for cost in costs] if left == microbatches - 1 else [0] * len(costs), 0
        for place in reversed(range(len(costs))):
            cost = costs[place]
            held, gathered[place] = held - cost.kept, 0
            prefetched = costs[place - 1].gather if place else 0
            new = cost.new_gradient if left < microbatches - 1 else 0
            middle = cost.gathered + cost.gather + max(cost.working, cost.kept + new) + cost.whole_gradients
            formed[place] = cost.formed_gradients
            alive = rest + sum(formed) + held + sum(gathered) + prefetched
            peak = max(peak, alive + middle + pending, alive + cost.whole_gradients + cost.reducing + cost.bucket)
            pending = cost.reducing + cost.bucket
    return max(peak, rest + sum(formed) + sum(cost.updating - cost.copies for cost in costs))


@pytest.mark.parametrize("seed", range(60))
def test_is_close_above_a_replay_that_begins_with_all_micro_batches(seed: int) -> None:
    """Never less; not more than with all gradients there from the beginning; equal where gradients weigh less than what
    is let go of."""
    draw = random.Random(seed)
    costs = [make_cost(draw, draw.choice([0, 2, 3])) for _ in range(draw.randint(1, 6))]
    costs = [replace(cost, passing_gradients=0, copies=0) for cost in costs]
    predicted, expected = stage_memory(costs, 3, 3, 0, 0, filled=True).total, replay_filled(costs, 3)
    assert expected <= predicted <= stage_memory(costs, 3, 3, 0, 0).total
    costs = [replace(cost, new_gradient=0) for cost in costs]  # counted beside the first micro-batch's activations
    light = [replace(cost, formed_gradients=min(cost.formed_gradients, cost.kept + cost.gathered)) for cost in costs]
    assert stage_memory(light, 3, 3, 0, 0, filled=True).total == replay_filled(light, 3)


@pytest.mark.parametrize("seed", range(30))
def test_parts_add_up_and_are_not_negative(seed: int) -> None:
    draw = random.Random(seed)
    costs = [make_cost(draw, draw.choice([0, 2, 3])) for _ in range(5)]
    memory = stage_memory(costs, draw.randint(1, 3), 4, 70, 1000, filled=draw.random() < 0.5)
    parts = (memory.parameters, memory.gradients, memory.optimizer, memory.activations,
             memory.temporary, memory.communication, memory.context)  # fmt: skip
    assert min(parts) >= 0
    assert sum(parts) == memory.total


def test_more_microbatches_in_flight_keep_more() -> None:
    costs = [replace(make_cost(random.Random(1), 0), kept=100, working=150, updating=0) for _ in range(3)]
    one, two = (worst_moment([terms(cost, held, 4) for cost in costs]) for held in (1, 2))
    assert two.size - one.size == 300


def test_passing_gradients_are_gone_when_the_optimizer_runs() -> None:
    cost = replace(make_cost(random.Random(3), 0), passing_gradients=10_000, updating=50_000)
    rest = cost.parameters + cost.gradients + cost.states
    assert stage_memory([cost], 1, 1, 0, 0).total == rest + cost.updating
    assert stage_memory([replace(cost, updating=0)], 1, 1, 0, 0).gradients == cost.gradients + 10_000
