"""The states of any torch optimizer as tensors of known shapes, so that they can travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError


@dataclass(frozen=True, slots=True)
class OptimizerEntry:
    """One state of one parameter."""

    index: int  # of the parameter
    key: str  # of the state
    like: Tensor  # its shape and dtype, without values; a scalar in double precision for a number
    device: torch.device | None = None  # where it lives; None for a number
    number: Callable[[Any], Any] | None = None  # what a number is made by; None for a tensor


Layout = tuple[OptimizerEntry, ...]


def layout_of(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], likes: Sequence[Tensor]) -> Layout:
    """The states that an optimizer has of parameters like these, once it has made a step. It is tried on zeros.

    Args:
        make: makes the optimizer of parameters.
        likes: shapes, dtypes and devices.

    Raises:
        InputError: a state is neither a tensor nor a number.
    """
    trial = [nn.Parameter(torch.zeros_like(like)) for like in likes]
    if not trial:
        return ()
    optimizer = make(trial)
    for parameter in trial:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return tuple(
        _entry(index, key, value)
        for index, parameter in enumerate(trial)
        for key, value in sorted(optimizer.state[parameter].items())
        if value is not None
    )


def states_likes(layout: Layout) -> list[Tensor]:
    """Shapes of what ``give_states`` returns."""
    return [*(entry.like for entry in layout), torch.empty(len(layout), dtype=torch.uint8, device="meta")]


def give_states(optimizer: torch.optim.Optimizer, layout: Layout, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The optimizer's states, and which of them there are (before the first step, or of unused parameters: none)."""
    found = [optimizer.state.get(parameters[entry.index], {}).get(entry.key) for entry in layout]
    there = torch.tensor([value is not None for value in found], dtype=torch.uint8)
    return [*(_sent(value, entry) for value, entry in zip(found, layout, strict=True)), there]


def take_states(
    optimizer: torch.optim.Optimizer, layout: Layout, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]
) -> None:
    """Give the optimizer states that ``give_states`` returned elsewhere, and no others."""
    *values, there = tensors
    optimizer.state.clear()
    for entry, value, is_there in zip(layout, values, there.tolist(), strict=True):
        if is_there:
            optimizer.state[parameters[entry.index]][entry.key] = _taken(value, entry)


def _entry(index: int, key: str, value: Any) -> OptimizerEntry:
    if isinstance(value, Tensor):
        return OptimizerEntry(index, key, torch.empty_like(value, device="meta"), value.device)
    if isinstance(value, (bool, int, float)):
        return OptimizerEntry(index, key, torch.empty((), dtype=torch.float64, device="meta"), number=type(value))
    remedy = "Under the setting zero an optimizer's states travel; use one whose states are tensors, or setting data."
    raise InputError(f"optimizer, state {key}", type(value).__name__, remedy)


def _sent(value: Any, entry: OptimizerEntry) -> Tensor:
    if value is None:
        return torch.zeros_like(entry.like, device="cpu")
    return value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _taken(value: Tensor, entry: OptimizerEntry) -> Any:
    return value.to(entry.device) if entry.number is None else entry.number(value.item())
