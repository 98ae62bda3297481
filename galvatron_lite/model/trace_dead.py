"""Parameters that train nothing: they never reach what a model returns, or the loss where one is given."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from galvatron_lite.model.graph import DeadParameters
from galvatron_lite.model.trace_flow import Flow


def dead_parameters(model: nn.Module, flow: Flow, outputs: Any) -> tuple[DeadParameters, ...]:
    """Parameters of which no output is made, by the outermost modules that hold no others; shared ones count once.

    A parameter counts as living where it may decide what is run, where the model remembers what was made of it, and
    where a buffer that reaches an output may have been written with it.

    Args:
        model: that ran.
        flow: of its run.
        outputs: what it returned, or the loss.
    """
    living = flow.reaching(everything_in(outputs), model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    dead = {name for name, bit in flow.parameters.items() if not living & bit}
    return tuple(_outermost(model, "", {key: name for key, name in names.items() if name in dead}, set()))


def _outermost(module: nn.Module, path: str, dead: Mapping[int, str], told: set[int]) -> Iterator[DeadParameters]:
    own = {id(parameter): parameter for parameter in module.parameters()}
    if path and own and own.keys() <= dead.keys():
        items = sum(parameter.numel() for key, parameter in own.items() if key not in told)
        told |= own.keys()
        if items:
            yield DeadParameters(path, items)
        return
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) in dead and id(parameter) not in told:
            told.add(id(parameter))
            yield DeadParameters(_join(path, name), parameter.numel())
    for name, child in module.named_children():
        yield from _outermost(child, _join(path, name), dead, told)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def everything_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor in a value: nests of mappings, sequences, sets, dataclasses and plain objects."""
    met = set[int]() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in met and not isinstance(value, (str, bytes, int, float, nn.Module, type, type(None))):
        met.add(id(value))
        for part in _parts(value):
            yield from everything_in(part, met)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [*value.values()]
    if isinstance(value, Collection):
        return [*value]
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return [*vars(value).values()] if hasattr(value, "__dict__") else []
