"""Passes of processes that keep nothing: states come before a pass, and leave behind it (setting ``zero``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from galvatron_lite.parallelism.cyclic.exchange import MessageExchange
from galvatron_lite.parallelism.cyclic.executor import Executor
from galvatron_lite.parallelism.cyclic.flight import Desk, InFlight
from galvatron_lite.parallelism.cyclic.mailbox import Mailbox
from galvatron_lite.parallelism.cyclic.messages import CyclicMessage, CyclicPass, MessageContent
from galvatron_lite.parallelism.cyclic.programme import CyclicProgramme
from galvatron_lite.parallelism.cyclic.travelling import TravellingStates


class ZeroExchange(MessageExchange):
    """Messages that hold parameters and optimizer states."""

    def __init__(
        self, programme: CyclicProgramme, desk: Desk, states: Mapping[int, TravellingStates], mailbox: Mailbox
    ) -> None:
        super().__init__(programme, desk, states, mailbox)
        self._travelling = states

    def tell(self, message: CyclicMessage, value: object) -> None:
        """Send something small beside a message."""
        self._mailbox.tell(message, value)

    def hear(self, message: CyclicMessage) -> Any:
        """What was sent beside a message."""
        return self._mailbox.hear(message)

    def _likes(self, message: CyclicMessage) -> list[Tensor] | None:
        states = self._travelling[message.stage]
        if message.kind is MessageContent.WEIGHTS:
            return states.weights_likes(len(message.versions))
        return states.states_likes(len(message.versions), self._has_sum(message))

    def _put(self, message: CyclicMessage, tensors: list[Tensor]) -> None:
        states = self._travelling[message.stage]
        if message.kind is MessageContent.WEIGHTS:
            states.arrive(states.forward, message.versions, tensors)
        else:
            states.take_states(message.step, message.versions, self._has_sum(message), tensors)

    def _payload(self, message: CyclicMessage) -> list[Tensor]:
        states = self._travelling[message.stage]
        if message.kind is MessageContent.STATES:
            return states.give_states(message.step, message.versions, self._has_sum(message))
        # a new version comes from the backward track
        track = states.forward if message.versions[0] in states.forward else states.backward
        return states.weights(track, message.versions)

    def _has_sum(self, message: CyclicMessage) -> bool:
        """Behind the last worker, and from home, there is none."""
        return message.worker != self._programme.workers - 1


class ZeroExecutor(Executor):
    """A process's passes where states travel. Before the first pass they leave their homes; ``drain`` brings them
    there again.
    """

    states: Mapping[int, TravellingStates]
    _exchange: ZeroExchange

    def _make_exchange(self, mailbox: Mailbox) -> MessageExchange:
        return ZeroExchange(self.programme, self.desk, self.states, mailbox)

    def _open(self) -> None:
        first = self.programme.begin * self.programme.workers
        at_home = [stage for stage in self.states if self.programme.home(stage) == self._process]
        for stage in at_home:
            self.states[stage].depart(range(self.programme.version(stage, first), self.programme.begin + 1))
        # the first worker is back at the second stage after 2N - 2 time steps; home of the first stage it is itself
        time = 2 * first + 2 * self.programme.workers - 4
        self._exchange.send(self.programme.opening(self._process), time, self.programme.begin)
        for stage in at_home:
            if self.programme.process_of(stage, first) != self._process:
                self.states[stage].leave_forward()
                self.states[stage].leave_backward()

    def _finished(self, one: CyclicPass) -> None:
        stage, step, states = one.moment.stage, one.moment.step, self.states[one.moment.stage]
        states.apply(step, keep=self.programme.version(stage, self._number(one) + 1) <= step)
        if self.programme.process_of(stage, self.programme.joins(stage, step)) == self._process:
            states.forward[step + 1] = states.backward[step + 1]

    def _sent(self, one: CyclicPass, flight: InFlight | None) -> None:
        states = self.states[one.moment.stage]
        if flight is not None:
            states.release(flight.parameters)
        if self.programme.workers > 1:
            leave = states.leave_backward if one.moment.backward else states.leave_forward
            leave()

    def _settle(self, step: int) -> None:
        """Everything goes home, one stage after the other."""
        arriving = [message for message in self.programme.closing(step) if message.target == self._process]
        for message in arriving:
            self._exchange.receive([message])
            if message.kind is MessageContent.STATES:
                self._send_home(message.stage, step)
        for stage, states in self.states.items():
            states.leave_forward()
            if self.programme.home(stage) == self._process:
                self._take_home(stage, step)
        self._tell_options(step)

    def _send_home(self, stage: int, step: int) -> None:
        message = self._homeward(stage, step)
        if message.target != self._process:
            self._exchange.send([message], 2 * step * self.programme.workers, step)
            self.states[stage].leave_backward()

    def _take_home(self, stage: int, step: int) -> None:
        message = self._homeward(stage, step)
        if message.source != self._process:
            self._exchange.receive([message])
        self.states[stage].settle_home()

    def _tell_options(self, step: int) -> None:
        """Options of the optimizers are where updates are made; a stage's home is to know them, too."""
        last = self.programme.workers - 1
        for stage, states in self.states.items():
            message = self._homeward(stage, step, last)
            if message.target == last:
                continue
            if self._process == last:
                self._exchange.tell(message, states.options)
            elif self._process == message.target:
                states.options = self._exchange.hear(message)

    def _homeward(self, stage: int, step: int, source: int | None = None) -> CyclicMessage:
        """From the process that would run the next pass, or another one."""
        first = step * self.programme.workers
        versions: Sequence[int] = range(self.programme.version(stage, first), step + 1)
        holder = self.programme.process_of(stage, first) if source is None else source
        worker = self.programme.workers - 1
        return CyclicMessage(
            MessageContent.STATES, stage, step - 1, worker, holder, self.programme.home(stage), tuple(versions)
        )
