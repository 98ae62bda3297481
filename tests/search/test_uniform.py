"""Interleaved and ZB-V plans: the search against every uniform plan, priced one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest

from galvatron_lite import api
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.stage import Shape
from galvatron_lite.cost.step import bound_seconds, groups_of, limit_memory, price_stages
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.backends import ANY
from galvatron_lite.parallelism.pipeline.schedule import group_of
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.best_first import finished, search
from galvatron_lite.search.problem import cuts_of
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import Fixed, Space
from tests.factories import random_profile
from tests.search.instances import Few, varied


def every_uniform(request: Request, profile: Profile, shape: Shape) -> Iterator[tuple[float, int]]:
    """Step seconds and peak bytes of every uniform plan of a shape."""
    for cuts in cuts_of(request.graph, shape.stages * shape.virtual):
        yield from every_uniform_between(request, profile, shape, cuts)


def every_uniform_between(
    request: Request, profile: Profile, shape: Shape, cuts: tuple[int, ...]
) -> Iterator[tuple[float, int]]:
    """The same with these boundaries."""
    pricer, graph = LayerPricer(profile), request.graph
    sizes = [b - a for a, b in pairwise(cuts)]
    last = len(graph.layers) - 1
    options = [
        [
            one
            for one in request.space.strategies(graph.layers[place].kind, shape.stage_devices, Fixed())
            if shape.microbatch % one.batch_degree == 0
        ]
        for place in range(last + 1)
    ]
    blocks = [one for one in options[1] if all(one in own for own in options[1:last])]
    chunks = shape.stages * shape.virtual
    groups = [group_of(shape.schedule, shape.stages, chunk) for chunk in range(chunks) for _ in range(sizes[chunk])]
    held = [[place for place in range(1, last) if groups[place] == group] for group in range(shape.stages)]
    parts = min(8, *map(len, held))
    # In which of the parts of its group's blocks each block is.
    part = {place: number * parts // len(own) for own in held for number, place in enumerate(own)}
    alike = len({layer.kind for layer in graph.layers[1:last]}) == 1
    pairs = [
        (a, b, count)
        for a, b in product(blocks, blocks)
        for count in (
            range(1, parts)
            if a != b and replace(a, recompute=Recompute.NONE) == replace(b, recompute=Recompute.NONE) and alike
            else (0,)
            if a == b
            else ()
        )
    ]
    for before, (block, other, count), after in product(options[0], pairs, options[last]):
        if graph.ties and before != after:
            continue
        own = [block if part[place] < count else other for place in range(1, last)]
        try:
            costs = price_stages(pricer, shape, sizes, [before, *own, after])
        except InputError:
            continue
        context = profile.cluster.device.context
        peaks = [limit_memory(shape, group, own, context).total for group, own in enumerate(groups_of(shape, costs))]
        yield bound_seconds(profile, shape, costs), max(peaks)


@pytest.mark.parametrize("schedule", [Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE_V])
@pytest.mark.parametrize("seed", [*range(8), 12, 14])
def test_equals_every_uniform_plan(seed: int, schedule: Schedule) -> None:
    draw = random.Random(seed)
    devices, blocks, pipeline = draw.choice([2, 4]), draw.randint(4, 6), 2
    if seed > 7:
        devices, blocks, pipeline = 4, 6 if schedule is Schedule.INTERLEAVED else 8, 4
    profile = random_profile(draw, devices=devices, blocks=blocks, alike=seed % 2 == 0, tied=seed % 3 == 0)
    profile = varied(profile, draw) if seed % 4 else profile
    space: Space = Few(profile.graph, profile.cluster.levels[0].size, ANY, seed=seed, most=8)
    fixed = Fixed(pipeline=pipeline)
    asked = Request(profile.graph, devices, 4, 10**9, fixed, (schedule,), space)
    plans = []
    for count in (1, 2, 4):
        if schedule is Schedule.INTERLEAVED and count % pipeline:
            continue
        for virtual in range(2, (blocks + 2) // pipeline + 1) if schedule is Schedule.INTERLEAVED else (2,):
            plans += every_uniform(asked, profile, Shape(devices, pipeline, count, 4 // count, schedule, virtual))
    peaks = sorted({peak for _, peak in plans})
    if not plans:
        assert search(asked, LayerPricer(profile)) is None
        return
    for budget in {peaks[0], draw.choice(peaks), peaks[-1]}:
        best = min(seconds for seconds, peak in plans if peak <= budget)
        request = Request(profile.graph, devices, 4, budget, fixed, (schedule,), space)
        pricer = LayerPricer(profile)
        found = search(request, pricer)
        assert found.gap == 0.0
        plan = finished(request, pricer, found)
        assert plan.virtual_stages == found.problem.shape.virtual > 1
        assert plan.prediction.peak_memory <= budget
        strategies = [one for stage in found.partition.stages for one in stage.strategies]
        sizes = [b - a for a, b in pairwise(found.partition.cuts)]
        costs = price_stages(pricer, found.problem.shape, sizes, strategies)
        assert bound_seconds(profile, found.problem.shape, costs) == pytest.approx(best, rel=1e-9)
    nothing = Request(profile.graph, devices, 4, peaks[0] - 1, fixed, (schedule,), space)
    assert search(nothing, LayerPricer(profile)) is None


def test_chunks_share_out_blocks_or_blocks_and_edges_evenly() -> None:
    graph = random_profile(random.Random(1), blocks=7).graph
    assert cuts_of(graph, 4) == [(0, 3, 5, 7, 9), (0, 2, 5, 7, 9)]
    assert cuts_of(graph, 7) == [(0, 2, 3, 4, 5, 6, 7, 9)]
    assert cuts_of(graph, 9) == [tuple(range(10))]


def test_a_group_that_holds_the_edges_of_a_model_alone() -> None:
    """Under ZB-V the first group has the first stage and the last, which may be an embedding and a head."""
    found = api.plan(model="gpt2", cluster="h100", gpus=4, batch=48, mem="80GB", fix={"schedule": "zb-v", "pp": 4})
    assert found.schedule is Schedule.ZERO_BUBBLE_V
