"""Messages between processes: when they are awaited, in which order, and how they are packed and sent."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from galvatron_lite.errors import LaunchError
from galvatron_lite.parallelism.cyclic.mailbox import Lane, ProcessMailbox, due, lane_of, reach
from galvatron_lite.parallelism.cyclic.programme import CyclicMessage, CyclicProgramme, MessageContent
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from tests.pool import WorkerPool

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


CPU = torch.device("cpu")


def exchanged() -> dict[str, Any]:
    """Both ranks send before they receive, more than a socket buffers; kinds and directions do not mix."""
    mailbox, rank = (
        ProcessMailbox([MessageContent.PARTIAL, MessageContent.UPDATE, MessageContent.ACTIVATION], CPU, 30),
        dist.get_rank(),
    )
    many, other = torch.empty(1 << 16, dtype=torch.float64), 1 - rank
    sent = [
        CyclicMessage(kind, 0, step, 0, rank, other)
        for step in range(3)
        for kind in (MessageContent.PARTIAL, MessageContent.UPDATE)
    ]
    for place, message in enumerate(sent):
        mailbox.send(message, [torch.full_like(many, place + 10 * rank), torch.tensor(True)], due=message.step)
    expected = [
        CyclicMessage(kind, 0, step, 0, other, rank)
        for kind in (MessageContent.UPDATE, MessageContent.PARTIAL)
        for step in range(3)
    ]
    mailbox.expect(expected[0], [many, torch.tensor(False)])
    found = {}
    for message in expected:
        values, flag = mailbox.receive(message, [many, torch.tensor(False)])
        found[message.kind.value, message.step] = (float(values[-1]), bool(flag))
    if rank == 0:
        mailbox.tell(CyclicMessage(MessageContent.ACTIVATION, 0, 0, 0, 0, 1), {"told": 1})
    else:
        assert mailbox.hear(CyclicMessage(MessageContent.ACTIVATION, 0, 0, 0, 0, 1)) == {"told": 1}
    mailbox.clear(2)
    mailbox.finish()
    return found


def silent() -> str:
    """Rank 1 never sends, but lives."""
    mailbox = ProcessMailbox([MessageContent.GRADIENT], CPU, 1)
    if dist.get_rank() == 1:
        dist.barrier()
        return ""
    message = CyclicMessage(MessageContent.GRADIENT, 2, 7, 1, 1, 0)
    with pytest.raises(LaunchError) as raised:
        mailbox.receive(message, [torch.empty(2)])
    with pytest.raises(LaunchError, match="A process was lost before"):
        mailbox.send(CyclicMessage(MessageContent.GRADIENT, 2, 8, 1, 0, 1), [torch.empty(2)])
    dist.barrier()
    return str(raised.value)


def test_messages_arrive_by_kind_and_in_order(pool: WorkerPool) -> None:
    kinds = [MessageContent.PARTIAL.value, MessageContent.UPDATE.value]
    for rank, found in enumerate(pool.run(2, exchanged)):
        expected = {(kind, step): 2 * step + place for step in range(3) for place, kind in enumerate(kinds)}
        assert found == {key: (value + 10 * (1 - rank), True) for key, value in expected.items()}


def test_silence_is_an_error_that_says_what_was_awaited(pool: WorkerPool) -> None:
    told = pool.run(2, silent)[0]
    assert told.startswith(
        "Worker 1, stage 2, training step 7: waited in vain for gradients of activations from rank 1, which is gone or "
        "was silent for 1 s"
    )
    assert told.endswith("resume from the last checkpoint (load_latest).")
