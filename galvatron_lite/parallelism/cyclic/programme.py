"""The passes and messages of every process under cyclic data parallelism, which runtime and cost both read.

Micro-batch n = N * step + worker. Passes run

- ``single``: on process 0.
- ``data``: on the process of the worker.
- ``stages``: stage s has N - s processes (a micro-batch occupies it for 2(N - s) time steps, and one begins every two);
  micro-batch n runs on the n-th of them, modulo their number.

Messages (the rule is that of arXiv 2403.08837, the routes are ours): at each backward pass the sum of a stage's
gradients goes to the next worker, and the last worker has the complete sum, the update. The update goes to the other
processes of the stage in the order in which their micro-batches first need it: each receives it from the one before,
when that runs its forward pass (the first receives it at once, unless the pass before is that of the last worker). So a
process sends one stage at a time, never needs a second version, and all apply the same gradient.
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
    """The content of a message.

    ``activation``: the output of a stage, for the next stage. ``gradient``: of the input of a stage, for the stage
    before. ``partial``: the sum of a stage's gradients of workers 0..worker. ``update``: the sum of all workers.
    """

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    PARTIAL = "partial"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class CyclicMessage:
    """A message from one process to another."""

    kind: MessageContent
    stage: int  # of the parameters; of an activation or its gradient, the stage whose pass makes it
    step: int  # training step of the pass that sends it; of an update, the step of its gradients
    worker: int  # of the pass that sends it
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class CyclicPass:
    """A pass with its messages."""

    moment: StagePass
    version: int  # of the stage's parameters; equal in forward and backward of a micro-batch
    receives: tuple[CyclicMessage, ...] = ()  # before it
    sends: tuple[CyclicMessage, ...] = ()  # after it
    # training steps whose updates the process applies to the stage before the pass (``data``, ``stages``)
    applies: tuple[int, ...] = ()
    finishes: bool = False  # whether it completes the stage's gradient of its training step


@dataclass(frozen=True, slots=True)
class CyclicProgramme:
    """Cyclic data parallelism of ``workers`` micro-batches over as many stages."""

    rule: CyclicRule
    setting: CyclicSetting
    workers: int  # N
    # first training step. All processes have the parameters of versions ``base`` and ``begin``
    begin: int = 0
    base: int = 0  # oldest version used: ``begin`` if no gradient is delayed yet, ``begin`` - 1 in a continued run
    early_release: bool = False  # whether backward passes of a time step precede forward passes (``single`` only)

    @property
    def processes(self) -> int:
        """Number of processes."""
        return device_count(self.setting, self.workers)

    def replicas(self, stage: int) -> int:
        """Return the number of processes that run a stage."""
        if self.setting is CyclicSetting.SINGLE:
            return 1
        return self.workers - stage if self.setting is CyclicSetting.STAGES else self.workers

    def process_of(self, stage: int, number: int) -> int:
        """Return the process that runs a stage of micro-batch ``number``."""
        if self.setting is not CyclicSetting.STAGES:
            return number % self.processes
        # stages before this one have N, N - 1, ... processes
        return stage * self.workers - stage * (stage - 1) // 2 + number % self.replicas(stage)

    def stages_of(self, process: int) -> tuple[int, ...]:
        """Return the stages that a process runs."""
        numbers = range(self.workers)
        return tuple(stage for stage in numbers if process in {self.process_of(stage, number) for number in numbers})

    def version(self, stage: int, number: int) -> int:
        """Return the version of a stage's parameters that a micro-batch uses."""
        step, worker = divmod(number, self.workers)
        return max(self.base, step if is_fresh(self.rule, worker, stage, self.workers) else step - 1)

    def passes(self, process: int, step: int) -> tuple[CyclicPass, ...]:
        """Return the passes that a process runs once it has the batch of a training step, in order.

        They end before the first pass that needs the next batch. Under ``single`` some passes of the previous batch are
        among them, and some of this batch follow with the next one; in other settings they are those of this batch.
        """
        return tuple(map(self._pass, self._between(process, step, step + 1)))

    def left(self, process: int, step: int) -> tuple[CyclicPass, ...]:
        """Return the passes of batches before training step ``step`` that follow after ``passes``, in order."""
        return tuple(self._pass(moment) for moment in self._between(process, step, None) if moment.step < step)

    def all_passes(self, steps: range) -> tuple[tuple[int, CyclicPass], ...]:
        """Return all passes of some training steps with their processes; those of a process are in its order."""
        numbers = range(self.workers)
        passes = [moment for triple in product(steps, numbers, numbers) for moment in moments(*triple, self.workers)]
        return tuple(
            (self.process_of(moment.stage, self._number(moment)), self._pass(moment))
            for moment in sorted(passes, key=self._key)
        )

    def settling(self, process: int, step: int) -> tuple[CyclicPass, ...]:
        """Return the remaining messages of updates of training steps before ``step``, in order (``data``, ``stages``).

        They belong to passes that are not run. After them every process has all updates; once it has applied these, all
        processes of a stage are equal.
        """

        def updates(messages: tuple[CyclicMessage, ...]) -> tuple[CyclicMessage, ...]:
            return tuple(
                message for message in messages if message.kind is MessageContent.UPDATE and message.step < step
            )

        steps = (step, step + 1)
        later = sorted((moment for later in steps for moment in self._moments_of(process, later)), key=self._key)
        actions = (
            replace(action, receives=updates(action.receives), sends=updates(action.sends))
            for action in map(self._pass, later)
        )
        return tuple(action for action in actions if action.receives or action.sends)

    def _between(self, process: int, step: int, end: int | None) -> list[StagePass]:
        """The passes of a process from the first of a training step to before the first of step ``end``."""
        steps = [started for started in (step - 1, step) if started >= self.begin]
        first = self._key(self._moments_of(process, step)[0])
        last = None if end is None else self._key(self._moments_of(process, end)[0])
        passes = sorted((moment for step in steps for moment in self._moments_of(process, step)), key=self._key)
        return [
            moment for moment in passes if self._key(moment) >= first and (last is None or self._key(moment) < last)
        ]

    def _moments_of(self, process: int, step: int) -> list[StagePass]:
        """The passes of a process in a training step, in order."""
        first, numbers = step * self.workers, range(self.workers)
        passes = (
            moment
            for worker, stage in product(numbers, numbers)
            if self.process_of(stage, first + worker) == process
            for moment in moments(step, worker, stage, self.workers)
        )
        return sorted(passes, key=self._key)

    def _key(self, moment: StagePass) -> tuple[int, bool, int]:
        return moment.time, moment.backward != self.early_release, moment.stage

    def _number(self, moment: StagePass) -> int:
        return moment.step * self.workers + moment.worker

    def _pass(self, moment: StagePass) -> CyclicPass:
        number, stage = self._number(moment), moment.stage
        receives, sends = (self._messages(moment, arriving) for arriving in (True, False))
        applies: tuple[int, ...] = ()
        previous = number - self.replicas(stage)  # the micro-batch of the process's previous forward pass
        if not (moment.backward or self.setting is CyclicSetting.SINGLE or previous < self.begin * self.workers):
            applies = tuple(range(self.version(stage, previous), self.version(stage, number)))
        finishes = moment.backward and moment.worker == self.workers - 1
        return CyclicPass(moment, self.version(stage, number), receives, sends, applies, finishes)

    def _messages(self, moment: StagePass, arriving: bool) -> tuple[CyclicMessage, ...]:
        """The messages that a pass receives (``arriving``) or sends."""
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
                # the pass that completes the sum sends it to the process that needs it first
                add(MessageContent.UPDATE, (stage, number), (stage, self._first_use(stage, step)))
        else:
            below = stage - arriving
            if 0 <= below < self.workers - 1:
                add(MessageContent.ACTIVATION, (below, number), (below + 1, number))
            messages += self._arriving_update(stage, number) if arriving else self._passed_update(stage, number)
        return tuple(message for message in messages if message.source != message.target)

    def _arriving_update(self, stage: int, number: int) -> list[CyclicMessage]:
        """The update that the process of a forward pass receives, from its predecessor in the round."""
        turn = self._turn(stage, number)
        if turn is None:
            return []
        step, position = turn
        process, last = self.process_of(stage, number), self._last_of(step)
        if process == self.process_of(stage, last):
            return []
        sender = last if position == 0 and not self._waits(stage, step) else number - 1
        source = self.process_of(stage, sender)
        return [CyclicMessage(MessageContent.UPDATE, stage, step, sender % self.workers, source, process)]

    def _passed_update(self, stage: int, number: int) -> list[CyclicMessage]:
        """The update that the process of a forward pass sends to its successor in the round."""
        turn = self._turn(stage, number + 1)
        if turn is None or (turn[1] == 0 and not self._waits(stage, turn[0])):
            return []
        return self._arriving_update(stage, number + 1)

    def _turn(self, stage: int, number: int) -> tuple[int, int] | None:
        """The training step of the update that a forward pass takes part in sending round, and its position in that."""
        for step in (number // self.workers - 2, number // self.workers - 1):
            position = number - self._first_use(stage, step)
            if step >= self.begin and 0 <= position < self.replicas(stage):
                return step, position
        return None

    def _waits(self, stage: int, step: int) -> bool:
        """Whether the process that completes an update also runs the pass before the first that may use it."""
        previous, last = self._first_use(stage, step) - 1, self._last_of(step)
        is_later_pass = previous > last and self.replicas(stage) > 1
        return is_later_pass and self.process_of(stage, previous) == self.process_of(stage, last)

    def _first_use(self, stage: int, step: int) -> int:
        """The first micro-batch that may use the parameters after the update of a training step."""
        if self.rule is CyclicRule.V1:
            return (step + 2) * self.workers
        return (step + 1) * self.workers + self.workers - 1 - stage

    def _last_of(self, step: int) -> int:
        """The last micro-batch of a training step."""
        return step * self.workers + self.workers - 1
