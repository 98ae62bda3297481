"""What processes hold and send: closed forms, a count from the timeline alone, and bytes that autograd keeps."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from galvatron_lite.errors import LaunchError
from galvatron_lite.parallelism.cyclic.mailbox import Lane, ProcessMailbox, due, lane_of, reach
from galvatron_lite.parallelism.cyclic.programme import CyclicMessage, CyclicProgramme, MessageContent
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting, backward_time, forward_time
from galvatron_lite.parallelism.cyclic.simulation import Holding, holdings, received_beside
from galvatron_lite.runtime.cyclic.setup import CyclicOptions, CyclicRuntime, set_up
from tests.parallelism.cyclic.fleet import CPU, SGD, MemoryMailbox, Post
from tests.parallelism.cyclic.models import Case, blocks_case, deep_case, make_batches, make_plan, split
from tests.pool import WorkerPool

BOTH = pytest.mark.parametrize("rule", CyclicRule)
COUNTS = pytest.mark.parametrize("count", [1, 2, 3, 6])


def live(holding: Holding) -> int:
    """Stages of one micro-batch whose activations are there, the pass's own among them."""
    return sum(number for _, number in holding.live) + 1


@BOTH
@COUNTS
def test_activations_held_are_those_of_the_formula(count: int, rule: CyclicRule) -> None:
    most = {setting: max(map(live, holdings(rule, setting, count))) for setting in CyclicSetting}
    assert most[CyclicSetting.SINGLE] == count * (count + 1) // 2  # (N + 1) / 2 of A in N stages; plain: N N
    assert most[CyclicSetting.DATA] == count  # A
    assert most[CyclicSetting.STAGES] == 1  # A / N


@BOTH
@COUNTS
def test_activations_by_the_timeline_alone(count: int, rule: CyclicRule) -> None:
    for holding in holdings(rule, CyclicSetting.SINGLE, count):
        moment = holding.action.moment
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
def test_versions_held_are_those_of_the_formula(count: int, rule: CyclicRule) -> None:
    found = {setting: holdings(rule, setting, count) for setting in CyclicSetting}
    for setting in (CyclicSetting.DATA, CyclicSetting.STAGES):
        assert all(number == 1 for holding in found[setting] for _, number in holding.versions)
    assert all(number <= 2 for holding in found[CyclicSetting.SINGLE] for _, number in holding.versions)
    last = [dict(holding.versions)[count - 1] for holding in found[CyclicSetting.SINGLE]]
    assert max(last) == (1 if rule is CyclicRule.V2 else 2)  # the last stage is always fresh under v2


@BOTH
@COUNTS
def test_gradients_held_are_those_of_the_formula(count: int, rule: CyclicRule) -> None:
    data = holdings(rule, CyclicSetting.DATA, count)
    held = [max(sum(number for _, number in one.updates) for one in data if one.process == p) for p in range(count)]
    # Whoever completes a sum keeps it until it uses it: the whole gradient, under v1 that of two steps.
    assert held == [0] * (count - 1) + [count * (2 if rule is CyclicRule.V1 else 1)]
    single = holdings(rule, CyclicSetting.SINGLE, count)
    assert max(len(one.sums) for one in single) == count - 1


@BOTH
@pytest.mark.parametrize("count", [2, 3, 6])
def test_messages_in_flight_are_bounded(count: int, rule: CyclicRule) -> None:
    for holding in holdings(rule, CyclicSetting.DATA, count):
        assert len(holding.action.receives) <= 1
        assert len(holding.action.sends) <= 1
        assert len(holding.unreceived) <= 2
        assert len(holding.next_receives) <= 1
        assert all(message.kind is MessageContent.UPDATE for message in received_beside(holding.action))
    assert all(not one.unreceived for one in holdings(rule, CyclicSetting.SINGLE, count))


ROWS, WIDTH, BATCHES = 50, 8, 3  # no size of a parameter is ROWS


class Kept:
    """A saved tensor; gone, it is taken off the ledger."""

    def __init__(self, tensor: Tensor, ledger: Ledger) -> None:
        self.tensor, self._ledger, self._place = tensor, ledger, tensor.data_ptr()

    def __del__(self) -> None:
        self._ledger.holders[self._place] -= 1


