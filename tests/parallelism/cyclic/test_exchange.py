"""What the mailbox relies on: when messages are awaited, and in which order."""

from __future__ import annotations

from collections import defaultdict

import pytest

from galvatron_lite.parallelism.cyclic.exchange import due, reach
from galvatron_lite.parallelism.cyclic.mailbox import Lane, lane_of
from galvatron_lite.parallelism.cyclic.programme import CyclicMessage, CyclicProgramme, MessageContent
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting

STEPS = 4
SETTINGS = [CyclicSetting.DATA, CyclicSetting.STAGES]


@pytest.mark.parametrize("workers", [2, 3, 4, 6])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", CyclicRule)
def test_messages_are_awaited_soon_and_in_order(rule: CyclicRule, setting: CyclicSetting, workers: int) -> None:
    programme = CyclicProgramme(rule, setting, workers)
    sent, received = dict[CyclicMessage, int](), dict[CyclicMessage, int]()
    free, calls = dict[CyclicMessage, int](), dict[CyclicMessage, int]()
    taken_in = dict[CyclicMessage, int]()
    leaving, arriving = defaultdict[Lane, list[CyclicMessage]](list), defaultdict[Lane, list[CyclicMessage]](list)
    for process in range(programme.processes):
        for step in range(STEPS):
            for one in programme.passes(process, step):
                for message in one.sends:
                    sent[message] = one.moment.time
                    free[message] = due(message, one.moment.time, step, programme)
                    calls[message] = step
                    leaving[lane_of(message)].append(message)
                for message in one.receives:
                    received[message] = one.moment.time
                    taken_in[message] = step
                    arriving[lane_of(message)].append(message)
    for lane, messages in arriving.items():
        known = [message for message in messages if message in sent]  # not those that leave before the first pass
        assert leaving[lane][: len(known)] == known
    both = sent.keys() & received.keys()
    assert all(sent[one] < received[one] <= sent[one] + reach(one, programme) for one in both)
    assert MessageContent.PARTIAL in {one.kind for one in both}
    for one in both:
        assert free[one] >= received[one]
        # nobody waits for what another process does with a batch that it may not have been given yet
        if taken_in[one] > calls[one]:
            assert free[one] >= programme.passes(one.source, taken_in[one])[0].moment.time
