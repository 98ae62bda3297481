"""What every process does, and what it sends to whom: the table that runtime and cost both read. No torch here.

Who runs a pass is told by ``roster``, what is sent by ``tracks``; here passes are put in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from galvatron_lite.parallelism.cyclic.messages import CyclicMessage, CyclicPass, MessageContent
from galvatron_lite.parallelism.cyclic.roster import Roster
from galvatron_lite.parallelism.cyclic.rules import CyclicSetting
from galvatron_lite.parallelism.cyclic.timeline import StagePass, moments
from galvatron_lite.parallelism.cyclic.tracks import activations, backward_track, forward_track, gradients
from galvatron_lite.parallelism.cyclic.zero_tracks import from_home


@dataclass(frozen=True, slots=True)
class CyclicProgramme(Roster):
    """Cyclic data parallelism of ``workers`` micro-batches over as many stages."""

    early_release: bool = False  # backward passes of a time step come before its forward passes (``single`` only)

    def passes(self, process: int, step: int) -> tuple[CyclicPass, ...]:
        """What a process does when it is given the batch of a training step, in order.

        It ends before the first pass that needs the next batch. Under ``single`` passes of the batch before are among
        them, and some of this batch are left for the next call; elsewhere they are those of this batch.
        """
        own = self._between(process, step, step + 1)
        return tuple(self._pass(moment) for moment in own)

    def all_passes(self, steps: range) -> tuple[tuple[int, CyclicPass], ...]:
        """Every pass of some training steps, each with the process that runs it; a process's own are in its order."""
        every = sorted((moment for step in steps for moment in self._of_step(step)), key=self._key)
        return tuple((self.process_of(one.stage, self._number(one)), self._pass(one)) for one in every)

    def left(self, process: int, step: int) -> tuple[CyclicPass, ...]:
        """What is left to do, in order, after the batches before training step ``step``."""
        own = self._between(process, step, None)
        return tuple(self._pass(moment) for moment in own if moment.step < step)

    def opening(self, process: int) -> tuple[CyclicMessage, ...]:
        """What a process sends before its first pass (``zero``: states leave their homes)."""
        return tuple(message for message in from_home(self) if message.source == process)

    def closing(self, step: int) -> tuple[CyclicMessage, ...]:
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

    def settling(self, process: int, step: int) -> tuple[CyclicPass, ...]:
        """What is left of the rounds of updates of training steps before ``step``, in order (``data``, ``stages``).

        The passes hold messages alone: none is run. After them a process knows every update; it applies those that it
        has not yet, and all processes of a stage are alike.
        """
        later = sorted((moment for one in (step, step + 1) for moment in self._pairs_of(process, one)), key=self._key)
        kept = (_only_updates(self._pass(moment), step) for moment in later)
        return tuple(one for one in kept if one.receives or one.sends)

    def _between(self, process: int, step: int, end: int | None) -> list[StagePass]:
        """Passes of a process from the first of one training step on, up to the first of another."""
        known = [one for one in (step - 1, step) if one >= self.begin]
        own = [moment for one in known for moment in self._pairs_of(process, one)]
        first = self._key(self._pairs_of(process, step)[0])
        last = None if end is None else self._key(self._pairs_of(process, end)[0])
        chosen = (one for one in own if self._key(one) >= first and (last is None or self._key(one) < last))
        return sorted(chosen, key=self._key)

    def _pairs_of(self, process: int, step: int) -> list[StagePass]:
        first, numbers = step * self.workers, range(self.workers)
        pairs = (one for one in product(numbers, numbers) if self.process_of(one[1], first + one[0]) == process)
        return sorted((moment for pair in pairs for moment in moments(step, *pair, self.workers)), key=self._key)

    def _of_step(self, step: int) -> list[StagePass]:
        numbers = range(self.workers)
        return [moment for pair in product(numbers, numbers) for moment in moments(step, *pair, self.workers)]

    def _key(self, moment: StagePass) -> tuple[int, bool, int]:
        return moment.time, moment.backward != self.early_release, moment.stage

    def _number(self, moment: StagePass) -> int:
        return moment.step * self.workers + moment.worker

    def _pass(self, moment: StagePass) -> CyclicPass:
        number, stage = self._number(moment), moment.stage
        receives = self._messages(moment, arriving=True)
        sends = self._messages(moment, arriving=False)
        applies = () if moment.backward else self._applied(stage, number)
        finishes = moment.backward and moment.worker == self.workers - 1
        return CyclicPass(moment, self.version(stage, number), receives, sends, applies, finishes)

    def _applied(self, stage: int, number: int) -> tuple[int, ...]:
        """Updates that bring a process from the version of its last forward pass of a stage to that of this one."""
        before = number - self.replicas(stage)
        if self.setting in (CyclicSetting.SINGLE, CyclicSetting.ZERO) or before < self.begin * self.workers:
            return ()
        return tuple(range(self.version(stage, before), self.version(stage, number)))

    def _messages(self, moment: StagePass, arriving: bool) -> tuple[CyclicMessage, ...]:
        number, stage = self._number(moment), moment.stage
        if moment.backward:
            found = gradients(self, stage, number, arriving) + backward_track(self, stage, number, arriving)
        else:
            found = activations(self, stage, number, arriving) + forward_track(self, stage, number, arriving)
        return tuple(message for message in found if message.source != message.target)


def _only_updates(one: CyclicPass, step: int) -> CyclicPass:
    """The pass with nothing but messages that hold updates of training steps before ``step``."""
    receives, sends = (
        tuple(message for message in messages if message.kind is MessageContent.UPDATE and message.step < step)
        for messages in (one.receives, one.sends)
    )
    return replace(one, receives=receives, sends=sends)
