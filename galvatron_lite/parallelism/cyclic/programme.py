"""What every process does, and what it sends to whom: the table that runtime and cost both read. No torch here.

Workers, stages and training steps are counted from 0; micro-batch n = N * step + worker. Where passes run
(``CyclicSetting``) is all that differs between the settings:

- ``single``: on process 0.
- ``data``, ``zero``: on the process of the worker.
- ``stages``: stage s has N - s processes (a micro-batch occupies it for 2(N - s) time steps, and one begins every two);
  micro-batch n runs on the n-th of them, modulo their number. N(N+1)/2 processes in all.

What goes round (arXiv 2403.08837 has the rule; how it travels is ours):

- On the backward track the sum of a stage's gradients goes from worker to worker, one at each backward pass. The last
  worker has the whole sum.
- On the forward track that sum goes to the other processes of the stage, in the order in which their micro-batches
  first need what it gives: each gets it from the one before, when that one runs its forward pass (the first one, where
  the pass before is not the last worker's, at once). So a process sends one stage at a time, never needs a second
  version, and each applies the same gradient.
- Under ``zero`` the parameters themselves go along the forward track and are dropped behind it; parameters, gradient
  sum and optimizer states go along the backward track, whose last worker makes the update.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting, version
from galvatron_lite.parallelism.cyclic.timeline import Moment, moments


class Kind(StrEnum):
    """What a message holds.

    ``activation``: what a stage made of a micro-batch, for the next stage. ``gradient``: of what a stage was given, for
    the stage before. ``partial``: the sum of a stage's gradients of workers 0..worker. ``update``: that of all workers.
    ``weights``: versions of a stage's parameters. ``states``: the same, the gradient sum of workers 0..worker (none
    after the last one, who made the update) and the optimizer's states.
    """

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    PARTIAL = "partial"
    UPDATE = "update"
    WEIGHTS = "weights"
    STATES = "states"


@dataclass(frozen=True, slots=True)
class Message:
    """What one process sends to another.

    Attributes:
        kind: what it holds.
        stage: whose parameters or gradients; of an activation or its gradient, the stage whose pass made it.
        step: training step of the pass at which it is sent; of an update, the one whose gradients it holds.
        worker: of the pass at which it is sent.
        source: process that sends it.
        target: process that receives it.
        versions: of the parameters it holds.
    """

    kind: Kind
    stage: int
    step: int
    worker: int
    source: int
    target: int
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward or backward pass of a stage.

    Attributes:
        moment: which, and in which time step.
        version: of the stage's parameters, which forward and backward of a micro-batch use.
        receives: messages that must be there before it.
        sends: messages sent once it is done.
        applies: training steps whose updates the process applies to the stage before it (``data``, ``stages``).
        finishes: whether it completes the stage's gradient of its training step.
    """

    moment: Moment
    version: int
    receives: tuple[Message, ...] = ()
    sends: tuple[Message, ...] = ()
    applies: tuple[int, ...] = ()
    finishes: bool = False


