"""Layers on shared pictures and on the whole picture: what both make, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.parallelism.sharded.tensor import Rules
from galvatron_lite.parallelism.spatial.rules import PIXELS_RULES
from tests.parallelism import sharded_compare
from tests.parallelism.sharded_compare import Outcome, assert_equal, unexpected
from tests.parallelism.thread_group import ThreadGroup, grid_groups

STRICT = Rules(PIXELS_RULES.handlers, unexpected)
"""Nothing is gathered because there is no handler for it."""

GRIDS = [(2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (4, 1), (1, 4)]
Layer = Callable[..., Tensor]
same = assert_equal


def grid_of(group: ThreadGroup, rows: int, columns: int) -> tuple[ThreadGroup | None, ...]:
    down, along = grid_groups(group, rows, columns)
    return (None, down if rows > 1 else None, along if columns > 1 else None)


def alone(layer: Layer, picture: Tensor, parameters: Sequence[Tensor], seed: int) -> Outcome:
    weight = _direction(layer(picture, *parameters), seed)
    return sharded_compare.alone(lambda x, p: layer(x, *p.values()), picture, _named(parameters), weight)


def shared(
    layer: Layer,
    picture: Tensor,
    parameters: Sequence[Tensor],
    grid: tuple[int, int],
    seed: int,
    rules: Rules = STRICT,
) -> list[Outcome]:
    """The same where ranks share rows and columns; gradients are summed over them."""
    degrees = {picture.dim() - 2 + side: degree for side, degree in enumerate(grid) if degree > 1}
    weight = _direction(layer(picture, *parameters), seed)
    return sharded_compare.together(
        lambda x, p: layer(x, *p.values()), picture, _named(parameters), weight, degrees, rules
    )


def _named(parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(number): one.clone().requires_grad_() for number, one in enumerate(parameters)}


def _direction(output: Tensor, seed: int) -> Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=output.dtype)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def kept(run: Callable[[], Any]) -> list[Tensor]:
    """What autograd keeps of a forward pass."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return found
