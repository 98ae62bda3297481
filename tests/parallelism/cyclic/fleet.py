"""All processes of a cyclic plan as threads of this one: their messages go through memory."""

from __future__ import annotations

import copy
import queue
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from galvatron_lite.errors import LaunchError
from galvatron_lite.model.graph import Layer
from galvatron_lite.parallelism.cyclic.mailbox import Lane, ProcessMailbox, lane_of, pack, unpack
from galvatron_lite.parallelism.cyclic.programme import CyclicMessage
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.cyclic.setup import CyclicOptions, CyclicRuntime, programme_of, set_up
from tests.parallelism.cyclic.models import split

T = TypeVar("T")
CPU = torch.device("cpu")
SGD = partial(torch.optim.SGD, lr=0.1)
PLAIN = CyclicOptions(CPU)


@dataclass
class Post:
    """What is under way, by lane."""

    lanes: dict[Lane, queue.SimpleQueue[tuple[CyclicMessage, Any]]] = field(
        default_factory=lambda: defaultdict(queue.SimpleQueue)
    )
    sent: dict[CyclicMessage, int] = field(default_factory=dict)
    """Bytes of every message."""


@dataclass
class MemoryMailbox(ProcessMailbox):
    """A process's mailbox; checks that messages arrive in the order in which they are asked for."""

    post: Post
    expected: list[CyclicMessage] = field(default_factory=list)

    def send(self, message: CyclicMessage, tensors: Sequence[Tensor], due: int = 0) -> None:
        packed = pack(tensors, CPU)
        self.post.sent[message] = packed.nbytes
        self.post.lanes[lane_of(message)].put((message, packed))

    def clear(self, time: int) -> None:
        pass

    def expect(self, message: CyclicMessage, likes: Sequence[Tensor]) -> None:
        self.expected.append(message)

    def receive(self, message: CyclicMessage, likes: Sequence[Tensor]) -> list[Tensor]:
        return unpack(self._next(message), likes)

    def send_object(self, message: CyclicMessage, value: object) -> None:
        self.post.lanes[lane_of(message)].put((message, value))

    def receive_object(self, message: CyclicMessage) -> Any:
        return self._next(message)

    def finish(self, which: Any = None) -> None:
        pass

    def _next(self, message: CyclicMessage) -> Any:
        try:
            found, value = self.post.lanes[lane_of(message)].get(timeout=60)
        except queue.Empty:
            raise LaunchError(f"{message} did not come") from None
        assert found == message
        return value


@dataclass
class Result:
    """What a process ended with.

    Attributes:
        parameters: the newest, by name.
        buffers: of its stages.
        losses: by number of the micro-batch.
        runtime: of the process.
    """

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    losses: dict[int, float]
    runtime: CyclicRuntime


def train(
    model: nn.Module,
    plan: Plan,
    layers: Sequence[Layer],
    batches: Sequence[Any],
    factory: Any = SGD,
    scheduler: Any = None,
    drains: Collection[int] = (),
    flushes: Collection[int] = (),
    example: Any = None,
    options: CyclicOptions = PLAIN,
) -> tuple[list[Result], Post]:
    """Train on these global batches and flush; by process. Before the steps in ``drains`` (``flushes``) it drains.
    ``example``: a batch, for a model that is no chain.
    """

    def work(runtime: CyclicRuntime) -> Result:
        executor = runtime.executor
        for states in executor.states.values():
            states.make_optimizer(factory, scheduler)
        for step, batch in enumerate(batches):
            if step in drains:
                executor.drain(step)
            if step in flushes:
                executor.flush(step)
            executor.feed(step, split(batch, len(plan.stages)))
            executor.run(executor.programme.passes(runtime.process, step))
        executor.flush(len(batches))
        return result_of(runtime)

    results, post = run_fleet(model, plan, layers, example, work, options)
    assert all(lane.empty() for lane in post.lanes.values()), "messages nobody took"
    return results, post


def run_fleet(
    model: nn.Module,
    plan: Plan,
    layers: Sequence[Layer],
    example: Any,
    work: Callable[[CyclicRuntime], T],
    options: CyclicOptions = PLAIN,
) -> tuple[list[T], Post]:
    """What each process makes of its runtime, and what was sent."""
    post, count = Post(), programme_of(plan).processes
    # one after the other: initial values are drawn from a generator that threads share
    fleet = [
        set_up(copy.deepcopy(model), plan, layers, example, process, MemoryMailbox(post), options)
        for process in range(count)
    ]
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, fleet)), post


def result_of(runtime: CyclicRuntime) -> Result:
    states = runtime.executor.states.values()
    parameters = {name: one.detach().clone() for stage in states for name, one in stage.masters.items()}
    buffers = {name: one.clone() for part in runtime.parts.values() for name, one in part.buffers()}
    desk = runtime.executor.desk
    assert not any((desk.batches, desk.handed, desk.returned, desk.flights)), "left on the desk"
    losses = {number: float(loss) for number, loss in runtime.executor.desk.losses.items()}
    return Result(parameters, buffers, losses, runtime)
