"""Runs a programme on symbols instead of tensors: every process in turn, as far as its messages have come."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from galvatron_lite.parallelism.cyclic.programme import CyclicMessage, CyclicPass, CyclicProgramme, MessageContent
from galvatron_lite.parallelism.cyclic.rules import CyclicSetting

Sum = tuple[int, frozenset[int]]
"""A gradient sum: its training step, and the workers in it."""


@dataclass
class Process:
    """What a process knows."""

    number: int
    mailbox: dict[tuple[int, MessageContent], deque[CyclicMessage]]
    held: dict[int, int] = field(default_factory=dict)
    """Version of each stage's parameters (data, stages)."""
    updates: set[tuple[int, int]] = field(default_factory=set)
    """Stage and training step of known updates."""
    sums: dict[int, Sum] = field(default_factory=dict)


class Run:
    """All processes of a programme over some training steps.

    Attributes:
        done: every pass with the process that ran it, in the order of time steps.
    """

    def __init__(self, programme: CyclicProgramme, steps: int) -> None:
        self.programme, self.steps = programme, steps
        self.mail: dict[int, dict[tuple[int, MessageContent], deque[CyclicMessage]]] = defaultdict(
            lambda: defaultdict(deque)
        )
        self.processes = [Process(number, self.mail[number]) for number in range(programme.processes)]
        self.done: list[tuple[int, CyclicPass]] = []
        self.sent: list[tuple[int, CyclicMessage]] = []
        self.waiting: dict[int, CyclicMessage] = {}
        self._start()
        self._finish({one.number: self._work(one) for one in self.processes})

    def settle(self) -> None:
        """Run what is left of the rounds of updates."""

        def work(process: Process) -> Iterator[None]:
            for one in self.programme.settling(process.number, self.steps):
                yield from self._receive(process, one)
                self._send(process, one)

        self._finish({one.number: work(one) for one in self.processes})

    def _start(self) -> None:
        programme = self.programme
        for process in self.processes:
            for stage in programme.stages_of(process.number):
                first = next(
                    number
                    for number in range(programme.begin * programme.workers, (programme.begin + 1) * programme.workers)
                    if programme.process_of(stage, number) == process.number
                )
                process.held[stage] = programme.version(stage, first)
                process.updates |= {(stage, step) for step in range(programme.base, programme.begin)}

    def _finish(self, works: dict[int, Iterator[None]]) -> None:
        idle = 0
        queue = deque(works)
        while queue and idle <= len(queue):
            number, before = queue.popleft(), len(self.done) + len(self.sent)
            if next(works[number], "ended") == "ended":
                idle = 0
                continue
            queue.append(number)
            idle = 0 if len(self.done) + len(self.sent) > before else idle + 1
        assert not queue, f"wait for ever: {[self.waiting[number] for number in queue]}"

    def _work(self, process: Process) -> Iterator[None]:
        programme = self.programme
        for step in range(programme.begin, programme.begin + self.steps):
            for one in programme.passes(process.number, step):
                yield from self._run(process, one)
        for one in programme.left(process.number, programme.begin + self.steps):
            yield from self._run(process, one)

    def _run(self, process: Process, one: CyclicPass) -> Iterator[None]:
        yield from self._receive(process, one)
        if self.programme.setting is not CyclicSetting.SINGLE:
            self._check_replica(process, one)
        if one.moment.backward:
            self._add(process, one)
        self.done.append((process.number, one))
        self._send(process, one)

    def _receive(self, process: Process, one: CyclicPass) -> Iterator[None]:
        for message in one.receives:
            assert message.target == process.number
            box = process.mailbox[message.source, message.kind]
            while not box:
                self.waiting[process.number] = message
                yield
            arrived = box.popleft()
            assert arrived == message, f"{arrived} came before {message}"
            self._take(process, message)

    def _take(self, process: Process, message: CyclicMessage) -> None:
        if message.kind is MessageContent.UPDATE:
            process.updates.add((message.stage, message.step))
        elif message.kind is MessageContent.PARTIAL:
            process.sums[message.stage] = (message.step, frozenset(range(message.worker + 1)))

    def _check_replica(self, process: Process, one: CyclicPass) -> None:
        stage = one.moment.stage
        for step in one.applies:
            assert (stage, step) in process.updates
            assert process.held[stage] == step
            process.held[stage] = step + 1
        assert process.held[stage] == one.version

    def _add(self, process: Process, one: CyclicPass) -> None:
        moment = one.moment
        step, workers = process.sums.pop(moment.stage, (moment.step, frozenset()))
        assert (step, workers) == (moment.step, frozenset(range(moment.worker)))
        if not one.finishes:
            process.sums[moment.stage] = (step, workers | {moment.worker})
            return
        process.updates.add((moment.stage, step))

    def _send(self, process: Process, one: CyclicPass) -> None:
        for message in one.sends:
            assert message.source == process.number
            if message.kind is MessageContent.UPDATE:
                assert (message.stage, message.step) in process.updates
            if message.kind is MessageContent.PARTIAL:
                process.sums.pop(message.stage)
            self._post(one.moment.time, message)

    def _post(self, time: int, message: CyclicMessage) -> None:
        self.sent.append((time, message))
        self.mail[message.target][message.source, message.kind].append(message)
