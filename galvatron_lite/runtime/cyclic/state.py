"""The whole model's state, put together from the processes' stages, and shared out again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.cyclic.setup import CyclicRuntime


class WholeState:
    """Knows the entries of a model's ``state_dict()``.

    Args:
        model: whole, before it is cut.

    Attributes:
        names: of the entries, and the first name of the tensor behind each.
    """

    def __init__(self, model: nn.Module) -> None:
        first = {id(one): name for name, one in model.named_parameters()}
        state: dict[str, Any] = model.state_dict(keep_vars=True)
        known = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self.names: dict[str, str] = {name: first.get(id(value), name) for name, value in known.items()}
        self._model, self._buffers = model, frozenset(name for name, one in known.items() if id(one) not in first)

    def gather(self, runtime: CyclicRuntime) -> dict[str, Tensor]:
        """The state, on the CPU of every rank; all ranks call it."""
        here = {name: tensor.detach().cpu().clone() for name, tensor in self._kept(runtime)}
        found = {name: value.detach().cpu().clone() for name, value in self._valued()}
        for one in _everyone(here):
            found |= one
        return {name: found[first] for name, first in self.names.items()}

    def load(self, runtime: CyclicRuntime, state: Mapping[str, Tensor]) -> None:
        """Take this process's part of a whole state.

        Raises:
            InputError: an entry is missing, or has another shape.
        """
        known = {first: name for name, first in reversed(self.names.items())}
        with torch.no_grad():
            for name, tensor in _held(runtime):
                if name in known:
                    tensor.data.copy_(_entry(state, known[name], tensor))
            for name, buffer in self.rest(runtime).items():
                buffer.copy_(_entry(state, name, buffer))

    def even_out(self, runtime: CyclicRuntime) -> None:
        """Give every process the mean of the running statistics; the largest of counts. All ranks call it."""
        buffers = dict(_buffers(runtime))
        everyone = _everyone({name: buffer.cpu() for name, buffer in buffers.items()})
        for name, buffer in buffers.items():
            buffer.copy_(between([one[name] for one in everyone if name in one]))

    def rest(self, runtime: CyclicRuntime) -> dict[str, Tensor]:
        """Entries that have values here and belong to no stage of this process, by name."""
        own = {name for name, _ in _buffers(runtime)}
        return {name: one for name, one in self._valued() if name not in own}

    def _valued(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that have values here, whether a stage has them or none; those of a stage may be as at first."""
        for name, buffer in self._model.named_buffers(remove_duplicate=False):
            if name in self._buffers and not buffer.is_meta:
                yield name, buffer

    def _kept(self, runtime: CyclicRuntime) -> Iterator[tuple[str, Tensor]]:
        """What this process adds to the whole: of each stage one process is the home."""
        programme = runtime.executor.programme
        for stage, states in runtime.executor.states.items():
            if programme.home(stage) == runtime.process:
                yield from states.masters.items()
                yield from runtime.parts[stage].buffers()


def _held(runtime: CyclicRuntime) -> Iterator[tuple[str, Tensor]]:
    for stage, states in runtime.executor.states.items():
        yield from states.masters.items() if states.is_home else ()
        yield from runtime.parts[stage].buffers()


def _buffers(runtime: CyclicRuntime) -> Iterator[tuple[str, Tensor]]:
    for part in runtime.parts.values():
        yield from part.buffers()


def _everyone(value: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    if dist.get_world_size() == 1:
        return [value]
    everyone: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, value)
    return everyone


def between(values: Sequence[Tensor]) -> Tensor:
    """One value for all; theirs where they are equal."""
    first = values[0]
    if all(torch.equal(first, other) for other in values[1:]):
        return first
    stacked = torch.stack(list(values))
    return stacked.mean(0) if first.is_floating_point() or first.is_complex() else stacked.amax(0)


def _entry(state: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    if name not in state:
        raise InputError("state", name, "The state has no such entry. Give the state_dict of the whole model.")
    if tuple(state[name].shape) != tuple(like.shape):
        remedy = f"{name} has the shape {tuple(like.shape)}. Give the state_dict of the same model."
        raise InputError("state", tuple(state[name].shape), remedy)
    return state[name]
