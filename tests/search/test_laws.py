"""What must hold of any search: more room, more schedules, more strategies never make a plan slower; it repeats."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.parallelism.backends import ANY, GALVATRON
from galvatron_lite.search.best_first import search
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import Space
from tests.search.instances import FREE, Instance, random_instance


def time_of(request: Request, asked: Instance) -> float:
    """Picoseconds of the best plan; infinite where there is none."""
    found = search(request, LayerPricer(asked.profile))
    assert found is None or found.gap == 0.0
    return float("inf") if found is None else found.partition.time


@pytest.mark.parametrize("seed", range(20))
def test_more_memory_is_never_slower(seed: int) -> None:
    asked, draw = random_instance(seed), random.Random(seed)
    budgets = sorted(draw.randint(8_000, 120_000) for _ in range(6))
    times = [time_of(asked.request(budget), asked) for budget in budgets]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("seed", range(20))
def test_more_schedules_are_never_slower(seed: int) -> None:
    asked = random_instance(seed)
    request = asked.request(60_000)
    each = [time_of(replace(request, schedules=(one,)), asked) for one in FREE]
    assert time_of(replace(request, schedules=FREE), asked) == min(each)


@pytest.mark.parametrize("seed", range(12))
def test_a_wider_space_is_never_slower(seed: int) -> None:
    asked = random_instance(seed)
    graph, node = asked.profile.graph, asked.profile.cluster.levels[0].size
    request = replace(asked.request(60_000), fixed=replace(asked.fixed, forbidden=()))
    narrow = time_of(replace(request, space=Space(graph, node, GALVATRON)), asked)
    wide = time_of(replace(request, space=Space(graph, node, ANY, offload=True, tokens=1)), asked)
    free = time_of(replace(request, space=Space(graph, node, ANY, offload=True, tokens=1), schedules=FREE), asked)
    assert free <= wide <= narrow


CODE = """
import json, random
from galvatron_lite.files import to_data
from galvatron_lite.search.planner import find_plan
from tests.search.instances import random_instance
for seed in range(6):
    asked = random_instance(seed)
    plan = find_plan(asked.profile, devices=asked.devices, global_batch=asked.batch, budget=10**6, backend="any")
    print(json.dumps(to_data(plan)))
"""


def test_the_same_question_has_the_same_answer_in_every_process() -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "4242")
    ]  # fmt: skip
    assert len(said[0].splitlines()) == 6
    assert said[0] == said[1]
