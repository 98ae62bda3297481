"""Tensors in nests of mappings, tuples and lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest with every tensor changed; mappings and named tuples stay of their type."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {name: map_tensors(one, change) for name, one in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(one, change) for one in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor of a nest, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)
