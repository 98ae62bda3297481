"""What is kept at each time step of ``scripts/cyclic_study``: one device, cyclic beside all micro-batches at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cyclic_study_tasks import MICRO_BATCHES, Batch, Task
from cyclic_study_train import cyclic_model, micro_batches
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from galvatron_lite.model.zoo.convnets import ResNet
from galvatron_lite.parallelism.cyclic.rules import CyclicRule
from galvatron_lite.runtime.cyclic.model import CyclicModel
from measured import peak_of

ROUND = 2 * MICRO_BATCHES  # time steps of a training step
RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one task, in bytes."""

    task: str  # its name
    samples: int  # of a global batch
    # the most that autograd keeps in each time step of two training steps, all micro-batches at once; parameters and
    # the batch apart
    together: list[int]
    cyclic: list[int]  # the same of the cycle in steady state, forward passes of a time step before its backward passes
    early: list[int]  # the same, backward passes first
    # of one training step in steady state as the allocator saw it, with parameters, gradients and optimizer states:
    # ``together``, ``cyclic``, ``early``
    peaks: dict[str, int]


class _Holder:
    """What autograd keeps instead of a tensor; it goes when autograd lets it go."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Kept:
    """Counts the bytes that autograd keeps, each storage once."""

    def __init__(self, others: Callable[[], set[int]]) -> None:
        self._others = others
        self._holders: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """At present."""
        return sum(self._sizes.values())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what is kept of passes inside."""
        with saved_tensors_hooks(self._pack, lambda holder: holder.tensor):
            yield

    def _pack(self, tensor: Tensor) -> _Holder:
        holder, storage = _Holder(tensor), tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in self._others():
            self._holders[place] = self._holders.get(place, 0) + 1
            self._sizes[place] = storage.nbytes()
            weakref.finalize(holder, self._released, place)
        return holder

    def _released(self, place: int) -> None:
        self._holders[place] -= 1
        if not self._holders[place]:
            del self._holders[place], self._sizes[place]


def storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def measure_memory(task: Task) -> Memory:
    """Of a task's first batch."""
    (batch,) = task.batches(1, 0)
    peaks = {"together": peak_of(lambda: _stepper(task, batch))}
    for name in ("cyclic", "early"):
        peaks[name] = peak_of(lambda early=name == "early": _cyclic_stepper(task, batch, early))
    cyclic, early = (kept_cyclic(task, batch, early) for early in (False, True))
    return Memory(task.name, task.samples, 2 * kept_together(task, batch), cyclic, early, peaks)


def kept_together(task: Task, batch: Batch) -> list[int]:
    """The most in each time step: all micro-batches are in a stage at once, then in the next one."""
    model, forward, backward = task.make(0), list[int](), list[int]()
    kept = Kept(lambda: storages([*model.parameters(), *batch.values()]))

    def note(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        forward.append(kept.bytes)
        output.register_hook(lambda _gradient: backward.append(kept.bytes))

    for block in list(model.stages if isinstance(model, ResNet) else model.blocks)[:-1]:
        block.register_forward_hook(note)
    with kept.watching():
        loss = model(**batch)
    forward.append(kept.bytes)
    loss.backward()
    # a time step of the backward pass begins with what the one before it left
    return [*forward, forward[-1], *backward]


def kept_cyclic(task: Task, batch: Batch, early: bool) -> list[int]:
    """The most in each time step of the third and the fourth training step."""
    cyclic, most = _ready(task, batch, early), dict[int, int]()
    runtime, given = cyclic.runtime, storages(batch.values())

    def others() -> set[int]:
        return given | storages(one for part in runtime.parts.values() for one in part.model.parameters())

    kept = Kept(others)
    with kept.watching():
        for step in range(5):
            runtime.executor.feed(step, micro_batches(batch))
            for one in runtime.executor.programme.passes(runtime.process, step):
                before = kept.bytes
                runtime.executor.run((one,))
                most[one.moment.time] = max(most.get(one.moment.time, 0), before, kept.bytes)
    return [most[time] for time in range(2 * ROUND, 4 * ROUND)]


def _ready(task: Task, batch: Batch, early: bool) -> CyclicModel:
    cyclic = cyclic_model(task.make(0), batch, CyclicRule.V2, early=early)
    cyclic.optimizer(task.optimizer, lr=RATE)
    return cyclic


def _stepper(task: Task, batch: Batch) -> Callable[[], object]:
    model = task.make(0)
    optimizer = task.optimizer(model.parameters(), lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()

    return step


def _cyclic_stepper(task: Task, batch: Batch, early: bool) -> Callable[[], object]:
    cyclic = cyclic_model(task.make(0), batch, CyclicRule.V2, early=early)
    optimizer = cyclic.optimizer(task.optimizer, lr=RATE)
    return lambda: cyclic.train_step(batch, optimizer)