class Ledger:
    """Bytes of activations that autograd keeps, each tensor once."""

    def __init__(self, rows: int) -> None:
        self.holders: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}
        self.peak, self._rows = 0, rows

    def pack(self, tensor: Tensor) -> Any:
        if not tensor.dim() or tensor.shape[0] != self._rows:
            return tensor  # a parameter
        self.sizes[tensor.data_ptr()] = tensor.nbytes
        self.holders[tensor.data_ptr()] += 1
        self.peak = max(self.peak, self.bytes)
        return Kept(tensor, self)

    @property
    def bytes(self) -> int:
        return sum(self.sizes[place] for place, count in self.holders.items() if count > 0)

    def watch(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, lambda kept: kept.tensor if isinstance(kept, Kept) else kept)


def data_parallel_peak(model: nn.Module, microbatches: list[Any]) -> int:
    """Of all micro-batches at once."""
    ledger = Ledger(ROWS)
    with ledger.watch():
        losses = [model(**one) for one in microbatches]
        assert len(losses) == len(microbatches)
        return ledger.peak


def runtime_of(case: Case, rule: str, early_release: bool = False) -> CyclicRuntime:
    model, layers, stages = case
    plan = make_plan(stages, rule, "single", ROWS)
    options = CyclicOptions(CPU, early_release=early_release)
    runtime = set_up(copy.deepcopy(model), plan, layers, None, 0, MemoryMailbox(Post()), options)
    for states in runtime.executor.states.values():
        states.make_optimizer(SGD, None)
    return runtime


def cyclic_peak(case: Case, batches: list[Any], rule: str, early_release: bool = False) -> int:
    ledger, runtime = Ledger(ROWS), runtime_of(case, rule, early_release)
    executor = runtime.executor
    with ledger.watch():
        for step, batch in enumerate(batches):
            executor.feed(step, split(batch, len(case[2])))
            executor.run(executor.programme.passes(0, step))
        executor.drain(len(batches))
    assert ledger.bytes == 0
    return ledger.peak


@pytest.mark.parametrize(("count", "rule"), [(2, "cdp-v1"), (2, "cdp-v2"), (3, "cdp-v2"), (4, "cdp-v1"), (8, "cdp-v2")])
def test_activations_of_equal_stages(count: int, rule: str) -> None:
    """(N+1)/(2N) of data parallelism's; with early release (N*N/2 + 1) / (N*N) of them."""
    torch.manual_seed(0)
    case, batches = deep_case(count, WIDTH), make_batches(BATCHES, count, ROWS, WIDTH)
    whole = data_parallel_peak(case[0], split(batches[0], count))
    assert cyclic_peak(case, batches, rule) / whole == pytest.approx((count + 1) / (2 * count), rel=0.05)
    early = (count * count // 2 + 1) / (count * count)
    assert cyclic_peak(case, batches, rule, early_release=True) / whole <= early * 1.05


@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
def test_versions_are_released(rule: str) -> None:
    """Two at most, and one only of the last stage under v2, where nobody is late."""
    count = 4
    runtime, batches = runtime_of(blocks_case(count), rule), make_batches(4, count, ROWS)
    executor, held = runtime.executor, dict.fromkeys(range(count), 0)
    for step, batch in enumerate(batches):
        executor.feed(step, split(batch, count))
        for one in executor.programme.passes(0, step):
            executor.run([one])
            for stage, states in executor.states.items():
                graphs = {flight.version for place, flight in executor.desk.flights.items() if place[0] == stage}
                held[stage] = max(held[stage], len(graphs.union(states.versions)))
    assert held == {0: 2, 1: 2, 2: 2, 3: 1 if rule == "cdp-v2" else 2}


STEPS = 4
SENDING = [CyclicSetting.DATA, CyclicSetting.STAGES]


@pytest.mark.parametrize("workers", [2, 3, 4, 6])
@pytest.mark.parametrize("setting", SENDING)
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
        mailbox.send_object(CyclicMessage(MessageContent.ACTIVATION, 0, 0, 0, 0, 1), {"told": 1})
    else:
        assert mailbox.receive_object(CyclicMessage(MessageContent.ACTIVATION, 0, 0, 0, 0, 1)) == {"told": 1}
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
