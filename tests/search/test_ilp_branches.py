"""The assignment of branches as an integer programme, against the dynamic programme, which knows nothing of it."""

from __future__ import annotations

import random

import pytest

from galvatron_lite.parallelism.branch.cost import Job, Option, exact
from galvatron_lite.search.programme.ilp_branches import assign_by_programme


def job(draw: random.Random, devices: int) -> Job:
    work = [draw.uniform(1, 10) for _ in range(2)]
    return {
        size: [
            Option(tuple(one * factor / size ** draw.uniform(0.2, 1.1) for one in work), draw.randint(0, 6), 3)
            for factor in (1.0, 1.4)[: draw.randint(1, 2)]
        ]
        for size in range(1, devices + 1)
        if size == 1 or draw.random() < 0.8
    }


@pytest.mark.parametrize("seed", range(8))
def test_both_programmes_agree(seed: int) -> None:
    draw = random.Random(seed)
    devices, branches = draw.choice([(2, 3), (3, 3), (4, 2), (3, 2)])
    jobs = [job(draw, devices) for _ in range(branches)]
    for room, least in ((draw.randint(6, 24), 1), (1000, 2)):
        wanted = exact(jobs, devices, room, 2, least)
        found = assign_by_programme(jobs, devices, room, 2, least)
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert found.proven
            assert found.seconds == pytest.approx(wanted.seconds, rel=1e-6)
            assert all(group.memory <= room for group in found.groups)
            assert len(found.groups) >= least
            used = [device for group in found.groups for device in range(group.first, group.first + group.devices)]
            assert len(used) == len(set(used))
