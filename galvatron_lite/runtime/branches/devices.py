"""Branches on several devices of one process, for inference: each device has a thread, and on a GPU a stream.

The thread that runs the model hands the calls of a branch to the thread of its device and goes on with a pending
output; so launches for one device do not wait for another's. Copies and their order are told by events. CPU devices run
the same code without streams; their threads share the process's cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import batch_of_call, call_model, map_tensors, move_batch, tensors_of
from galvatron_lite.model.graph import Layer
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.branches.parts import PlacedPart, place_parts
from galvatron_lite.runtime.branches.pending import (
    Applied,
    PendingTensor,
    Surroundings,
    nodes_of,
    pending,
    pick,
    template_of,
)
from galvatron_lite.runtime.branches.stand_in import StandIn, entrances, replace_module, resolve_outside, skeleton
from galvatron_lite.runtime.branches.templates import Foreseen


class DevicesModel(nn.Module):
    """A model for inference whose branches are on devices of this process; called like the model, or with a batch.

    Args:
        model: the user's model, changed in place and set to evaluation mode.
        plan: with branches of one device each; the trunk is on the first device.
        layers: of the model.
        batch: an example.
        devices: as many as the plan has.

    Raises:
        InputError: the plan does not fit the model or the devices.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, layers: Sequence[Layer], batch: Any, devices: Sequence[torch.device]
    ) -> None:
        super().__init__()
        parts = place_parts(plan, layers)
        _check(plan, parts, devices)
        self.home = devices[0]
        self._places = {number: _Place(devices[number]) for number in sorted({part.first for part in parts[1:]})}
        self._run: _Run | None = None
        self._shapes: dict[object, Any] = {}
        paths = [entrances(model, part.roots, batch) for part in parts[1:]]
        self._homes = {path: part.first for part, own in zip(parts[1:], paths, strict=True) for path in own}
        self._foreseen = {path: Foreseen(path, model.get_submodule(path)) for own in paths for path in own}
        self.trees = nn.ModuleList([skeleton(model, own) for own in paths])
        for tree, part, own in zip(self.trees, parts[1:], paths, strict=True):
            tree.to(devices[part.first])
            for path in own:
                module = tree.get_submodule(path)
                replace_module(model, module, StandIn(path, module, partial(self._call, part.name)))
        resolve_outside(model, [path for layer in parts[0].layers for path in layer.modules])
        self.module = model.to(self.home)
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own outputs for a batch, or called as it is; on the first device, without gradients."""
        with torch.inference_mode():
            self._run = _Run(self.home, self._shapes)
            try:
                return call_model(self.module, move_batch(batch_of_call(args, kwargs), self.home))
            finally:
                self._run.finish()
                self._run = None

    def _call(self, branch: str, stand_in: StandIn, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._run is None:
            remedy = "Use the object that auto_parallelize returned."
            raise InputError("call of", stand_in.path, remedy)
        place, foreseen = self._places[self._homes[stand_in.path]], self._foreseen[stand_in.path]
        made = _Call(self._run, branch, place, stand_in.stands_for, args, kwargs)
        template = foreseen(made.args, made.kwargs, 1, lambda tensor, _: template_of(tensor), stand_in.training)
        made.start()
        return pending(made, template.nest)


class _Place:
    """A device, its thread, and on a GPU the stream that it launches on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"branches on {device}")
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Do it behind all that was submitted before."""
        return self._thread.submit(work)

    def active(self) -> AbstractContextManager[object]:
        """Launches inside are on the stream."""
        stack = ExitStack()
        if self.stream is not None:
            stack.enter_context(torch.cuda.stream(self.stream))
        return stack


class _Run:
    """One run of the model; see ``pending.Pass``."""

    def __init__(self, device: torch.device, shapes: dict[object, Any]) -> None:
        self.device, self.shapes = device, shapes
        self.applied: list[Applied] = []
        self.calls: list[_Call] = []

    def finish(self) -> None:
        """Wait for what nobody asked for; its inputs must live until then."""
        for call in self.calls:
            call.finish()


@dataclass(frozen=True, slots=True)
class _Made:
    """What a call returned."""

    local: Any  # on the branch's device
    moved: Any  # on the first device
    done: torch.cuda.Event | None  # recorded behind the copy; None on a CPU


class _Call:
    """A call of a branch's module, on its device's thread."""

    def __init__(
        self, run: _Run, branch: str, place: _Place, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self.run, self.branch, self._place, self._module = run, branch, place, module
        self.args, self.kwargs = map_tensors((args, kwargs), self._admitted)
        self._around = Surroundings()
        self._made: Future[Any] | None = None
        run.calls.append(self)

    def start(self) -> None:
        """Hand it to the thread; it may begin when what it is given is there."""
        home = self.run.device
        ready = torch.cuda.current_stream(home).record_event() if home.type == "cuda" else None
        self._made = self._place.submit(partial(self._work, ready))

    def value(self) -> Any:
        """What it returned, on the first device."""
        made = self._result()
        if made.done is not None:
            stream = torch.cuda.current_stream(self.run.device)
            stream.wait_event(made.done)
            for tensor in tensors_of(made.moved):
                tensor.record_stream(stream)
        return made.moved

    def finish(self) -> None:
        """Wait until it was launched."""
        if self._made is not None:
            self._made.exception()

    def _result(self) -> _Made:
        assert self._made is not None
        made: _Made = self._made.result()
        return made

    def _admitted(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, PendingTensor):
            return tensor
        calls: list[_Call] = [node for node in nodes_of(tensor) if isinstance(node, _Call)]
        others = [call.branch for call in calls if call.branch != self.branch]
        if others:
            remedy = f"It reads what branch {others[0]} returned: they are not independent. Make them one branch."
            raise InputError("branch", self.branch, remedy)
        return tensor

    def _work(self, ready: torch.cuda.Event | None) -> _Made:
        stream = self._place.stream
        with self._around(), self._place.active():
            if stream is not None and ready is not None:
                stream.wait_event(ready)
            made: dict[int, Any] = {}
            args, kwargs = map_tensors((self.args, self.kwargs), lambda one: self._inside(one, made))
            local = self._module(*args, **kwargs)
            moved = map_tensors(local, lambda one: one.to(self.run.device, non_blocking=True))
            done = stream.record_event() if stream is not None else None
        return _Made(local, moved, done)

    def _inside(self, tensor: Tensor, made: dict[int, Any]) -> Tensor:
        """An argument on the branch's device."""
        if not isinstance(tensor, PendingTensor):
            return self._copied(tensor)
        node = tensor.node
        if isinstance(node, _Call):
            return pick(node._result().local, tensor.place)
        assert isinstance(node, Applied)
        if id(node) not in made:
            made[id(node)] = node.of(lambda one: self._inside(one, made))
        return pick(made[id(node)], tensor.place)

    def _copied(self, tensor: Tensor) -> Tensor:
        if self._place.stream is not None and tensor.device.type == "cuda":
            tensor.record_stream(self._place.stream)
        return tensor.to(self._place.device, non_blocking=True)


def _check(plan: Plan, parts: Sequence[PlacedPart], devices: Sequence[torch.device]) -> None:
    if len(devices) != plan.devices:
        raise InputError("devices", len(devices), f"The plan is for {plan.devices}.")
    for part in parts[1:]:
        if part.devices > 1:
            remedy = "In one process a branch is on one device; launch a process for each device instead."
            raise InputError(f"devices of {part.name}", part.devices, remedy)


def local_devices(kind: str, count: int) -> list[torch.device]:
    """So many devices of this process: GPUs, or the CPU as often.

    Raises:
        InputError: there are not so many GPUs.
    """
    if kind == "cpu":
        return [torch.device("cpu")] * count
    if torch.cuda.device_count() < count:
        raise InputError("devices", count, f"This process sees {torch.cuda.device_count()} GPU(s).")
    return [torch.device("cuda", number) for number in range(count)]