@dataclass(frozen=True, slots=True)
class Programme:
    """Cyclic data parallelism of ``workers`` micro-batches over as many stages.

    Attributes:
        rule: which parameters a micro-batch uses.
        setting: where its passes run.
        workers: N.
        begin: first training step that is run. All processes know the parameters at versions ``base`` and ``begin``.
        base: oldest version used: ``begin`` where nothing is delayed yet, ``begin`` - 1 where a run is continued.
        early_release: backward passes of a time step come before its forward passes (``single`` only).
    """

    rule: CyclicRule
    setting: CyclicSetting
    workers: int
    begin: int = 0
    base: int = 0
    early_release: bool = False

    @property
    def processes(self) -> int:
        """How many processes run it."""
        if self.setting is CyclicSetting.SINGLE:
            return 1
        return self.workers * (self.workers + 1) // 2 if self.setting is CyclicSetting.STAGES else self.workers

    def replicas(self, stage: int) -> int:
        """How many processes run a stage."""
        if self.setting is CyclicSetting.SINGLE:
            return 1
        return self.workers - stage if self.setting is CyclicSetting.STAGES else self.workers

    def process_of(self, stage: int, number: int) -> int:
        """The process that runs a stage of micro-batch ``number``."""
        before = sum(self.replicas(one) for one in range(stage)) if self.setting is CyclicSetting.STAGES else 0
        return before + number % self.replicas(stage)

    def home(self, stage: int) -> int:
        """Under ``zero``: the process that keeps a stage's states while nothing runs."""
        return stage if self.setting is CyclicSetting.ZERO else self.process_of(stage, 0)

    def stages_of(self, process: int) -> tuple[int, ...]:
        """The stages that a process runs."""
        numbers = range(self.workers)
        return tuple(
            stage for stage in numbers if process in {self.process_of(stage, number) for number in range(self.workers)}
        )

    def version(self, stage: int, number: int) -> int:
        """The version of a stage's parameters that a micro-batch uses."""
        return version(self.rule, number % self.workers, stage, self.workers, number // self.workers, self.base)

    def passes(self, process: int, step: int) -> tuple[Pass, ...]:
        """What a process does when it is given the batch of a training step, in order.

        It ends before the first pass that needs the next batch. Under ``single`` passes of the batch before are among
        them, and some of this batch are left for the next call; elsewhere they are those of this batch.
        """
        own = self._between(process, step, step + 1)
        return tuple(self._pass(moment) for moment in own)

    def all_passes(self, steps: range) -> tuple[tuple[int, Pass], ...]:
        """Every pass of some training steps, each with the process that runs it; a process's own are in its order."""
        every = sorted((moment for step in steps for moment in self._of_step(step)), key=self._key)
        return tuple((self.process_of(one.stage, self._number(one)), self._pass(one)) for one in every)

    def left(self, process: int, step: int) -> tuple[Pass, ...]:
        """What is left to do, in order, after the batches before training step ``step``."""
        own = self._between(process, step, None)
        return tuple(self._pass(moment) for moment in own if moment.step < step)

    def opening(self, process: int) -> tuple[Message, ...]:
        """What a process sends before its first pass (``zero``: states leave their homes)."""
        return tuple(message for message in self._from_home() if message.source == process)

    def closing(self, step: int) -> tuple[Message, ...]:
        """Messages under way once all passes before training step ``step`` are done, in the order they were sent.

        They wait for passes that may never come. Who ends a run receives them; under ``zero`` the states then go home.
        """
        done = [
            self._pass(moment) for one in (step - 2, step - 1) if one >= self.begin for moment in self._of_step(one)
        ]
        later = [self._pass(moment) for one in (step, step + 1) for moment in self._of_step(one)]
        awaited = {message for one in later for message in one.receives}
        done.sort(key=lambda one: self._key(one.moment))
        return tuple(message for one in done for message in one.sends if message in awaited)

    def settling(self, process: int, step: int) -> tuple[Pass, ...]:
        """What is left of the rounds of updates of training steps before ``step``, in order (``data``, ``stages``).

        The passes hold messages alone: none is run. After them a process knows every update; it applies those that it
        has not yet, and all processes of a stage are alike.
        """
        later = sorted((moment for one in (step, step + 1) for moment in self._own(process, one)), key=self._key)
        kept = (_only_updates(self._pass(moment), step) for moment in later)
        return tuple(one for one in kept if one.receives or one.sends)

    def _between(self, process: int, step: int, end: int | None) -> list[Moment]:
        """Passes of a process from the first of one training step on, up to the first of another."""
        known = [one for one in (step - 1, step) if one >= self.begin]
        own = [moment for one in known for moment in self._own(process, one)]
        first = self._key(self._own(process, step)[0])
        last = None if end is None else self._key(self._own(process, end)[0])
        chosen = (one for one in own if self._key(one) >= first and (last is None or self._key(one) < last))
        return sorted(chosen, key=self._key)

    def _own(self, process: int, step: int) -> list[Moment]:
        own = [one for one in self._of_step(step) if self.process_of(one.stage, self._number(one)) == process]
        return sorted(own, key=self._key)

    def _of_step(self, step: int) -> list[Moment]:
        return [moment for worker in range(self.workers) for moment in moments(self.workers, step, worker)]

    def _key(self, moment: Moment) -> tuple[int, bool, int]:
        return moment.time, moment.backward != self.early_release, moment.stage

    def _number(self, moment: Moment) -> int:
        return moment.step * self.workers + moment.worker

    def _pass(self, moment: Moment) -> Pass:
        number, stage = self._number(moment), moment.stage
        receives = self._messages(moment, arriving=True)
        sends = self._messages(moment, arriving=False)
        applies = () if moment.backward else self._applied(stage, number)
        finishes = moment.backward and moment.worker == self.workers - 1
        return Pass(moment, self.version(stage, number), receives, sends, applies, finishes)

    def _applied(self, stage: int, number: int) -> tuple[int, ...]:
        """Updates that bring a process from the version of its last forward pass of a stage to that of this one."""
        before = number - self.replicas(stage)
        if self.setting in (CyclicSetting.SINGLE, CyclicSetting.ZERO) or before < self.begin * self.workers:
            return ()
        return tuple(range(self.version(stage, before), self.version(stage, number)))

    def _messages(self, moment: Moment, arriving: bool) -> tuple[Message, ...]:
        number, stage = self._number(moment), moment.stage
        if moment.backward:
            found = self._gradients(stage, number, arriving) + self._backward_track(stage, number, arriving)
        else:
            found = self._activations(stage, number, arriving) + self._forward_track(stage, number, arriving)
        return tuple(message for message in found if message.source != message.target)

    def _message(
        self, kind: Kind, stage: int, number: int, source: int, target: int, versions: range = range(0)
    ) -> Message:
        return Message(kind, stage, number // self.workers, number % self.workers, source, target, tuple(versions))

    def _activations(self, stage: int, number: int, arriving: bool) -> list[Message]:
        made = stage - 1 if arriving else stage
        if made < 0 or made == self.workers - 1:
            return []
        source, target = self.process_of(made, number), self.process_of(made + 1, number)
        return [self._message(Kind.ACTIVATION, made, number, source, target)]

    def _gradients(self, stage: int, number: int, arriving: bool) -> list[Message]:
        made = stage + 1 if arriving else stage
        if made == 0 or made == self.workers:
            return []
        source, target = self.process_of(made, number), self.process_of(made - 1, number)
        return [self._message(Kind.GRADIENT, made, number, source, target)]

    def _backward_track(self, stage: int, number: int, arriving: bool) -> list[Message]:
        made = number - 1 if arriving else number
        if self.setting is CyclicSetting.ZERO:
            return self._states(stage, made) + ([] if arriving else self._fresh(stage, number))
        if made % self.workers == self.workers - 1:
            return [] if arriving else self._first_update(stage, number)
        source, target = self.process_of(stage, made), self.process_of(stage, made + 1)
        return [self._message(Kind.PARTIAL, stage, made, source, target)]

    def _forward_track(self, stage: int, number: int, arriving: bool) -> list[Message]:
        if self.setting is CyclicSetting.ZERO:
            weights = self._weights(stage, number - 1 if arriving else number)
            complete = self._completed(stage, number) if arriving else None
            return weights if complete is None else weights + self._fresh(stage, complete)
        return self._arriving_update(stage, number) if arriving else self._passed_update(stage, number)

    def joins(self, stage: int, step: int) -> int:
        """The micro-batch before whose forward pass the update of a training step comes to the forward track."""
        return self._first_use(stage, step, CyclicRule.V2)

    def _first_use(self, stage: int, step: int, rule: CyclicRule) -> int:
        """The first micro-batch that may use what the update of a training step gave."""
        if rule is CyclicRule.V1:
            return (step + 2) * self.workers
        return (step + 1) * self.workers + self.workers - 1 - stage

    def _turn(self, stage: int, number: int) -> tuple[int, int] | None:
        """The update whose round through a stage's processes a forward pass is part of, and its place in that round."""
        for step in (number // self.workers - 2, number // self.workers - 1):
            place = number - self._first_use(stage, step, self.rule)
            if step >= self.begin and 0 <= place < self.replicas(stage):
                return step, place
        return None

    def _waits(self, stage: int, step: int) -> bool:
        """Whether the process that completed an update also runs the pass just before the first that may use it."""
        before = self._first_use(stage, step, self.rule) - 1
        again = before > self._last_of(step) and self.replicas(stage) > 1
        return again and self.process_of(stage, before) == self.process_of(stage, self._last_of(step))

    def _last_of(self, step: int) -> int:
        return step * self.workers + self.workers - 1

    def _first_update(self, stage: int, number: int) -> list[Message]:
        """From the pass that completed the sum to the process that needs it first."""
        if self._waits(stage, number // self.workers):
            return []
        target = self.process_of(stage, self._first_use(stage, number // self.workers, self.rule))
        return [self._message(Kind.UPDATE, stage, number, self.process_of(stage, number), target)]

    def _arriving_update(self, stage: int, number: int) -> list[Message]:
        turn = self._turn(stage, number)
        if turn is None:
            return []
        step, place = turn
        origin, here = self.process_of(stage, self._last_of(step)), self.process_of(stage, number)
        if here == origin:
            return []
        if place == 0 and not self._waits(stage, step):
            return [Message(Kind.UPDATE, stage, step, self.workers - 1, origin, here)]
        before = number - 1
        return [Message(Kind.UPDATE, stage, step, before % self.workers, self.process_of(stage, before), here)]

    def _passed_update(self, stage: int, number: int) -> list[Message]:
        turn = self._turn(stage, number + 1)
        if turn is None or (turn[1] == 0 and not self._waits(stage, turn[0])):
            return []
        return self._arriving_update(stage, number + 1)

    def _newest(self, stage: int, number: int) -> int:
        """The newest version on the forward track at a micro-batch's pass."""
        return max(
            self.begin, version(CyclicRule.V2, number % self.workers, stage, self.workers, number // self.workers)
        )

    def _weights(self, stage: int, number: int) -> list[Message]:
        """Along the forward track, from one micro-batch to the next."""
        if number < self.begin * self.workers:
            return [one for one in self._from_home() if one.kind is Kind.WEIGHTS and one.stage == stage]
        versions = range(self.version(stage, number + 1), self._newest(stage, number) + 1)
        source, target = self.process_of(stage, number), self.process_of(stage, number + 1)
        return [self._message(Kind.WEIGHTS, stage, number, source, target, versions)] if versions else []

    def _fresh(self, stage: int, number: int) -> list[Message]:
        """From the pass that made an update to the forward track, where it is next."""
        step = number // self.workers
        if number != self._last_of(step):
            return []
        target = self.process_of(stage, self.joins(stage, step))
        made = range(step + 1, step + 2)
        return [self._message(Kind.WEIGHTS, stage, number, self.process_of(stage, number), target, made)]

    def _completed(self, stage: int, number: int) -> int | None:
        """The micro-batch whose update comes to the forward track just before a forward pass."""
        step = number // self.workers - 1
        joins = step >= self.begin and number == self.joins(stage, step)
        return self._last_of(step) if joins else None

    def _states(self, stage: int, number: int) -> list[Message]:
        """Along the backward track, from one micro-batch to the next."""
        if number < self.begin * self.workers:
            return [one for one in self._from_home() if one.kind is Kind.STATES and one.stage == stage]
        step = number // self.workers
        newest = step + 1 if number == self._last_of(step) else step
        versions = range(self.version(stage, number + 1), newest + 1)
        source, target = self.process_of(stage, number), self.process_of(stage, number + 1)
        return [self._message(Kind.STATES, stage, number, source, target, versions)]

    def _from_home(self) -> list[Message]:
        if self.setting is not CyclicSetting.ZERO:
            return []
        first, found = self.begin * self.workers, []
        for stage in range(self.workers):
            versions = range(self.version(stage, first), self.begin + 1)
            for kind in (Kind.WEIGHTS, Kind.STATES):
                found.append(
                    self._message(kind, stage, first - 1, self.home(stage), self.process_of(stage, first), versions)
                )
        return [message for message in found if message.source != message.target]


def _only_updates(one: Pass, step: int) -> Pass:
    """The pass with nothing but messages that hold updates of training steps before ``step``."""
    receives, sends = (
        tuple(message for message in messages if message.kind is Kind.UPDATE and message.step < step)
        for messages in (one.receives, one.sends)
    )
    return replace(one, receives=receives, sends=sends)
