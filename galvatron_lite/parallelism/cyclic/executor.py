"""Runs those passes of a programme that are a process's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from galvatron_lite.model.batch import move_batch, tensors_of
from galvatron_lite.parallelism.cyclic.mailbox import (
    InFlight,
    MessageExchange,
    MicrobatchDesk,
    ProcessMailbox,
    Returned,
    StageOutput,
)
from galvatron_lite.parallelism.cyclic.programme import CyclicPass, CyclicProgramme, MessageContent
from galvatron_lite.parallelism.cyclic.rules import CyclicSetting
from galvatron_lite.parallelism.cyclic.stages import StagePart, StageStates
from galvatron_lite.parallelism.pipeline.runner import arrived, differentiable, template_of

Call = Callable[[StagePart, Any], Any]
"""Runs a stage's model on a micro-batch; on the last stage it returns the loss, a scalar."""


@dataclass(frozen=True, slots=True)
class SeededDraws:
    """Random numbers that depend on a pass's stage and micro-batch alone, not on what ran before it or where.

    The process's generators go on afterwards as if nothing had been drawn. Recomputation draws the same again:
    ``torch.utils.checkpoint`` keeps the state that it began with.
    """

    seed: int  # of the run, the same on every process
    device: torch.device  # where passes run

    @contextmanager
    def __call__(self, stage: int, number: int) -> Iterator[None]:
        """Run a pass of a stage and a micro-batch inside."""
        gpus = [self.device] if self.device.type == "cuda" else []
        digest = hashlib.sha256(f"{self.seed}:{stage}:{number}".encode()).digest()
        seed = int.from_bytes(digest[:7], "big")
        with torch.random.fork_rng(gpus, device_type=self.device.type if gpus else "cuda"):
            torch.default_generator.manual_seed(seed)
            if gpus:
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(seed)
            yield


class Executor:
    """A process's passes.

    Attributes:
        programme: set anew only while nothing is in flight.
        states: of the stages that this process runs.
        draws: the random numbers of a pass.
        desk: what lies between passes.
    """

    def __init__(
        self,
        programme: CyclicProgramme,
        process: int,
        parts: Mapping[int, StagePart],
        states: Mapping[int, StageStates],
        mailbox: ProcessMailbox,
        call: Call,
        device: torch.device,
        draws: SeededDraws,
    ) -> None:
        self.programme, self.states, self.desk, self.draws = programme, states, MicrobatchDesk(), draws
        self._process, self._parts, self._call, self._device = process, parts, call, device
        self._exchange = MessageExchange(programme, self.desk, states, mailbox)
        self._fed = -1
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
        for one, following in zip_longest(passes, passes[1:]):
            moment = one.moment
            self._exchange.clear(moment.time)
            self._exchange.receive(one.receives)
            # an update is passed on before it is applied: optimizers may change gradients
            early = [sent for sent in one.sends if sent.kind is MessageContent.UPDATE and not moment.backward]
            self._exchange.send(early, moment.time, moment.step)
            self._expect(following)
            (self._backward if moment.backward else self._forward)(one)
            self._exchange.send([sent for sent in one.sends if sent not in early], moment.time, moment.step)
            self._expect(following)
            number = self._number(one)
            if not moment.backward and moment.stage == self._stages_of(number)[-1]:
                del self.desk.batches[number]
        self._exchange.done(self.programme, self._fed)

    def drain(self, step: int) -> None:
        """End what is in flight, before training step ``step``, and go on from there with the delay that there is.

        All updates are applied. Parameters that are still to be used by that step are kept beside the newest.

        Raises:
            LaunchError: another process is gone, or silent for too long.
        """
        if self.programme.begin == step:
            return
        self.run(self.programme.left(self._process, step))
        for one in self.programme.settling(self._process, step):
            self._exchange.receive(one.receives)
            self._exchange.send(one.sends, one.moment.time, step)
        for stage, states in self.states.items():
            while states.updates:
                self._apply(stage, self._next[stage])
        self._exchange.finish()
        self.programme = replace(self.programme, begin=step, base=step - 1)

    def flush(self, step: int) -> None:
        """End what is in flight, and the delay: all processes go on with the same newest parameters alone."""
        self.drain(step)
        self.restart(step, step, {})

    def restart(self, step: int, base: int, older: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Set the training step that comes next; nothing may be in flight.

        Args:
            step: that one; the newest parameters have had as many updates.
            base: oldest version that it uses.
            older: by stage: values of the version before the newest, where passes here use them.
        """
        self.programme = replace(self.programme, begin=step, base=base)
        for stage, states in self.states.items():
            states.restart(step, older.get(stage))
            self._rest(stage)

    def _rest(self, stage: int) -> None:
        states = self.states[stage]
        self._parts[stage].bind(states.at(states.newest))

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
        taken = self.desk.handed.pop((stage, number), StageOutput(None, []))
        value, slots = arrived(taken.template, taken.tensors)
        with self.draws(stage, number):
            part.cut.check_ends()
            produced = part.cut.run(lambda: self._call(part, self.desk.batches[number]), value if stage else None)
        if part.cut.last:
            self.desk.losses[number] = produced.detach()
            produced = produced / self.programme.workers
        else:
            values = [tensor.detach() for tensor in tensors_of(produced)]
            self.desk.handed[stage + 1, number] = StageOutput(template_of(produced), values)
        outputs = differentiable(produced)
        shapes = [torch.empty_like(tensor, device="meta") for tensor in outputs]
        edges = [get_gradient_edge(tensor) for tensor in outputs]
        self.desk.flights[stage, number] = InFlight(one.version, parameters, slots, edges, shapes)
        self._next[stage] = number + self.programme.replicas(stage)
        states.forget_before(self.programme.version(stage, self._next[stage]))

    def _backward(self, one: CyclicPass) -> None:
        stage, number, step = one.moment.stage, self._number(one), one.moment.step
        part, states = self._parts[stage], self.states[stage]
        returned = self.desk.returned.pop((stage, number), Returned([], self.desk.losses.get(number)))
        flight = self.desk.flights.pop((stage, number))
        part.bind(flight.parameters)
        with states.adding(step, flight.parameters):
            if flight.outputs:
                torch.autograd.backward(flight.outputs, None if part.cut.last else returned.gradients)
        if stage:
            gradients = [slot.taken(self._device) for slot in flight.inputs]
            self.desk.returned[stage - 1, number] = Returned(gradients, returned.loss)
        del flight  # and with it what only this graph still used
        self._rest(stage)
        if one.finishes:
            states.updates[step] = states.sums.pop(step)  # the sum is complete: it is the mean gradient
            if self.programme.setting is CyclicSetting.SINGLE:
                self._apply(stage, self._next[stage])
                self._rest(stage)

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
