"""Training runs with a thread for each process of a plan, which write checkpoints and resume from them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.cyclic.checkpoint import CyclicCheckpointer
from galvatron_lite.runtime.cyclic.setup import CyclicRuntime, programme_of
from tests.parallelism.cyclic.fleet import run_fleet
from tests.parallelism.cyclic.models import Case, split
from tests.parallelism.thread_group import Meeting

ADAM = partial(torch.optim.Adam, lr=0.01)


@dataclass
class ThreadPeers:
    """The peers of a process that is a thread."""

    rank: int
    meeting: Meeting

    def everyone(self, value: Any) -> list[Any]:
        return self.meeting.show(self.rank, value)


@dataclass
class Run:
    """The result of a process."""

    losses: dict[int, float]  # by number of the micro-batch
    parameters: dict[str, Tensor]  # the newest, by name
    buffers: dict[str, Tensor]  # of its stages, by name
    optimizers: dict[int, Any]  # states, by stage
    refusals: list[InputError] = field(default_factory=list)  # errors of checkpoints that could not be written


@dataclass(frozen=True)
class Training:
    """A model, its plan and its batches."""

    case: Case
    plan: Plan
    batches: Sequence[Any]
    factory: Any = ADAM
    scheduler: Any = None
    example: Any = None

    def run(
        self, start: Path | None = None, saves: Mapping[int, Path] | None = None, end: int | None = None
    ) -> list[Run]:
        """Train from the beginning, or from a checkpoint, to step ``end``, and write the checkpoints ``saves`` by step.

        Returns:
            The results by process.
        """
        meeting = Meeting(programme_of(self.plan).processes)

        def work(runtime: CyclicRuntime) -> Run:
            return self._process(runtime, meeting, start, saves or {}, end)

        return run_fleet(self.case[0], self.plan, self.case[1], self.example, work)[0]

    def _process(
        self, runtime: CyclicRuntime, meeting: Meeting, start: Path | None, saves: Mapping[int, Path], end: int | None
    ) -> Run:
        executor, refusals = runtime.executor, list[InputError]()
        checkpointer = CyclicCheckpointer(runtime, ThreadPeers(runtime.process, meeting))
        for states in executor.states.values():
            states.make_optimizer(self.factory, self.scheduler)
        begin = 0 if start is None else checkpointer.read(start)
        for step in range(begin, len(self.batches) if end is None else end):
            if step in saves:
                executor.drain(step)
                try:
                    checkpointer.write(saves[step], step)
                except InputError as error:
                    refusals.append(error)
            executor.feed(step, split(self.batches[step], len(self.plan.stages)))
            executor.run(executor.programme.passes(runtime.process, step))
        executor.drain(len(self.batches) if end is None else end)
        return Run(
            {number: float(loss) for number, loss in executor.desk.losses.items()},
            {name: one.detach().clone() for states in executor.states.values() for name, one in states.masters.items()},
            {name: one.clone() for part in runtime.parts.values() for name, one in part.buffers()},
            {stage: copy.deepcopy(states.optimizer.state_dict()) for stage, states in executor.states.items()},
            refusals,
        )


def check_same(resumed: Sequence[Run], whole: Sequence[Run]) -> None:
    """Check that the results of two runs are equal bit for bit; the resumed run may have fewer losses."""
    for one, other in zip(resumed, whole, strict=True):
        assert one.losses
        assert one.losses.items() <= other.losses.items()
        for mine, theirs in ((one.parameters, other.parameters), (one.buffers, other.buffers)):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
        torch.testing.assert_close(one.optimizers, other.optimizers, rtol=0, atol=0)
