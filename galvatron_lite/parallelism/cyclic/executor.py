"""Runs those passes of a programme that are a process's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.model.batch import move_batch
from galvatron_lite.parallelism.cyclic.draws import Draws, as_they_come
from galvatron_lite.parallelism.cyclic.exchange import MessageExchange
from galvatron_lite.parallelism.cyclic.flight import Desk, Handed, InFlight, Returned, handed, in_flight
from galvatron_lite.parallelism.cyclic.mailbox import Mailbox
from galvatron_lite.parallelism.cyclic.messages import CyclicMessage, CyclicPass, MessageContent
from galvatron_lite.parallelism.cyclic.programme import CyclicProgramme
from galvatron_lite.parallelism.cyclic.rules import CyclicSetting
from galvatron_lite.parallelism.cyclic.stages import StagePart
from galvatron_lite.parallelism.cyclic.states import StageStates
from galvatron_lite.parallelism.pipeline.transfer import arrived

Call = Callable[[StagePart, Any], Any]
"""Runs a stage's model on a micro-batch; on the last stage it returns the loss, a scalar."""


class Executor:
    """A process's passes.

    Args:
        programme: which passes, and which messages.
        process: this one.
        parts: the stages that it runs, by number.
        states: of these stages.
        mailbox: carries messages.
        call: runs a stage's model.
        device: where tensors live.
        draws: the random numbers of a pass.

    Attributes:
        programme: set anew only while nothing is in flight.
        states: of the stages that this process runs.
        draws: as given.
        desk: what lies between passes.
    """

    def __init__(
        self,
        programme: CyclicProgramme,
        process: int,
        parts: Mapping[int, StagePart],
        states: Mapping[int, StageStates],
        mailbox: Mailbox,
        call: Call,
        device: torch.device,
        draws: Draws = as_they_come,
    ) -> None:
        self.programme, self.states, self.desk, self.draws = programme, states, Desk(), draws
        self._process, self._parts, self._call, self._device = process, parts, call, device
        self._exchange = self._make_exchange(mailbox)
        self._is_open, self._fed = False, -1
        self._next: dict[int, int] = {}  # by stage: the micro-batch of its next forward pass here

    def feed(self, step: int, microbatches: Sequence[Any]) -> None:
        """Give the micro-batches of a training step, as many as workers."""
        self._fed, first = step, step * self.programme.workers
        for number, microbatch in enumerate(microbatches, first):
            if self._stages_of(number):
                self.desk.batches[number] = move_batch(microbatch, self._device)

    def run(self, passes: Sequence[CyclicPass]) -> None:
        """Run passes in order.

        Raises:
            LaunchError: another process is gone, or silent for too long.
        """
        if passes:
            self.begin()
        for one, following in zip_longest(passes, passes[1:]):
            time = one.moment.time
            self._exchange.clear(time)
            self._exchange.receive(one.receives)
            early, late = _split(one)
            self._exchange.send(early, time, one.moment.step)
            self._expect(following)
            if one.moment.backward:
                self._backward(one)
            else:
                self._forward(one)
            self._exchange.send(late, time, one.moment.step)
            self._sent(one, self.desk.flights.get((one.moment.stage, self._number(one))))
            self._expect(following)
            self._let_go(one)
        self._exchange.done(self.programme, self._fed)

    def begin(self) -> None:
        """Send what passes need before the first of them is run; ``run`` does it if nobody did."""
        if not self._is_open:
            self._open()
        self._is_open = True

    def drain(self, step: int) -> None:
        """End what is in flight, before training step ``step``, and go on from there with the delay that there is.

        All updates are applied. Parameters that are still to be used by that step are kept beside the newest.

        Raises:
            LaunchError: another process is gone, or silent for too long.
        """
        if self.programme.begin == step:
            return
        self.run(self.programme.left(self._process, step))
        self._settle(step)
        self._exchange.finish()
        self.programme = replace(self.programme, begin=step, base=step - 1)
        self._is_open = False

    def flush(self, step: int) -> None:
        """End what is in flight, and the delay: all processes go on with the same newest parameters alone."""
        self.drain(step)
        self.restart(step, step, {})

    def restart(self, step: int, base: int, older: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Say anew which training step comes next; nothing may be in flight.

        Args:
            step: that one; the newest parameters have had as many updates.
            base: oldest version that it uses.
            older: by stage: values of the version before the newest, where passes here use them.
        """
        self.programme = replace(self.programme, begin=step, base=base)
        for stage, states in self.states.items():
            states.restart(step, older.get(stage))
            self._parts[stage].bind(states.resting())

    def _make_exchange(self, mailbox: Mailbox) -> MessageExchange:
        return MessageExchange(self.programme, self.desk, self.states, mailbox)

    def _open(self) -> None:
        """Before the first pass."""

    def _finished(self, one: CyclicPass) -> None:
        """A stage's gradient is complete."""
        if self.programme.setting is CyclicSetting.SINGLE:
            self._apply(one.moment.stage, self._next[one.moment.stage])

    def _sent(self, one: CyclicPass, flight: InFlight | None) -> None:
        """A pass is over, and what it sends is sent; the flight is what it left."""

    def _settle(self, step: int) -> None:
        """Nothing is in flight: take part in what is left of the rounds of updates, and apply them all."""
        for one in self.programme.settling(self._process, step):
            self._exchange.receive(one.receives)
            self._exchange.send(one.sends, one.moment.time, step)
        for stage, states in self.states.items():
            while states.updates:
                self._apply(stage, self._next[stage])

    def _expect(self, following: CyclicPass | None) -> None:
        """Start to receive what the next pass needs while the present one computes."""
        if following is not None:
            self._exchange.expect(following.receives)

    def _forward(self, one: CyclicPass) -> None:
        stage, number = one.moment.stage, self._number(one)
        part, states = self._parts[stage], self.states[stage]
        while states.newest < one.version:
            self._apply(stage, number)
        parameters = states.at(one.version)
        part.bind(parameters)
        taken = self.desk.handed.pop((stage, number), Handed(None, []))
        value, slots = arrived(taken.template, taken.tensors)
        with self.draws(stage, number):
            produced = part.cut.run(lambda: self._call(part, self.desk.batches[number]), value if stage else None)
        if part.cut.last:
            self.desk.losses[number] = produced.detach()
            produced = produced / self.programme.workers
        else:
            self.desk.handed[stage + 1, number] = handed(produced)
        self.desk.flights[stage, number] = in_flight(one.version, parameters, slots, produced)
        self._next[stage] = number + self.programme.replicas(stage)
        states.forget_before(self.programme.version(stage, self._next[stage]))

    def _backward(self, one: CyclicPass) -> None:
        stage, number = one.moment.stage, self._number(one)
        part, states = self._parts[stage], self.states[stage]
        returned = self.desk.returned.pop((stage, number), Returned([], self.desk.losses.get(number)))
        flight = self.desk.flights.pop((stage, number))
        states.refill(one.version, flight.parameters)
        part.bind(flight.parameters)
        with states.adding(one.moment.step, flight.parameters):
            if flight.outputs:
                torch.autograd.backward(flight.outputs, None if part.cut.last else returned.gradients)
        if stage:
            gradients = [slot.taken(self._device) for slot in flight.inputs]
            self.desk.returned[stage - 1, number] = Returned(gradients, returned.loss)
        del flight  # and with it what only this graph still used
        part.bind(states.resting())
        if one.finishes:
            states.finish(one.moment.step)
            self._finished(one)
            part.bind(states.resting())

    def _apply(self, stage: int, number: int) -> None:
        """Apply the next update of a stage, before the forward pass of micro-batch ``number``."""
        states, oldest = self.states[stage], self.programme.version(stage, number)
        states.forget_before(oldest)
        waiting = {flight.version for place, flight in self.desk.flights.items() if place[0] == stage}
        states.apply(states.newest, keep=oldest <= states.newest or states.newest in waiting)
        states.forget_before(oldest)

    def _stages_of(self, number: int) -> list[int]:
        """This process's stages that a micro-batch passes here."""
        return [stage for stage in self._parts if self.programme.process_of(stage, number) == self._process]

    def _number(self, one: CyclicPass) -> int:
        return one.moment.step * self.programme.workers + one.moment.worker

    def _let_go(self, one: CyclicPass) -> None:
        """Of the micro-batch behind its last forward pass here."""
        number = self._number(one)
        if not one.moment.backward and one.moment.stage == self._stages_of(number)[-1]:
            del self.desk.batches[number]


def _split(one: CyclicPass) -> tuple[tuple[CyclicMessage, ...], tuple[CyclicMessage, ...]]:
    """Messages that can leave before a pass is run, and those that hold what it makes.

    An update is passed on before it is applied: optimizers may change gradients.
    """
    early = tuple(message for message in one.sends if message.kind is MessageContent.UPDATE and not one.moment.backward)
    return early, tuple(message for message in one.sends if message not in early)
