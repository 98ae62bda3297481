"""What each worker of ``scripts/cyclic_study`` sends at each time step: by the programme, and counted on processes."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cyclic_study_tasks import MICRO_BATCHES, Task, tasks
from cyclic_study_train import cyclic_model, micro_batches

from galvatron_lite.parallelism.cyclic.programme import CyclicProgramme
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting

WORKERS, ROUND = MICRO_BATCHES, 2 * MICRO_BATCHES
SETTLED, STEPS = 2, 4
"""Training step from which on messages are counted, and training steps that are run."""
LIMIT = 300.0  # seconds
COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "reduce", "barrier",
    "all_to_all_single", "gather", "scatter",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Messages:
    """Of one task, setting ``data``, rule ``cdp-v2``; bytes."""

    task: str  # its name
    stages: list[int]  # gradients of each stage
    programme: list[list[int]]  # sent by each worker at each time step of one training step in steady state
    counted: list[list[int]]  # the same, counted where the processes send
    collectives: int  # calls of collectives of all processes in that training step, counted


def measure_messages(names: Sequence[str]) -> list[Messages]:
    """Train a few steps of each task on as many processes as workers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cyclic_study_messages"])
    with tempfile.TemporaryDirectory() as folder, context.Pool(WORKERS) as pool:
        jobs = [(names, rank, str(Path(folder) / "store")) for rank in range(WORKERS)]
        found = pool.starmap_async(_work, jobs, chunksize=1).get(LIMIT)
    return [_messages(name, [one[name] for one in found]) for name in names]


def _messages(name: str, found: Sequence[_Sent]) -> Messages:
    stages = found[0].stages
    collectives = sum(one.collectives for one in found)
    return Messages(name, stages, by_programme(stages), [one.sent for one in found], collectives)


def by_programme(stages: list[int]) -> list[list[int]]:
    """Bytes sent by each worker at each time step of one round in steady state."""
    programme = CyclicProgramme(CyclicRule.V2, CyclicSetting.DATA, WORKERS)
    sent = [[0] * ROUND for _ in range(WORKERS)]
    for process in range(WORKERS):
        for step in (SETTLED - 1, SETTLED):
            for one in programme.passes(process, step):
                time = one.moment.time - ROUND * SETTLED
                if 0 <= time < ROUND:
                    sent[process][time] += sum(stages[message.stage] for message in one.sends)
    return sent


@dataclass(frozen=True, slots=True)
class _Sent:
    """What one process counted; see ``Messages``."""

    stages: list[int]
    sent: list[int]
    collectives: int


def _work(names: Sequence[str], rank: int, path: str) -> dict[str, _Sent]:
    """What one process does; it waits for the others, so that each has one such job."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORKERS)
    every = {task.name: task for task in tasks()}
    return {name: _count(every[name]) for name in names}


def _count(task: Task) -> _Sent:
    (batch,) = task.batches(1, 0)
    cyclic = cyclic_model(task.make(0), batch, CyclicRule.V2, CyclicSetting.DATA)
    cyclic.optimizer(task.optimizer, lr=1e-3)
    executor, sent, collectives = cyclic.runtime.executor, Counter[int](), Counter[int]()
    with ExitStack() as stack:
        time = [0]
        stack.enter_context(_seen("isend", lambda tensor: sent.update({time[0]: tensor.nbytes})))
        for name in COLLECTIVES:
            stack.enter_context(_seen(name, lambda _: collectives.update({time[0]: 1})))
        for step in range(STEPS):
            executor.feed(step, micro_batches(batch))
            for one in executor.programme.passes(cyclic.runtime.process, step):
                time[0] = one.moment.time - ROUND * SETTLED
                executor.run((one,))
    executor.drain(STEPS)
    stages = [sum(one.nbytes for one in executor.states[stage].trained) for stage in range(WORKERS)]
    counted = range(ROUND)
    return _Sent(stages, [sent[one] for one in counted], sum(collectives[one] for one in counted))


def _seen(name: str, note: Callable[[Any], None]) -> Any:
    """While it lasts, a function of ``torch.distributed`` tells its first argument."""
    function = getattr(dist, name)

    def seen(*args: Any, **kwargs: Any) -> Any:
        note(args[0] if args else None)
        return function(*args, **kwargs)

    return mock.patch.object(dist, name, seen)
