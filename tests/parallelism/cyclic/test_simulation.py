"""The seconds of a training step: closed forms of equal stages, and every pass of many steps walked one by one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.parallelism.cyclic.programme import CyclicMessage, CyclicPass, CyclicProgramme
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.parallelism.cyclic.simulation import loop_of, round_seconds

COUNTS, RULES, SETTINGS = st.integers(1, 6), st.sampled_from(CyclicRule), st.sampled_from(CyclicSetting)
Seconds = Callable[[CyclicPass], float]
Sent = Callable[[CyclicMessage], float]


def looped(rule: CyclicRule, setting: CyclicSetting, count: int, seconds: Seconds, sent: Sent) -> float:
    loop = loop_of(rule, setting, count)
    return round_seconds(loop, [seconds(slot.does) for slot in loop.slots], [sent(one) for one in loop.messages])


def walked(rule: CyclicRule, setting: CyclicSetting, count: int, seconds: Seconds, sent: Sent, steps: int) -> float:
    """Growth of the last end over the second half of ``steps`` training steps, process by process."""
    programme = CyclicProgramme(rule, setting, count)
    clock, link, arrived = dict[int, float](), dict[int, float](), dict[CyclicMessage, float]()
    ends = []
    passes = [
        [(one.moment.time, one.moment.backward, process, one) for one in programme.passes(process, step)]
        for process in range(programme.processes)
        for step in range(steps)
    ]
    for time, backward, process, one in sorted((entry for own in passes for entry in own), key=lambda e: e[:3]):
        start = max([clock.get(process, 0.0), *(arrived[message] for message in one.receives)])
        clock[process] = start + seconds(one)
        for message in one.sends:
            link[process] = max(link.get(process, 0.0), clock[process]) + sent(message)
            arrived[message] = link[process]
        if (one.moment.worker, one.moment.stage, backward) == (count - 1, 0, True):
            ends.append(clock[process])
        assert time >= 0
    half = len(ends) // 2
    return (ends[-1] - ends[half - 1]) / (len(ends) - half)


@pytest.mark.parametrize("rule", CyclicRule)
@pytest.mark.parametrize("setting", CyclicSetting)
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_equal_stages_take_2n_time_steps(count: int, setting: CyclicSetting, rule: CyclicRule) -> None:
    # systems.md 2.2: a step is 2N time steps; on one device each holds N passes. Unequal passes wait for nobody either.
    alone = count if setting is CyclicSetting.SINGLE else 1
    for forward, backward in ((1.0, 1.0), (1.0, 2.0), (2.0, 1.0)):
        step = looped(rule, setting, count, lambda one, f=forward, b=backward: b if one.moment.backward else f,
                      lambda _: 0.0)  # type: ignore[misc]  # fmt: skip
        assert step == pytest.approx(alone * count * (forward + backward))


@pytest.mark.parametrize("rule", CyclicRule)
@pytest.mark.parametrize("count", [2, 3, 6])
def test_data_hides_short_messages(count: int, rule: CyclicRule) -> None:
    for taken in (0.1, 0.5, 0.75, 0.99):
        step = looped(rule, CyclicSetting.DATA, count, lambda _: 1.0, lambda _, d=taken: d)  # type: ignore[misc]
        # v2: the last worker's update of stage 2 goes to the worker before it for the very next time step, and that
        # one's gradient sum comes back: two messages where the timeline has one free time step. v1 waits for neither.
        shown = max(2 * taken - 1, 0.0) if rule is CyclicRule.V2 else 0.0
        assert step == pytest.approx(2.0 * count + shown)
    # One message a time step: the link of a process sets the pace once a message takes longer than a pass.
    slow = looped(rule, CyclicSetting.DATA, count, lambda _: 1.0, lambda _: 3.0)
    most = max(
        sum(len(slot.sends) for slot in loop_of(rule, CyclicSetting.DATA, count).slots if slot.process == process)
        for process in range(count)
    )
    assert most <= 2 * count
    assert slow >= 3.0 * most


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), RULES, SETTINGS, st.integers(0, 10**6))
def test_equals_a_walk_through_many_steps(count: int, rule: CyclicRule, setting: CyclicSetting, seed: int) -> None:
    draw = random.Random(seed)
    passes = [(draw.uniform(0.1, 1.0), draw.uniform(0.1, 2.0)) for _ in range(count)]
    links = [draw.choice([0.0, draw.uniform(0.0, 1.0)]) for _ in range(count)]

    def seconds(one: CyclicPass) -> float:
        return passes[one.moment.stage][one.moment.backward] + 0.01 * len(one.applies)

    def sent(message: CyclicMessage) -> float:
        return links[message.stage]

    found = looped(rule, setting, count, seconds, sent)
    assert found == pytest.approx(walked(rule, setting, count, seconds, sent, 80), rel=0.02)


@settings(max_examples=60, deadline=None)
@given(COUNTS, RULES, SETTINGS, st.integers(0, 10**6))
def test_laws(count: int, rule: CyclicRule, setting: CyclicSetting, seed: int) -> None:
    draw = random.Random(seed)
    passes = {(stage, side): draw.uniform(0.1, 1.0) for stage in range(count) for side in (False, True)}
    more = {key: value * draw.choice([1.0, 1.5]) for key, value in passes.items()}
    link = draw.uniform(0.0, 0.5)

    def step(own: dict[tuple[int, bool], float], wire: float) -> float:
        return looped(rule, setting, count, lambda one: own[one.moment.stage, one.moment.backward], lambda _: wire)

    least = step(passes, 0.0)
    room = 1 + 1e-6
    assert least <= step(more, 0.0) * room  # slower passes
    assert least <= step(passes, link) * room  # slower links
    busiest = sum(passes.values()) * (count if setting is CyclicSetting.SINGLE else 1)
    if setting is not CyclicSetting.STAGES:
        assert least >= busiest / room
        assert step({key: 2 * value for key, value in passes.items()}, 0.0) == pytest.approx(2 * least)
    # A clock that gives every time step as long as the longest pass is a way to do it.
    longest = max(passes.values()) * 2 * count * (count if setting is CyclicSetting.SINGLE else 1)
    assert least <= longest * room
