"""Interleaved and ZB-V plans: the search against every uniform plan, priced one by one."""

from __future__ import annotations

import random

import pytest

from galvatron_lite import api
from galvatron_lite.parallelism.backends import ANY
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.search.problem import cuts_of
from galvatron_lite.search.space import Fixed
from tests.factories import random_profile
from tests.search.brute import brute_of
from tests.search.instances import Few, Instance, varied
from tests.search.test_exact import check


@pytest.mark.parametrize("schedule", [Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE_V])
@pytest.mark.parametrize("seed", [*range(8), 12, 14])
def test_equals_every_uniform_plan(seed: int, schedule: Schedule) -> None:
    draw = random.Random(seed)
    devices, blocks, pipeline = draw.choice([2, 4]), draw.randint(4, 6), 2
    if seed > 7:
        devices, blocks, pipeline = 4, 6 if schedule is Schedule.INTERLEAVED else 8, 4
    profile = random_profile(draw, devices=devices, blocks=blocks, alike=seed % 2 == 0, tied=seed % 3 == 0)
    profile = varied(profile, draw) if seed % 4 else profile
    space = Few(profile.graph, profile.cluster.levels[0].size, ANY, seed=seed, most=6)
    asked = Instance(profile, devices, 4, (schedule,), Fixed(pipeline=pipeline), space)
    brute = brute_of(asked)
    peaks = brute.peaks()
    for budget in {peaks[0] - 1, peaks[0], draw.choice(peaks), peaks[-1]} if peaks else {10**9}:
        check(asked, brute, budget)


def test_chunks_share_out_blocks_or_blocks_and_edges_evenly() -> None:
    graph = random_profile(random.Random(1), blocks=7).graph
    assert cuts_of(graph, 4) == [(0, 3, 5, 7, 9), (0, 2, 5, 7, 9)]
    assert cuts_of(graph, 7) == [(0, 2, 3, 4, 5, 6, 7, 9)]
    assert cuts_of(graph, 9) == [tuple(range(10))]


def test_a_group_that_holds_the_edges_of_a_model_alone() -> None:
    """Under ZB-V the first group has the first stage and the last, which may be an embedding and a head."""
    found = api.plan(model="gpt2", cluster="h100", gpus=4, batch=48, mem="80GB", fix={"schedule": "zb-v", "pp": 4})
    assert found.schedule is Schedule.ZERO_BUBBLE_V
