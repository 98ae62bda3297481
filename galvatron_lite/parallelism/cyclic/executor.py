"""Runs the passes of one process of a programme."""

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
"""Runs the model of a stage on a micro-batch; the last stage returns the loss, a scalar."""


@dataclass(frozen=True, slots=True)
class SeededDraws:
    """Random numbers that depend only on the stage and micro-batch of a pass, not on its process or earlier passes.

    Afterwards the process's generators continue as if nothing had been drawn. Recomputation draws the same numbers
    again, as ``torch.utils.checkpoint`` saves the state at its beginning.
    """

    seed: int  # of the run, the same on all processes
    device: torch.device  # where passes run

    @contextmanager
    def __call__(self, stage: int, number: int) -> Iterator[None]:
        """Seed the generators for a pass of a stage and a micro-batch within the context."""
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
    """Runs the passes of one process.

    Attributes:
        programme: changes only while no micro-batch is in flight.
        states: of the stages that this process runs, by stage.
        draws: random numbers of a pass.
        desk: what passes leave for later ones.
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
        self._next: dict[int, int] = {}  # micro-batch of the next forward pass here, by stage

    def feed(self, step: int, microbatches: Sequence[Any]) -> None:
        """Add the micro-batches of a training step, one for each worker."""
        self._fed, first = step, step * self.programme.workers
        for number, microbatch in enumerate(microbatches, first):
            if self._stages_of(number):
                self.desk.batches[number] = move_batch(microbatch, self._device)

    def run(self, passes: Sequence[CyclicPass]) -> None:
        """Run passes in order.

        Raises:
            LaunchError: another process has ended, or does not answer in time.
        """
        for action, following in zip_longest(passes, passes[1:]):
            moment = action.moment
            self._exchange.clear(moment.time)
            self._exchange.receive(action.receives)
            # an update is sent on before it is applied: optimizers may change gradients
            early = [sent for sent in action.sends if sent.kind is MessageContent.UPDATE and not moment.backward]
            self._exchange.send(early, moment.time, moment.step)
            self._expect(following)
            (self._backward if moment.backward else self._forward)(action)
            self._exchange.send([sent for sent in action.sends if sent not in early], moment.time, moment.step)
            self._expect(following)
            number = self._number(action)
            if not moment.backward and moment.stage == self._stages_of(number)[-1]:
                del self.desk.batches[number]
        self._exchange.done(self.programme, self._fed)

    def drain(self, step: int) -> None:
        """Finish all passes before training step ``step``, and continue from there with delayed gradients.

        All updates are applied. Older parameters that the step will use are kept beside the newest.

        Raises:
            LaunchError: another process has ended, or does not answer in time.
        """
        if self.programme.begin == step:
            return
        self.run(self.programme.left(self._process, step))
        for action in self.programme.settling(self._process, step):
            self._exchange.receive(action.receives)
            self._exchange.send(action.sends, action.moment.time, step)
        for stage, states in self.states.items():
            while states.updates:
                self._apply(stage, self._next[stage])
        self._exchange.finish()
        self.programme = replace(self.programme, begin=step, base=step - 1)

    def flush(self, step: int) -> None:
        """``drain``, and end the delay: all processes continue with the same newest parameters."""
        self.drain(step)
        self.restart(step, step, {})

    def restart(self, step: int, base: int, older: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Set the next training step; no micro-batch may be in flight.

        Args:
            step: the next training step, and the number of updates of the newest parameters.
            base: oldest version that it uses.
            older: values of the version before the newest, by stage, if passes here use them.
        """
        self.programme = replace(self.programme, begin=step, base=base)
        for stage, states in self.states.items():
            states.restart(step, older.get(stage))
            self._bind_newest(stage)

    def _bind_newest(self, stage: int) -> None:
        states = self.states[stage]
        self._parts[stage].bind(states.at(states.newest))

    def _expect(self, following: CyclicPass | None) -> None:
        """Start to receive the messages of the next pass while this one computes."""
        if following is not None:
            self._exchange.expect(following.receives)

    def _forward(self, action: CyclicPass) -> None:
        stage, number = action.moment.stage, self._number(action)
        part, states = self._parts[stage], self.states[stage]
        while states.newest < action.version:
            self._apply(stage, number)
        parameters = states.at(action.version)
        part.bind(parameters)
        stage_input = self.desk.handed.pop((stage, number), StageOutput(None, []))
        value, slots = arrived(stage_input.template, stage_input.tensors)
        with self.draws(stage, number):
            part.cut.check_ends()
            output = part.cut.run(lambda: self._call(part, self.desk.batches[number]), value if stage else None)
        if part.cut.last:
            self.desk.losses[number] = output.detach()
            output = output / self.programme.workers
        else:
            values = [tensor.detach() for tensor in tensors_of(output)]
            self.desk.handed[stage + 1, number] = StageOutput(template_of(output), values)
        outputs = differentiable(output)
        shapes = [torch.empty_like(tensor, device="meta") for tensor in outputs]
        edges = [get_gradient_edge(tensor) for tensor in outputs]
        self.desk.flights[stage, number] = InFlight(action.version, parameters, slots, edges, shapes)
        self._next[stage] = number + self.programme.replicas(stage)
        states.forget_before(self.programme.version(stage, self._next[stage]))

    def _backward(self, action: CyclicPass) -> None:
        stage, number, step = action.moment.stage, self._number(action), action.moment.step
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
        del flight  # frees what only its graph uses
        self._bind_newest(stage)
        if action.finishes:
            states.updates[step] = states.sums.pop(step)  # complete: the mean gradient, as losses are divided
            if self.programme.setting is CyclicSetting.SINGLE:
                self._apply(stage, self._next[stage])
                self._bind_newest(stage)

    def _apply(self, stage: int, number: int) -> None:
        """Apply the next update of a stage, before the forward pass of micro-batch ``number``."""
        states, oldest = self.states[stage], self.programme.version(stage, number)
        states.forget_before(oldest)
        in_flight = {flight.version for place, flight in self.desk.flights.items() if place[0] == stage}
        states.apply(states.newest, keep=oldest <= states.newest or states.newest in in_flight)
        states.forget_before(oldest)

    def _stages_of(self, number: int) -> list[int]:
        """The stages of a micro-batch that this process runs."""
        return [stage for stage in self._parts if self.programme.process_of(stage, number) == self._process]

    def _number(self, action: CyclicPass) -> int:
        """The number of the micro-batch of a pass."""
        return action.moment.step * self.programme.workers + action.moment.worker
