"""What a checkpoint holds of a run besides its tensors, and putting it back; states of an optimizer to be filled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_tensors
from galvatron_lite.runtime.checkpoint.manifest import Manifest, TensorRecord
from galvatron_lite.runtime.checkpoint.plain import alone, check_plain, generators
from galvatron_lite.runtime.parameters import Owned
from galvatron_lite.runtime.pieces import Parallel, held_buffers, held_parameter, parameter_name


def state_of(value: Any, place: str) -> Any:
    """The state of an object that has one (``state_dict()``), else the value itself, as plain data on the CPU.

    Raises:
        InputError: it could not be read again safely.
    """
    found = value.state_dict() if hasattr(value, "state_dict") else value
    check_plain(found, place)
    return map_tensors(found, alone)


def states_of(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """The states of several objects, by name."""
    return {name: state_of(value, name) for name, value in (values or {}).items()}


def give(target: Any, state: Any) -> None:
    """Give an object its state, where it takes one (``load_state_dict``)."""
    if hasattr(target, "load_state_dict"):
        target.load_state_dict(state)


def own_content(parallel: Parallel, data: Any) -> dict[str, Any]:
    """What is this process's own: random generators, data position, running statistics of its samples."""
    streams = getattr(parallel, "streams", ())
    return {
        "random": generators(),
        "streams": [stream.state() for stream in streams],
        "data": state_of(data, "data"),
        "buffers": {one.name: alone(one.tensor).clone() for one in held_buffers(parallel) if _differs(one.tensor)},
    }


def check_own_buffers(parallel: Parallel, kept: Mapping[str, Any]) -> None:
    """Refuse running statistics of other shapes.

    Raises:
        InputError: names the first.
    """
    for one in held_buffers(parallel):
        if one.name in kept["buffers"] and kept["buffers"][one.name].shape != one.tensor.shape:
            raise InputError("buffer", one.name, "The checkpoint has it of another shape. Use one of the same model.")


def put_own_buffers(parallel: Parallel, kept: Mapping[str, Any]) -> None:
    """Give this process its own running statistics."""
    for one in held_buffers(parallel):
        if one.name in kept["buffers"]:
            one.tensor.copy_(kept["buffers"][one.name])


def blank_states(parallel: Parallel, manifest: Manifest, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """States of this rank's parameters that are to be filled, by the parameters' names.

    Args:
        parallel: the model.
        manifest: says which tensors there are.
        values: entries that are no tensors.
    """
    names = {parameter_name(parallel, one): one for runtime in parallel.runtimes for one in runtime.owned}
    shapes = {name: held_parameter(parallel, one).shape for name, one in names.items()}
    found: dict[str, dict[str, Any]] = {}
    for entry, whole in manifest.tensors.items():
        name, _, key = entry.rpartition("/")
        if name in names and entry not in manifest.names:
            found.setdefault(name, {})[key] = _blank(names[name], whole, shapes[name])
    for entry, value in values.items():
        name, _, key = entry.rpartition("/")
        if name in names:
            found.setdefault(name, {})[key] = value
    return found


def check_optimizer(manifest: Manifest, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
    """Refuse another optimizer or scheduler than was saved.

    Raises:
        InputError: says which one it was.
    """
    for what, saved, given in (
        ("optimizer", manifest.optimizer, optimizer),
        ("scheduler", manifest.scheduler, scheduler),
    ):
        if given is not None and saved != type(given).__name__:
            there = "no states of one" if saved is None else f"the states of a {saved}"
            remedy = f"The checkpoint has {there}. Give the same kind, or none to load without its states."
            raise InputError(what, type(given).__name__, remedy)


def _differs(buffer: Tensor) -> bool:
    """Whether ranks may have other values of a buffer: what they learned from their samples; masks are alike."""
    return buffer.is_floating_point()


def _blank(one: Owned, record: TensorRecord, of_parameter: tuple[int, ...]) -> Tensor:
    """A tensor of a parameter's state, as this rank has it.

    Args:
        one: the parameter.
        record: the tensor, as it was saved.
        of_parameter: shape of the whole parameter.
    """
    like = one.updated.detach()
    dtype: torch.dtype = getattr(torch, record.dtype)
    if record.shape == of_parameter:
        return torch.zeros_like(like, dtype=dtype)
    if len(record.shape) == len(of_parameter) > 0:
        extents = zip(record.shape, of_parameter, like.shape, strict=True)
        return like.new_zeros([own if extent == full else extent for extent, full, own in extents], dtype=dtype)
    return torch.zeros(record.shape, dtype=dtype, device=like.device if record.shape else "cpu")
