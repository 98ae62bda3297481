"""What a call of a branch costs the host, measured, and what the planner makes of it."""

from __future__ import annotations

import torch

from galvatron_lite.plans.schema import Schedule
from galvatron_lite.profiler.schema import HostOverhead
from galvatron_lite.profiler.timing import TimingRule
from galvatron_lite.runtime.branches.engine import branch_seconds
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.ways import seconds_of
from tests.branchy import plain_profile
from tests.pool import WorkerPool

ORDER = (Schedule.ONE_F_ONE_B,)
QUICK = TimingRule(warmup=1, least=3, most=5, seconds=0.05)


def measure() -> tuple[float, bool]:
    """The figure, and whether random numbers go on as if nothing had been measured."""
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    found = branch_seconds(torch.device("cpu"), QUICK)
    return found, torch.equal(before, torch.random.get_rng_state())


def test_a_small_pair_is_not_split_and_a_large_one_is(pool: WorkerPool) -> None:
    """Around one measured figure: layers of a fiftieth of a call, and of a thousand calls.

    Beside stages under 1F1B, which gain nothing on one sample; zero-bubble stages would.
    """
    ranks = pool.run(2, measure)
    assert ranks[0] == ranks[1]
    branch, unchanged = ranks[0]
    assert unchanged
    assert 0 < branch < 5
    for work, worth in ((branch / 50, False), (branch * 1000, True)):
        profile = plain_profile([work, work], overhead=HostOverhead(branch=branch))
        plan, alone = (
            find_plan(profile, devices=count, global_batch=1, budget=2**29, schedules=ORDER) for count in (2, 1)
        )
        assert bool(plan.branches) is worth
        assert not worth or seconds_of(plan) < seconds_of(alone)
