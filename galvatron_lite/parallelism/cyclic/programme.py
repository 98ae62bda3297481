"""What every process does, and what it sends to whom: the table of passes that runtime and cost both read.

Micro-batch n = N * step + worker. The settings differ in where passes run:

- ``single``: on process 0.
- ``data``: on the process of the worker.
- ``stages``: stage s has N - s processes (a micro-batch occupies it for 2(N - s) time steps, and one begins every two);
  micro-batch n runs on the n-th of them, modulo their number.

Messages (arXiv 2403.08837 has the rule; the routes are ours): at each backward pass the sum of a stage's gradients goes
to the next worker; the last one has the complete sum, the update. The update then goes to the other processes of the
stage in the order in which their micro-batches first need it: each gets it from the one before, when that one runs its
forward pass (the first one, where the pass before is not the last worker's, at once). So a process sends one stage at a
time, never needs a second version, and all apply the same gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product

from galvatron_lite.parallelism.cyclic.rules import (
    CyclicRule,
    CyclicSetting,
    StagePass,
    device_count,
    is_fresh,
    moments,
)


class MessageContent(StrEnum):
    """What a message holds.

    ``activation``: what a stage made of a micro-batch, for the next stage. ``gradient``: of what a stage was given, for
    the stage before. ``partial``: the sum of a stage's gradients of workers 0..worker. ``update``: that of all workers.
    """

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    PARTIAL = "partial"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class CyclicMessage:
    """What one process sends to another."""

    kind: MessageContent
    stage: int  # of the parameters or gradients; of an activation or its gradient, the stage whose pass made it
    step: int  # training step of the pass at which it is sent; of an update, the step of its gradients
    worker: int  # of the pass at which it is sent
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class CyclicPass:
    """One forward or backward pass of a stage."""

    moment: StagePass
    version: int  # of the stage's parameters, which forward and backward of a micro-batch use
    receives: tuple[CyclicMessage, ...] = ()  # messages that must be there before it
    sends: tuple[CyclicMessage, ...] = ()  # messages sent once it is done
    # training steps whose updates the process applies to the stage before it (``data``, ``stages``)
    applies: tuple[int, ...] = ()
    finishes: bool = False  # whether it completes the stage's gradient of its training step


@dataclass(frozen=True, slots=True)
class CyclicProgramme:
    """Cyclic data parallelism of ``workers`` micro-batches over as many stages."""

    rule: CyclicRule
    setting: CyclicSetting
    workers: int  # N
    # first training step that is run. All processes know the parameters at versions ``base`` and ``begin``
    begin: int = 0
    base: int = 0  # oldest version used: ``begin`` where nothing is delayed yet, ``begin`` - 1 where a run is continued
    early_release: bool = False  # backward passes of a time step come before its forward passes (``single`` only)

    @property
    def processes(self) -> int:
        """How many processes run it."""
        return device_count(self.setting, self.workers)

    def replicas(self, stage: int) -> int:
        """How many processes run a stage."""
        if self.setting is CyclicSetting.SINGLE:
            return 1
        return self.workers - stage if self.setting is CyclicSetting.STAGES else self.workers

    def process_of(self, stage: int, number: int) -> int:
        """The process that runs a stage of micro-batch ``number``."""
        if self.setting is not CyclicSetting.STAGES:
            return number % self.processes
        # stages before this one have N, N - 1, ... processes
        return stage * self.workers - stage * (stage - 1) // 2 + number % self.replicas(stage)

    def stages_of(self, process: int) -> tuple[int, ...]:
        """The stages that a process runs."""
        numbers = range(self.workers)
        return tuple(stage for stage in numbers if process in {self.process_of(stage, number) for number in numbers})

    def version(self, stage: int, number: int) -> int:
        """The version of a stage's parameters that a micro-batch uses."""
        step, worker = divmod(number, self.workers)
        return max(self.base, step if is_fresh(self.rule, worker, stage, self.workers) else step - 1)

    def passes(self, process: int, step: int) -> tuple[CyclicPass, ...]:
        """What a process does when it is given the batch of a training step, in order.

        It ends before the first pass that needs the next batch. Under ``single`` passes of the batch before are among
        them, and some of this batch are left for the next call; elsewhere they are those of this batch.
        """
        return tuple(map(self._pass, self._between(process, step, step + 1)))

    def left(self, process: int, step: int) -> tuple[CyclicPass, ...]:
        """What is left to do, in order, after the batches before training step ``step``."""
        return tuple(self._pass(moment) for moment in self._between(process, step, None) if moment.step < step)

    def all_passes(self, steps: range) -> tuple[tuple[int, CyclicPass], ...]:
        """Every pass of some training steps, each with the process that runs it; a process's are in its order."""
        numbers = range(self.workers)
        every = [moment for place in product(steps, numbers, numbers) for moment in moments(*place, self.workers)]
        return tuple(
            (self.process_of(one.stage, self._number(one)), self._pass(one)) for one in sorted(every, key=self._key)
        )

    def settling(self, process: int, step: int) -> tuple[CyclicPass, ...]:
        """What is left of the rounds of updates of training steps before ``step``, in order (``data``, ``stages``).

        The passes hold messages alone: none is run. After them a process knows every update; it applies those that it
        has not yet, and all processes of a stage are alike.
        """

        def updates(messages: tuple[CyclicMessage, ...]) -> tuple[CyclicMessage, ...]:
            return tuple(
                message for message in messages if message.kind is MessageContent.UPDATE and message.step < step
            )

        later = sorted((moment for one in (step, step + 1) for moment in self._pairs_of(process, one)), key=self._key)
        kept = (
            replace(one, receives=updates(one.receives), sends=updates(one.sends)) for one in map(self._pass, later)
        )
        return tuple(one for one in kept if one.receives or one.sends)

    def _between(self, process: int, step: int, end: int | None) -> list[StagePass]:
        """Passes of a process from the first of one training step on, up to the first of another."""
        steps = [one for one in (step - 1, step) if one >= self.begin]
        first = self._key(self._pairs_of(process, step)[0])
        last = None if end is None else self._key(self._pairs_of(process, end)[0])
        every = sorted((moment for step in steps for moment in self._pairs_of(process, step)), key=self._key)
        return [one for one in every if self._key(one) >= first and (last is None or self._key(one) < last)]

    def _pairs_of(self, process: int, step: int) -> list[StagePass]:
        first, numbers = step * self.workers, range(self.workers)
        pairs = (one for one in product(numbers, numbers) if self.process_of(one[1], first + one[0]) == process)
        return sorted((moment for pair in pairs for moment in moments(step, *pair, self.workers)), key=self._key)

    def _key(self, moment: StagePass) -> tuple[int, bool, int]:
        return moment.time, moment.backward != self.early_release, moment.stage

    def _number(self, moment: StagePass) -> int:
        return moment.step * self.workers + moment.worker

    def _pass(self, moment: StagePass) -> CyclicPass:
        number, stage = self._number(moment), moment.stage
        receives, sends = (self._messages(moment, arriving) for arriving in (True, False))
        applies: tuple[int, ...] = ()
        before = number - self.replicas(stage)  # the micro-batch of the process's forward pass before
        if not (moment.backward or self.setting is CyclicSetting.SINGLE or before < self.begin * self.workers):
            applies = tuple(range(self.version(stage, before), self.version(stage, number)))
        finishes = moment.backward and moment.worker == self.workers - 1
        return CyclicPass(moment, self.version(stage, number), receives, sends, applies, finishes)

    def _messages(self, moment: StagePass, arriving: bool) -> tuple[CyclicMessage, ...]:
        number, stage, messages = self._number(moment), moment.stage, list[CyclicMessage]()

        def add(kind: MessageContent, sender: tuple[int, int], target: tuple[int, int]) -> None:
            step, worker = divmod(sender[1], self.workers)
            ends = self.process_of(*sender), self.process_of(*target)
            messages.append(CyclicMessage(kind, sender[0], step, worker, *ends))

        if moment.backward:
            above, first = stage + arriving, number - arriving
            if 0 < above < self.workers:
                add(MessageContent.GRADIENT, (above, number), (above - 1, number))
            if first % self.workers != self.workers - 1:
                add(MessageContent.PARTIAL, (stage, first), (stage, first + 1))
            step = number // self.workers
            if not arriving and number == self._last_of(step) and not self._waits(stage, step):
                # from the pass that completes the sum to the process that needs it first
                add(MessageContent.UPDATE, (stage, number), (stage, self._first_use(stage, step)))
        else:
            below = stage - arriving
            if 0 <= below < self.workers - 1:
                add(MessageContent.ACTIVATION, (below, number), (below + 1, number))
            messages += self._arriving_update(stage, number) if arriving else self._passed_update(stage, number)
        return tuple(message for message in messages if message.source != message.target)

    def _arriving_update(self, stage: int, number: int) -> list[CyclicMessage]:
        turn = self._turn(stage, number)
        if turn is None:
            return []
        step, place = turn
        here, last = self.process_of(stage, number), self._last_of(step)
        if here == self.process_of(stage, last):
            return []
        sender = last if place == 0 and not self._waits(stage, step) else number - 1
        source = self.process_of(stage, sender)
        return [CyclicMessage(MessageContent.UPDATE, stage, step, sender % self.workers, source, here)]

    def _passed_update(self, stage: int, number: int) -> list[CyclicMessage]:
        turn = self._turn(stage, number + 1)
        if turn is None or (turn[1] == 0 and not self._waits(stage, turn[0])):
            return []
        return self._arriving_update(stage, number + 1)

    def _turn(self, stage: int, number: int) -> tuple[int, int] | None:
        """The update whose round through a stage's processes a forward pass is part of, and its place in that round."""
        for step in (number // self.workers - 2, number // self.workers - 1):
            place = number - self._first_use(stage, step)
            if step >= self.begin and 0 <= place < self.replicas(stage):
                return step, place
        return None

    def _waits(self, stage: int, step: int) -> bool:
        """Whether the process that completed an update also runs the pass just before the first that may use it."""
        before, last = self._first_use(stage, step) - 1, self._last_of(step)
        again = before > last and self.replicas(stage) > 1
        return again and self.process_of(stage, before) == self.process_of(stage, last)

    def _first_use(self, stage: int, step: int) -> int:
        """The first micro-batch that may use what the update of a training step gave."""
        if self.rule is CyclicRule.V1:
            return (step + 2) * self.workers
        return (step + 1) * self.workers + self.workers - 1 - stage

    def _last_of(self, step: int) -> int:
        return step * self.workers + self.workers - 1
