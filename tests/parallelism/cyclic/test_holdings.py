"""What processes hold, against closed forms (systems.md 2.3) and a count from the timeline alone."""

from __future__ import annotations

import pytest

from galvatron_lite.parallelism.cyclic.programme import MessageContent
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting, backward_time, forward_time
from galvatron_lite.parallelism.cyclic.simulation import Holding, beside, holdings

BOTH = pytest.mark.parametrize("rule", CyclicRule)
COUNTS = pytest.mark.parametrize("count", [1, 2, 3, 6])


def live(holding: Holding) -> int:
    """Stages of one micro-batch whose activations are there, the pass's own among them."""
    return sum(number for _, number in holding.live) + 1


@BOTH
@COUNTS
def test_activations(count: int, rule: CyclicRule) -> None:
    most = {setting: max(map(live, holdings(rule, setting, count))) for setting in CyclicSetting}
    assert most[CyclicSetting.SINGLE] == count * (count + 1) // 2  # (N + 1) / 2 of A in N stages; plain: N N
    assert most[CyclicSetting.DATA] == count  # A
    assert most[CyclicSetting.STAGES] == 1  # A / N


@BOTH
@COUNTS
def test_activations_by_the_timeline_alone(count: int, rule: CyclicRule) -> None:
    for holding in holdings(rule, CyclicSetting.SINGLE, count):
        moment = holding.does.moment
        there = []
        for step in (moment.step - 1, moment.step, moment.step + 1):
            for worker in range(count):
                for stage in range(count):
                    begin = (forward_time(step, worker, stage, count), False, stage)
                    end = (backward_time(step, worker, stage, count), True, stage)
                    now = (moment.time, moment.backward, moment.stage)
                    if begin < now < end and (step, worker, stage) != (moment.step, moment.worker, moment.stage):
                        there.append(stage)
        assert [stage for stage, number in holding.live for _ in range(number)] == sorted(there)


@BOTH
@COUNTS
def test_versions(count: int, rule: CyclicRule) -> None:
    found = {setting: holdings(rule, setting, count) for setting in CyclicSetting}
    for setting in (CyclicSetting.DATA, CyclicSetting.STAGES):
        assert all(number == 1 for holding in found[setting] for _, number in holding.versions)
    assert all(number <= 2 for holding in found[CyclicSetting.SINGLE] for _, number in holding.versions)
    last = [dict(holding.versions)[count - 1] for holding in found[CyclicSetting.SINGLE]]
    assert max(last) == (1 if rule is CyclicRule.V2 else 2)  # the last stage is always fresh under v2


@BOTH
@COUNTS
def test_gradients(count: int, rule: CyclicRule) -> None:
    data = holdings(rule, CyclicSetting.DATA, count)
    held = [max(sum(number for _, number in one.updates) for one in data if one.process == p) for p in range(count)]
    # Whoever completes a sum keeps it until it uses it: the whole gradient, under v1 that of two steps.
    assert held == [0] * (count - 1) + [count * (2 if rule is CyclicRule.V1 else 1)]
    single = holdings(rule, CyclicSetting.SINGLE, count)
    assert max(len(one.sums) for one in single) == count - 1


@BOTH
@pytest.mark.parametrize("count", [2, 3, 6])
def test_messages(count: int, rule: CyclicRule) -> None:
    for holding in holdings(rule, CyclicSetting.DATA, count):
        assert len(holding.does.receives) <= 1
        assert len(holding.does.sends) <= 1
        assert len(holding.waiting) <= 2
        assert len(holding.coming) <= 1
        assert all(message.kind is MessageContent.UPDATE for message in beside(holding.does))
    assert all(not one.waiting for one in holdings(rule, CyclicSetting.SINGLE, count))
